"""The calls on a collection: they join the transaction around them; writes ask whether the run is there."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase

from agentrl.documents.run import SCHEMA
from agentrl.errors import RunMissingError
from agentrl.store.names import RUN

_session: ContextVar[AsyncClientSession | None] = ContextVar("agentrl_store_session", default=None)
_READS = ("aggregate", "count_documents", "distinct", "find", "find_one")
_WRITES = (
    "bulk_write", "create_index", "delete_many", "delete_one", "find_one_and_delete", "find_one_and_update",
    "insert_many", "insert_one", "replace_one", "update_many", "update_one",
)  # fmt: skip
_LOOK_SECONDS: Final = 0.5
SETTLE_SECONDS: Final = 2 * _LOOK_SECONDS
"""How long after the mark no process writes to the run any more. Only then is its database copied or dropped:
MongoDB would make a dropped one anew, without schema, for the next document of such a process."""


class RunFence:
    """Looks before a write, at most every half second, whether the run is there and not marked.

    ``schema`` is the run's schema document when the process opened it: another run may have its name since.

    A process that was stopped for a while looks before its first write. Reads do not look: they make nothing,
    and an idle process, which mostly reads, then asks the server for nothing more.
    """

    def __init__(self, database: AsyncDatabase[dict[str, Any]], schema: Mapping[str, Any]) -> None:
        self._database = database
        self._made_at = schema.get("made_at")
        self._looked_at = float("-inf")
        self._looking = asyncio.Lock()

    async def check(self) -> None:
        """Raise RunMissingError if the run is being renamed or deleted, or is gone."""
        if self._is_fresh():
            return
        async with self._looking:
            if self._is_fresh():
                return
            began = time.monotonic()
            schema = await self._database[RUN].find_one({"_id": SCHEMA})
            is_ours = schema is not None and schema.get("made_at") == self._made_at
            if schema is None or not is_ours or schema.get("renaming") or schema.get("deleting"):
                raise RunMissingError(
                    f"run {self._database.name!r} has been renamed or deleted, or is about to be",
                    hint="agentrl runs lists the runs; restart this process with the run's new name",
                )
            self._looked_at = began

    def _is_fresh(self) -> bool:
        return time.monotonic() - self._looked_at < _LOOK_SECONDS


class Collection(AsyncCollection[dict[str, Any]]):
    """A collection whose reads and writes belong to the transaction around them, unless given a session.

    With a ``fence``, a write raises RunMissingError once the run has been renamed or deleted. Calls that are
    not listed above join no transaction and ask nothing; neither do those of a copy ``with_options``.
    """

    def __init__(
        self, database: AsyncDatabase[dict[str, Any]], name: str, fence: RunFence | None, **options: Any
    ) -> None:
        super().__init__(database, name, **options)
        self._fence = fence


# not AsyncClientSession.bind: PyMongo 4.20 then sends the client's write concern, which a transaction refuses
def _reading(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(
        self: Collection, /, *args: Any, session: AsyncClientSession | None = None, **options: Any
    ) -> Any:
        return call(self, *args, session=session or _session.get(), **options)

    return wrapper


def _writing(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    async def wrapper(
        self: Collection, /, *args: Any, session: AsyncClientSession | None = None, **options: Any
    ) -> Any:
        if self._fence is not None:
            await self._fence.check()
        return await call(self, *args, session=session or _session.get(), **options)

    return wrapper


for _name in _READS:
    setattr(Collection, _name, _reading(getattr(AsyncCollection, _name)))
for _name in _WRITES:
    setattr(Collection, _name, _writing(getattr(AsyncCollection, _name)))


@contextmanager
def use_session(session: AsyncClientSession | None) -> Iterator[None]:
    """Make the calls of a block part of the transaction of ``session``; with None, of no transaction.

    One call follows another, also in tasks that begin in the block: a session makes one call at a time.
    """
    token = _session.set(session)
    try:
        yield
    finally:
        _session.reset(token)


async def abort() -> None:
    """Undo what the transaction around this call has written; later calls of its block are in none."""
    session = _session.get()
    assert session is not None  # a programming error: there is no transaction
    await session.abort_transaction()
