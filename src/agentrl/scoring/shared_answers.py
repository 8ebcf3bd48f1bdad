"""Ask each question once: keep answers by their content, and let equal questions share one request."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from agentrl.llm.ask import Answer
from agentrl.llm.deadline import current_deadline

T = TypeVar("T")

_KEPT = 10_000


class SharedAnswers(Generic[T]):
    """The answers of this process, by a digest of the question; the oldest are dropped."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._answers: OrderedDict[bytes, Answer[T]] = OrderedDict()
        self._asking: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bytes, asyncio.Task[Answer[T]]]] = (
            WeakKeyDictionary()
        )

    async def get(self, key: object, ask: Callable[[], Awaitable[Answer[T]]]) -> tuple[Answer[T], bool]:
        """Return the answer to the question ``key``, and whether this call asked for it.

        Calls at the same time share one ``ask``, and its exception. It goes on when a caller is cancelled.
        The caller's clock stops while it waits: ``ask`` has a time limit of its own.
        """
        digest = hashlib.blake2b(repr(key).encode("utf-8", "replace"), digest_size=16).digest()
        if digest in self._answers:
            self._answers.move_to_end(digest)
            return self._answers[digest], False
        asking = self._asking.setdefault(asyncio.get_running_loop(), {})
        task = asking.get(digest)
        is_new = task is None
        if task is None:
            task = asking[digest] = asyncio.ensure_future(self._ask(digest, ask))
            task.add_done_callback(lambda done: self._forget(asking, digest, done))
        deadline = current_deadline()
        if deadline is None:
            return await asyncio.shield(task), is_new
        with deadline.paused():
            return await asyncio.shield(task), is_new

    async def _ask(self, digest: bytes, ask: Callable[[], Awaitable[Answer[T]]]) -> Answer[T]:
        answer = await ask()
        self._answers[digest] = answer
        while len(self._answers) > self._kept:
            self._answers.popitem(last=False)
        return answer

    @staticmethod
    def _forget(
        asking: dict[bytes, asyncio.Task[Answer[T]]], digest: bytes, task: asyncio.Task[Answer[T]]
    ) -> None:
        asking.pop(digest, None)
        if not task.cancelled():
            task.exception()  # every caller may have been cancelled; then nobody reads it
