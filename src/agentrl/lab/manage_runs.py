"""Manage a run as a whole: its tags and note, its folders, its name, and its deletion."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from pymongo.asynchronous.database import AsyncDatabase

from agentrl.base.atomic_folder import delete_folder, remove_leftovers, replace_file
from agentrl.base.folder_owner import Owner, hand_over, read_owner, require_alone
from agentrl.config.schema import RunConfig
from agentrl.documents.document import replace_surrogates
from agentrl.documents.run import (
    FLAGS_PREFIX,
    PARENT,
    REMARKS,
    SCHEMA,
    TRAIN_ROLE,
    RunFact,
    flags_key,
)
from agentrl.documents.training import (
    state_files,
)
from agentrl.errors import AgentRLError, ConfigError, RunMissingError, StoreError
from agentrl.lab.transfer import Transfer, make_run
from agentrl.store.client import open_connection
from agentrl.store.mechanics.connection import (
    GATE,
    RUN,
    SETTINGS,
    SETTLE_SECONDS,
    VERSION,
    Connection,
    Json,
    Repository,
    database_call,
    id_prefix,
)
from agentrl.store.run_list import Runs
from agentrl.store.schema import holds_run, prepare
from agentrl.store.settings import Ancestry, Settings

_TAG: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,31}")
_MAX_TAGS: Final = 20
_MAX_NOTE: Final = 500


class RunAdmin(Repository):
    """The calls on a run as a whole, also on one that is marked. They need the rights of an administrator."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.beside(connection.database.name))

    @database_call
    async def tag(self, add: Collection[str], remove: Collection[str]) -> tuple[str, ...]:
        """Add and remove tags, and return those that the run has then. Raises ConfigError for a bad tag."""
        for name in (*add, *remove):
            if not _TAG.fullmatch(name):
                raise ConfigError(
                    f"the tag is {name[:80]!r}", hint="use up to 32 letters, digits, '_', '.', ':' and '-'"
                )
        if both := sorted(set(add) & set(remove)):
            raise ConfigError(f"tag {both[0]!r} is both added and removed", hint="leave one out")
        tags = sorted(({*(await self.remarks()).tags} - {*remove}) | {*add})
        if len(tags) > _MAX_TAGS:
            raise ConfigError(
                f"the run would have {len(tags)} tags, and may have {_MAX_TAGS}", hint="remove some: -TAG"
            )
        await self._write({"tags": tags})
        return tuple(tags)

    @database_call
    async def note(self, text: str) -> None:
        """Store the note in place of the earlier one; an empty text removes it. Raises ConfigError."""
        text = replace_surrogates(text.strip())
        if len(text) > _MAX_NOTE:
            raise ConfigError(
                f"the note has {len(text)} characters, and may have {_MAX_NOTE}", hint="shorten it"
            )
        await self._write({"note": text or None})

    @database_call
    async def require_ended(self, alive_seconds: float) -> None:
        """Raise StoreError, which names who works on the run, unless nobody does."""
        name = self._connection.database.name
        if holders := await Runs(self._connection).holders(name, alive_seconds):
            raise StoreError(
                f"run {name!r} is live: {', '.join(holders[:5])}" + (", …" if len(holders) > 5 else ""),
                hint="stop its processes; one that was killed on another machine counts until its heartbeat"
                " is too old or its lease has run out (--lease_seconds)",
            )

    @database_call
    async def output_folder(self, verb: str = "delete") -> Path | None:
        """Return the output folder of the run's trainer on this machine; None if there is none.

        ``verb`` says what is to be done with it. Raises ConfigError for a folder without weights or
        checkpoints, one that holds the working or the home folder, a link, one that does not hold the newest
        weights that the run published, and one that another run of the server has too.
        """
        database = self._connection.database
        trainer = (await Settings(self._connection).resolved()).get(TRAIN_ROLE)
        given = str((trainer and trainer.values.get("output_dir")) or f"output/{database.name}")
        newest = await self._collection(VERSION).find_one(await own_versions(database), sort=[("_id", -1)])
        try:
            folder = _output_at(Path(given), None if newest is None else newest["location"], verb)
        except OSError as error:
            raise ConfigError(
                f"{given} cannot be read: {error.strerror}", hint=f"{verb} it by hand"
            ) from error
        if folder is None:
            await asyncio.to_thread(remove_leftovers, Path(given).parent)  # of a deletion that was killed
            return None
        owner = await Settings(self._connection).owner(makes=False)
        await asyncio.to_thread(require_alone, folder, owner, verb)
        same = {"_id": {"$regex": f"^{flags_key(TRAIN_ROLE)}(@|$)"}, "values.output_dir": given}
        for name in set(await self._connection.databases()) - {database.name}:
            if await database.client[name][SETTINGS].find_one(same, {"_id": 1}) is not None:
                raise ConfigError(f"{folder} is the output of run {name!r} too", hint=f"{verb} it by hand")
        return folder

    @database_call
    async def delete(self, folder: Path | None, alive_seconds: float) -> None:
        """Delete the run's output folder if it is given, and then its database.

        The database goes last: it names the folder, so that the same call finishes one that was killed.
        Raises StoreError for a live run and one that has children, AgentRLError for a folder that cannot be
        deleted.
        """
        await self.require_ended(alive_seconds)
        ancestry, name = Ancestry(self._connection), self._connection.database.name
        await ancestry.require_childless("deleted")
        parent = await ancestry.parent()
        facts = self._collection(RUN)
        await facts.update_one({"_id": SCHEMA}, {"$set": {"deleting": True}})
        await asyncio.sleep(SETTLE_SECONDS)
        try:
            await self.require_ended(alive_seconds)  # a process may have begun to work before the mark
        except StoreError:
            await facts.update_one({"_id": SCHEMA}, {"$unset": {"deleting": ""}})
            raise
        await self._require_deleting()
        if folder is not None:
            try:
                await asyncio.to_thread(delete_folder, folder)
            except OSError as error:
                raise AgentRLError(
                    f"{folder} cannot be deleted: {error.strerror}; the database is kept",
                    hint="delete the folder by hand, and repeat this command",
                ) from error
            await self._require_deleting()
        await self._connection.client.drop_database(name)
        if parent is not None:  # a note without a run is harmless, and a run without a note is not
            await Ancestry(self._connection.beside(parent.run)).release(name)

    async def _require_deleting(self) -> None:
        """Raise RunMissingError if another call has deleted the run: one of its name may be a new run."""
        if await self._collection(RUN).find_one({"_id": SCHEMA, "deleting": True}) is None:
            raise RunMissingError(
                f"run {self._connection.database.name!r} has been deleted by another call",
                hint="agentrl runs lists the runs",
            )

    @database_call
    async def is_unfinished(self) -> bool:
        """Return whether the database holds what an import or a fork left, and no run."""
        schema = await self._collection(RUN).find_one({"_id": SCHEMA}) or {}
        return bool(schema.get("importing")) and "renaming" not in schema

    @database_call
    async def delete_unfinished(self) -> None:
        """Drop such a database. Raises StoreError if the process that makes a run of it lives."""
        async with make_run(self._connection) as making:
            await making.drop()

    @database_call
    async def remarks(self) -> RunFact:
        """Return the run's tags and note."""
        return await self._one(RunFact, RUN, {"_id": REMARKS}) or RunFact(id=REMARKS)

    async def _write(self, fields: Json) -> None:
        await self._collection(RUN).update_one({"_id": REMARKS}, {"$set": fields}, upsert=True)


