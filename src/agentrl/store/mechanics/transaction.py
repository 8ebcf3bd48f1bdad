"""Make the calls on a collection part of the transaction around them: nobody passes its session on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection

_session: ContextVar[AsyncClientSession | None] = ContextVar("agentrl_store_session", default=None)
_CALLS = (
    "aggregate", "bulk_write", "count_documents", "delete_many", "delete_one", "distinct", "find", "find_one",
    "find_one_and_delete", "find_one_and_update", "insert_many", "insert_one", "replace_one", "update_many",
    "update_one",
)  # fmt: skip


class Collection(AsyncCollection[dict[str, Any]]):
    """A collection whose reads and writes belong to the transaction around them, unless given a session.

    Other calls, such as those that make an index, belong to none, and so do those of a copy ``with_options``.
    """


# not AsyncClientSession.bind: PyMongo 4.20 then sends the client's write concern, which a transaction refuses
def _in_transaction(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(
        self: Collection, /, *args: Any, session: AsyncClientSession | None = None, **options: Any
    ) -> Any:
        return call(self, *args, session=session or _session.get(), **options)

    return wrapper


for _name in _CALLS:
    setattr(Collection, _name, _in_transaction(getattr(AsyncCollection, _name)))


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
