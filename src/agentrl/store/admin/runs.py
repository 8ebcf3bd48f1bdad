"""Manage a run as a whole: its tags and its note, its folders, and its deletion."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Final

from agentrl.config.run import SYSTEM_DATABASES
from agentrl.documents.base import replace_surrogates
from agentrl.documents.run import REMARKS, RunFact, flags_key
from agentrl.errors import AgentRLError, ConfigError, StoreError
from agentrl.store.mechanics.connection import Json, Repository, database_call
from agentrl.store.names import RUN, SETTINGS, VERSION
from agentrl.store.views.runs import Runs

_TAG: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,31}")
_MAX_TAGS: Final = 20
_MAX_NOTE: Final = 500
_OUTPUT: Final = "values.output_dir"


class RunAdmin(Repository):
    """The calls on a run as a whole. They need the rights of an administrator."""

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
                hint="stop its processes; the lease of a killed one runs out after --lease_seconds",
            )

    @database_call
    async def output_folder(self, verb: str = "delete") -> Path | None:
        """Return the output folder of the run's trainer on this machine; None if there is none.

        ``verb`` says what is to be done with it. Raises ConfigError for a folder without weights or
        checkpoints, one that holds the working or the home folder, a link, one that does not hold the newest
        weights that the run published, and one that another run of the server has too.
        """
        database = self._connection.database
        stored: Json = await self._collection(SETTINGS).find_one({"_id": flags_key("train")}) or {}
        given = str(stored.get("values", {}).get("output_dir") or f"output/{database.name}")
        newest = await self._collection(VERSION).find_one({"train_step": {"$ne": None}}, sort=[("_id", -1)])
        try:
            folder = _output_at(Path(given), None if newest is None else newest["location"], verb)
        except OSError as error:
            raise ConfigError(
                f"{given} cannot be read: {error.strerror}", hint=f"{verb} it by hand"
            ) from error
        if folder is None:
            return None
        for name in await database.client.list_database_names():
            if name == database.name or name in SYSTEM_DATABASES:
                continue
            same = {"_id": flags_key("train"), _OUTPUT: given}
            if await database.client[name][SETTINGS].find_one(same, {"_id": 1}) is not None:
                raise ConfigError(f"{folder} is the output of run {name!r} too", hint=f"{verb} it by hand")
        return folder

    @database_call
    async def delete(self, folder: Path | None, alive_seconds: float) -> None:
        """Delete the run's database, and then its output folder if it is given.

        Raises StoreError for a live run, AgentRLError for a folder that cannot be deleted.
        """
        await self.require_ended(alive_seconds)
        await self._connection.client.drop_database(self._connection.database.name)
        if folder is None:
            return
        try:
            await asyncio.to_thread(shutil.rmtree, folder)
        except OSError as error:
            raise AgentRLError(
                f"the database is deleted, and {folder} cannot be: {error.strerror}", hint="delete it by hand"
            ) from error

    @database_call
    async def remarks(self) -> RunFact:
        """Return the run's tags and note."""
        return RunFact.from_document(
            await self._collection(RUN).find_one({"_id": REMARKS}) or {"_id": REMARKS}
        )

    async def _write(self, fields: Json) -> None:
        await self._collection(RUN).update_one({"_id": REMARKS}, {"$set": fields}, upsert=True)


def _output_at(path: Path, published: str | None, verb: str) -> Path | None:
    """Return the absolute folder of a trainer's output; None if there is none. Raises as its caller.

    ``published`` is the folder of the newest weights.
    """
    if path.is_symlink():
        raise ConfigError(f"{path} is a link", hint=f"{verb} what it points to by hand")
    if not path.is_dir():
        return None
    folder = path.resolve()
    if any(other.is_relative_to(folder) for other in (Path.cwd().resolve(), Path.home().resolve())):
        raise ConfigError(f"{folder} holds more than a run's output", hint=f"{verb} its content by hand")
    if not (folder / "weights").is_dir() and not any(folder.glob("checkpoint-*/state.json")):
        raise ConfigError(f"{folder} has neither weights nor checkpoints", hint=f"{verb} it by hand")
    if published is not None and not Path(published).resolve().is_relative_to(folder):
        raise ConfigError(
            f"{folder} does not hold the newest weights that the run published: {published}",
            hint=f"start this command in the trainer's working folder, or {verb} the folder by hand",
        )
    return folder