async def own_versions(database: AsyncDatabase[Json]) -> Json:
    """Return the query of the versions that the run itself has published, and none of its parent's."""
    parent = await database[RUN].find_one({"_id": PARENT}, {"step": 1})
    return {"train_step": {"$ne": None}, "step": {"$gt": 0 if parent is None else parent["step"]}}


def _output_at(path: Path, published: str | None, verb: str) -> Path | None:
    """Return the absolute folder of a trainer's output; None if there is none. Raises as its caller.

    ``published`` is the folder of the newest weights.
    """
    if path.is_symlink():
        raise ConfigError(f"{path} is a link", hint=f"{verb} what it points to by hand")
    if not path.is_dir():
        return None
    folder = path.resolve()
    if _holds_more(folder):
        raise ConfigError(f"{folder} holds more than a run's output", hint=f"{verb} its content by hand")
    if not (folder / "weights").is_dir() and not any(state_files(folder)):
        raise ConfigError(f"{folder} has neither weights nor checkpoints", hint=f"{verb} it by hand")
    if published is not None and not Path(published).resolve().is_relative_to(folder):
        raise ConfigError(
            f"{folder} does not hold the newest weights that the run published: {published}",
            hint=f"start this command in the trainer's working folder, or {verb} the folder by hand",
        )
    return folder


def _require_movable(folder: Path, owner: Owner) -> None:
    """Raise ConfigError for a link, and for a folder that holds more than the output of ``owner``."""
    if folder.is_symlink() or _holds_more(folder.resolve()):
        raise ConfigError(
            f"{folder}, of an earlier start, is a link, or holds more than a run's output",
            hint="rename it by hand",
        )
    require_alone(folder, owner, "rename")


def _holds_more(folder: Path) -> bool:
    return any(other.is_relative_to(folder) for other in (Path.cwd().resolve(), *_home()))


