"""Check the journals of a chaos run: the log of a tool that must never run twice, and stored model calls."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from agentrl.store.mechanics.blobs import MARK

if TYPE_CHECKING:
    from agentrl.store.client import Store

_LOOK_SECONDS = 2.0
_PAGE = 200
_ALIVE = ("created", "running", "completed", "scoring")
_ARRAYS = ("context_ids", "output_ids", "logprobs", "versions", MARK)


class Notes:
    """The log of the tool ``note``."""

    def __init__(self, path: Path) -> None:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._began: Counter[tuple[str, int]] = Counter()
        self._results: dict[str, tuple[str, int]] = {}
        for event, record, turn, number in (line.split(" ") for line in lines):
            if event == "began":
                self._began[record, int(turn)] += 1
            else:
                self._results[number] = record, int(turn)

    @property
    def calls(self) -> int:
        """Return how many calls began."""
        return self._began.total()

    def repeated(self) -> Iterator[str]:
        """Yield each turn whose call began twice."""
        for (record, turn), times in self._began.items():
            if times > 1:
                yield f"the outside call of turn {turn} of {record} was made {times} times"

    def invented(self, call: dict[str, Any]) -> Iterator[str]:
        """Yield the results of a stored model call that its own run of the tool did not return."""
        for execution in call.get("tool_executions", ()):
            if execution["error"]:
                continue
            made = self._results.get(execution["result"])
            if made != (call["record"], call["index"] + 1):
                yield f"{call['_id']} stores a result of note that {made or 'no call'} returned"


class CallWatcher:
    """Reads the stored model calls of running trajectories again and again: what is stored never changes."""

    def __init__(self, store: Store) -> None:
        # A primary that is killed takes back what no majority has: it was never stored.
        self._database = store.database.with_options(read_concern=ReadConcern("majority"))
        self._calls: dict[str, str] = {}
        """Id of a model call → digest of its ids, logprobs and versions."""
        self._ended: dict[str, list[str]] = {}
        """Id of a model call → digests of its tool calls that have ended."""
        self._paths: dict[str, list[str]] = {}
        """Id of a Record → its model calls."""
        self.violations: list[str] = []

    async def run(self) -> None:
        """Look until cancelled; while the database is away, wait."""
        while True:
            with suppress(PyMongoError):
                await self.look({"status": {"$in": list(_ALIVE)}})
            await asyncio.sleep(_LOOK_SECONDS)

    async def finish(self) -> None:
        """Compare all that was seen with what is stored at the end."""
        records = list(self._paths)
        for start in range(0, len(records), _PAGE):
            await self.look({"_id": {"$in": records[start : start + _PAGE]}})

    async def look(self, query: dict[str, Any]) -> None:
        """Compare the Records of ``query`` and their calls with what was seen of them before."""
        # Read the Records first: a call is there whenever a Record names it, not the other way round.
        records = self._database["Record"].find(query, {"traj": 1})
        paths = {record["_id"]: record["traj"] async for record in records}
        calls = self._database["DispatchedSamplingTask"].find({"record": {"$in": list(paths)}})
        stored: dict[str, dict[str, Any]] = {}
        async for call in calls:
            stored[call["_id"]] = call
            self._compare_call(call)
        for record, path in paths.items():
            self._compare_path(record, path)
            self.violations += [f"{key} was stored and is gone" for key in path if key not in stored]

    def _compare_path(self, record: str, path: list[str]) -> None:
        before = self._paths.get(record, [])
        if path[: len(before)] != before:
            self.violations.append(f"{record} had the calls {before} and has {path}")
        self._paths[record] = path

    def _compare_call(self, call: dict[str, Any]) -> None:
        key, now = call["_id"], digest({name: call.get(name) for name in _ARRAYS})
        if self._calls.setdefault(key, now) != now:
            self.violations.append(f"the tokens of {key} have changed")
        ended = [digest(each) for each in call.get("tool_executions", ()) if each.get("finished", True)]
        before = self._ended.get(key, [])
        if ended[: len(before)] != before:
            self.violations.append(f"the tool results of {key} have changed")
        self._ended[key] = ended


def digest(value: Any) -> str:
    """Return the SHA-256 of a value's text."""
    return hashlib.sha256(repr(value).encode()).hexdigest()
