"""Rename a run: copy its database to the new name, rename its output folder, drop the old database.

MongoDB cannot rename a database. ``renaming`` in the ``Run`` of both databases keeps processes out, so that a
killed renaming leaves the run under one name or none, and the same command finishes it:

| old database | new database      | the same command                 |
|--------------|-------------------|----------------------------------|
| unmarked     | marked, importing | starts over; the old run opens   |
| marked       | marked, importing | starts over; no process opens it |
| marked       | marked            | drops the old database           |
| gone         | marked            | removes the mark                 |
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from pymongo.asynchronous.database import AsyncDatabase

from agentrl.config.schema import RunConfig
from agentrl.documents.run import FLAGS, SCHEMA, flags_key
from agentrl.errors import ConfigError, RunMissingError, StoreError
from agentrl.store.admin.runs import RunAdmin
from agentrl.store.admin.transfer import Transfer
from agentrl.store.client import open_connection
from agentrl.store.mechanics.connection import Connection, Json, Repository, database_call
from agentrl.store.names import GATE, RUN, SETTINGS, VERSION
from agentrl.store.schema import holds_run, prepare

_STATES: Final = "*checkpoint-*/state.json"

Moves = Sequence[tuple[Path, Path]]
"""Folders of the run: the path under the old and under the new name, which may be the same."""


async def rename_run(
    run: RunConfig, new: str, alive_seconds: float, *, on_documents: Callable[[int], None] | None = None
) -> list[Path]:
    """Rename ``run``, or finish a renaming that was killed, as ``Rename.run`` does; return its folders."""
    named = await open_connection(replace(run, run_name=new))  # refuses a name that differs in case only
    await named.close()
    connection = await open_connection(run)
    try:
        return await Rename(connection, new, on_documents=on_documents).run(alive_seconds)
    finally:
        await connection.close()


class Rename(Repository):
    """Renames the run of a connection; ``on_documents`` gets the number of documents of each page."""

    def __init__(
        self, connection: Connection, new: str, *, on_documents: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(connection)
        self._old, self._new = connection.database, connection.client[new]
        self._names = [self._old.name, new]
        self._on_documents = on_documents

    @database_call
    async def run(self, alive_seconds: float) -> list[Path]:
        """Rename the run, or finish a renaming; return its folders.

        Raises RunMissingError; StoreError for a live run and a name that is taken; ConfigError for a folder
        that cannot be renamed. The run then keeps its name.
        """
        here, there = await self._mark(self._old), await self._mark(self._new)
        is_copied = there.get("renaming") == self._names and not there.get("importing")
        if not here and not is_copied:
            raise RunMissingError(f"there is no run {self._names[0]!r}", hint="agentrl runs lists the runs")
        moves: Moves = []
        if here:
            if not (begun := here.get("renaming") == self._names):
                await holds_run(self._old)
                await self._require_free(there)
            moves = await self._moves(begun=begun)
            if not (begun and is_copied):
                await self._copy(moves, alive_seconds)
        await self._connection.client.drop_database(self._names[0])
        await self._new[RUN].update_one({"_id": SCHEMA}, {"$unset": {"renaming": ""}})
        return [after for _, after in moves]

    async def _mark(self, database: AsyncDatabase[Json]) -> Json:
        return await database[RUN].find_one({"_id": SCHEMA}) or {}

    async def _require_free(self, there: Json) -> None:
        ours = there.get("renaming") == self._names and there.get("importing")
        if not ours and await self._new.list_collection_names():
            raise StoreError(
                f"MongoDB at {self._connection.host} has a database {self._names[1]!r} already",
                hint="give a name that no run has",
            )

    async def _copy(self, moves: Moves, alive_seconds: float) -> None:
        """Make the new database whole; without success both databases and folders are as before."""
        old, new = self._old, self._new
        await old.client.drop_database(new.name)
        schema = await self._mark(old)
        mark = {**schema, "importing": True, "renaming": self._names}
        await new[RUN].insert_one(mark)
        await prepare(old)  # an older build of this schema version may not know the mark
        await old[RUN].update_one({"_id": SCHEMA}, {"$set": {"renaming": self._names}})
        try:
            await RunAdmin(self._connection).require_ended(alive_seconds)
            await prepare(new)
            await new[GATE].delete_many({})  # the run brings its own
            await Transfer(self._connection, on_documents=self._on_documents).copy(new)
            await self._rewrite_paths(moves)
            _move(moves, self._names[1])
        except Exception:
            with contextlib.suppress(StoreError, OSError):
                _move([(after, before) for before, after in moves], old.name)
            await old.client.drop_database(new.name)
            await old[RUN].update_one({"_id": SCHEMA}, {"$unset": {"renaming": ""}})
            raise
        await new[RUN].update_one({"_id": SCHEMA}, {"$unset": {"importing": ""}})

    async def _moves(self, *, begun: bool) -> Moves:
        """Return the run's folders. Raises ConfigError if one is not the run's alone, or a new one exists."""
        flags = await self._old[SETTINGS].find_one({"_id": flags_key("train")}) or {}
        values = flags.get("values", {})
        output = Path(values.get("output_dir") or f"output/{self._names[0]}")
        places = [output]
        if values.get("fallback_output_dir"):
            places.append(Path(values["fallback_output_dir"]) / self._names[0])
        moves = [(place, _renamed(place, *self._names)) for place in places]
        if begun:
            return moves
        published = await self._old[VERSION].find_one({"train_step": {"$ne": None}, "pruned_at": None})
        if await RunAdmin(self._connection).output_folder("rename") is None and published is not None:
            raise ConfigError(
                f"this machine has no folder {output}, and the run published {published['location']}",
                hint="start this command on the trainer's machine, in its working folder",
            )
        for before, after in moves:
            if after != before and after.exists():
                raise ConfigError(f"{after} exists already", hint="give another name, or move that folder")
        return moves

    async def _rewrite_paths(self, moves: Moves) -> None:
        """Give the new database the run's new name and paths."""
        for key in map(flags_key, FLAGS):
            stored = await self._new[SETTINGS].find_one({"_id": key})
            if stored is None:
                continue
            values = stored["values"]
            changed = {name: self._names[1] for name in ("run_name",) if name in values}
            if values.get("output_dir"):
                changed["output_dir"] = str(_renamed(Path(values["output_dir"]), *self._names))
            fields = {f"values.{name}": value for name, value in changed.items()}
            if fields:
                await self._new[SETTINGS].update_one({"_id": key}, {"$set": fields})
        async for version in self._new[VERSION].find({}, {"location": 1}):
            for before, after in moves:
                location, root = Path(version["location"]), before.resolve()
                if location.is_relative_to(root):
                    moved = after.parent.resolve() / after.name / location.relative_to(root)
                    await self._new[VERSION].update_one(
                        {"_id": version["_id"]}, {"$set": {"location": str(moved)}}
                    )


def _renamed(folder: Path, old: str, new: str) -> Path:
    return folder.with_name(new) if folder.name == old else folder


def _move(moves: Moves, run_name: str) -> None:
    """Rename the folders that exist, and name the run in their checkpoints. Raises StoreError."""
    try:
        for before, after in moves:
            if before.exists() and before != after:
                before.rename(after)
            for state in after.glob(_STATES):
                content = {**json.loads(state.read_text(encoding="utf-8")), "run_name": run_name}
                written = state.with_suffix(".tmp")
                written.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
                written.replace(state)
    except (OSError, ValueError) as error:
        raise StoreError(
            f"a folder of the run cannot be renamed: {error}",
            hint="the run keeps its name; repair the folder",
        ) from error