def _home() -> list[Path]:
    """Return the home folder, if the user has one: a number without a name, as in containers, has none."""
    try:
        return [Path.home().resolve()]
    except RuntimeError:
        return []


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

        Raises RunMissingError; StoreError for a live run, one that has children and a name that is taken;
        ConfigError for a folder that cannot be renamed. The run then keeps its name.
        """
        here, there = await self._mark(self._old), await self._mark(self._new)
        is_copied = there.get("renaming") == self._names and not there.get("importing")
        if not here and not is_copied:
            raise RunMissingError(f"there is no run {self._names[0]!r}", hint="agentrl runs lists the runs")
        moves: Moves = []
        if here:
            if not (begun := here.get("renaming") == self._names):
                await holds_run(self._old)
                await RunAdmin(self._connection).require_ended(alive_seconds)  # the mark ends live processes
                await Ancestry(self._connection).require_childless("renamed")
                ours = there.get("renaming") == self._names and there.get("importing")
                if not ours and await self._new.list_collection_names():
                    raise StoreError(
                        f"MongoDB at {self._connection.host} has a database {self._names[1]!r} already",
                        hint="give a name that no run has",
                    )
            moves = await self._moves(begun=begun)
            if not (begun and is_copied):
                await self._copy(moves, alive_seconds)
        parent = await Ancestry(self._connection.beside(self._names[1])).parent()
        of_parent = None if parent is None else Ancestry(self._connection.beside(parent.run))
        if parent is not None and of_parent is not None:
            await of_parent.adopt(self._names[1], parent)
        if (await self._mark(self._old)).get("renaming") == self._names:  # else it is gone, or another run
            await self._connection.client.drop_database(self._names[0])
        if of_parent is not None:
            await of_parent.release(self._names[0])
        await self._new[RUN].update_one({"_id": SCHEMA}, {"$unset": {"renaming": ""}})
        return [after for _, after in moves]

    async def _mark(self, database: AsyncDatabase[Json]) -> Json:
        return await database[RUN].find_one({"_id": SCHEMA}) or {}

    async def _copy(self, moves: Moves, alive_seconds: float) -> None:
        """Make the new database whole; without success both databases and folders are as before.

        One process at a time does; one that stood still until another had finished changes nothing.
        """
        old, new = self._old, self._new
        owner, schema = await Settings(self._connection).owner(makes=False), await self._mark(old)
        mark: Json = {"renaming": self._names}
        async with make_run(self._connection.beside(new.name), mark) as making:
            await prepare(old)  # an older build of this schema version may not know the mark
            await old[RUN].update_one({"_id": SCHEMA}, {"$set": mark})
            try:
                await asyncio.sleep(SETTLE_SECONDS)
                await RunAdmin(self._connection).require_ended(alive_seconds)
                await prepare(new)
                await new[GATE].delete_many({})  # the run brings its own
                await Transfer(self._connection, on_documents=self._on_documents).copy(new)
                await self._rewrite_paths(moves)
                await making.renew()
                _move(moves, self._names[1], owner.id)
            except Exception:
                if await making.drop():
                    with contextlib.suppress(StoreError, OSError):
                        _move([(after, before) for before, after in moves], old.name, owner.id)
                    await old[RUN].update_one({"_id": SCHEMA}, {"$unset": {"renaming": ""}})
                raise
            await making.finish({**schema, **mark})

    async def _moves(self, *, begun: bool) -> Moves:
        """Return the run's folders. Raises ConfigError if one is not the run's alone, or a new one exists."""
        settings = Settings(self._connection)
        output, *others = await settings.checkpoint_folders(taken=True)
        owner = await settings.owner(makes=False)
        moves = [(output, _renamed(output, *self._names))]
        for folder in others:
            after = _renamed(folder, *self._names)
            # Leave what is not here, or is another run's; a rename that was killed may have moved it already.
            owners = [await asyncio.to_thread(read_owner, place) for place in (folder, after)]
            if any(each is not None and each.id == owner.id for each in owners):
                if not begun:
                    await asyncio.to_thread(_require_movable, folder, owner)
                moves.append((folder, after))
        if begun:
            return moves
        published = await self._old[VERSION].find_one({**await own_versions(self._old), "pruned_at": None})
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
        async for stored in self._new[SETTINGS].find({"_id": id_prefix(FLAGS_PREFIX)}):
            values, fields = stored["values"], {}
            if "run_name" in values:
                fields["values.run_name"] = self._names[1]
            if values.get("output_dir"):
                output = Path(values["output_dir"])
                fields["values.output_dir"] = str(dict(moves).get(output, output))
            if fields:
                await self._new[SETTINGS].update_one({"_id": stored["_id"]}, {"$set": fields})
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


def _move(moves: Moves, run_name: str, id: str) -> None:
    """Rename the folders that exist; name the run in their checkpoints and owner files. Raises StoreError."""
    try:
        for before, after in moves:
            if before.exists() and before != after:
                before.rename(after)
            for state in state_files(after, undone=True):
                content = {**json.loads(state.read_text(encoding="utf-8")), "run_name": run_name}
                replace_file(state, json.dumps(content, indent=1).encode() + b"\n")
            hand_over(after, id, run_name)
    except (OSError, ValueError) as error:
        raise StoreError(
            f"a folder of the run cannot be renamed: {error}",
            hint="the run keeps its name; repair the folder",
        ) from error
