"""Run functions that block in threads: each kind has a few of its own, and waiting for one is not running.

Why not ``asyncio.to_thread``? All callers share its cores + 4 threads, and a call that hangs keeps its thread
also after its time limit: a few hung tools would stop every tool, scorer and database call of the process.
Its time limit runs while a call waits for a thread. And Python waits for such threads when it exits.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from agentrl.concurrency import clock_stopped
from agentrl.errors import OutageError

RUNNING: Final = 32
"""Functions of one kind that run at a time: as many as asyncio's own pool has on a large machine."""
HUNG: Final = 256
"""Functions of one kind that may go on after their callers gave them up. More are refused."""

Deliver = Callable[[Any, BaseException | None], None]


class Threads:
    """The threads of one kind of function."""

    def __init__(self, kind: str, *, running: int = RUNNING, hung: int = HUNG) -> None:
        """``running`` functions run at a time, beside at most ``hung`` that were given up and go on."""
        self.kind = kind
        self._running = running
        self._hung_limit = hung
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._idle: list[_Thread] = []
        self._hung = 0
        self._lock = threading.Lock()

    async def run(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """Return ``function(*arguments, **named)``, run in a thread with the caller's context.

        Waiting for a thread takes no time of the ``current_deadline``. If the caller is cancelled, the
        function goes on, and another one takes its place. Raises OutageError if too many have done so.
        """
        loop = asyncio.get_running_loop()
        slots = self._slots.setdefault(loop, asyncio.Semaphore(self._running))
        if slots.locked():
            with clock_stopped():
                await slots.acquire()
        else:
            await slots.acquire()
        try:
            result: asyncio.Future[Any] = loop.create_future()
            is_over = is_hung = False

            def settle(value: Any, error: BaseException | None) -> None:
                if result.done():
                    return
                if error is None:
                    result.set_result(value)
                else:
                    result.set_exception(error)

            def deliver(value: Any, error: BaseException | None) -> None:
                """Free the thread, which runs this, and give the result to the loop, if it is still open."""
                nonlocal is_over
                with self._lock:
                    is_over = True
                    self._hung -= is_hung
                    self._idle.append(thread)
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(settle, value, error)

            thread = self._take()
            thread.calls.put((partial(copy_context().run, function, *arguments, **named), deliver))
            try:
                return await result
            finally:
                with self._lock:
                    is_hung = not is_over
                    self._hung += is_hung
        finally:
            slots.release()

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """Begin to ``run`` a function, as an Executor does. Call it in a running event loop."""
        given: Future[Any] = Future()
        task = asyncio.create_task(self.run(function, *arguments, **named))
        given.add_done_callback(lambda _: task.cancel())

        def settle(task: asyncio.Task[Any]) -> None:
            if task.cancelled() or given.cancelled():
                given.cancel()
            elif (error := task.exception()) is not None:
                given.set_exception(error)
            else:
                given.set_result(task.result())

        task.add_done_callback(settle)
        return given

    @contextmanager
    def asyncios(self) -> Iterator[None]:
        """Run here what the block submits to asyncio's default executor, such as LangGraph's functions."""
        loop = asyncio.get_running_loop()
        if loop not in _prepared:
            loop.set_default_executor(_DefaultExecutor())
            _prepared.add(loop)
        with _asyncios(self):
            yield

    def _take(self) -> _Thread:
        with self._lock:
            if self._hung >= self._hung_limit:
                raise OutageError(
                    f"{self._hung} calls of {self.kind} go on after their time limit; no more are begun",
                    hint="give what they wait for a time limit of its own",
                )
            if self._idle:
                return self._idle.pop()
        return _Thread(self.kind)


class _Thread(threading.Thread):
    """Runs one call after another. Python does not wait for it when it exits."""

    def __init__(self, kind: str) -> None:
        super().__init__(daemon=True, name=f"agentrl {kind}")
        self.calls: SimpleQueue[tuple[Callable[[], Any], Deliver]] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            call, deliver = self.calls.get()
            value: Any = None
            failure: BaseException | None = None
            try:
                value = call()
            except StopIteration as error:  # a Future refuses it, and its caller would wait for ever
                failure = RuntimeError(f"the function raised StopIteration: {error.value!r}")
            except BaseException as error:  # noqa: BLE001  it is the caller's to handle
                failure = error
            deliver(value, failure)
            del call, deliver, value, failure  # an idle thread keeps nothing alive


class _DefaultExecutor(ThreadPoolExecutor):
    """asyncio's default executor, except that functions of a block in ``asyncios`` run in its Threads."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="asyncio")

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        threads = _current.get()
        if threads is None:
            return super().submit(function, *arguments, **named)
        return threads.submit(function, *arguments, **named)


_current: ContextVar[Threads | None] = ContextVar("agentrl_default_threads", default=None)
_prepared: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


@contextmanager
def _asyncios(threads: Threads | None) -> Iterator[None]:
    token = _current.set(threads)
    try:
        yield
    finally:
        _current.reset(token)


def own_code() -> AbstractContextManager[None]:
    """Return a block in which asyncio's default executor is its own again: a user's code calls this package.

    What the package does there must not wait for the threads of those that wait for it.
    """
    return _asyncios(None)


TOOL_THREADS = Threads("tools")
ENVIRONMENT_THREADS = Threads("environments")
SCORER_THREADS = Threads("scorers")
GRAPH_THREADS = Threads("nodes of graphs")
DECISION_THREADS = Threads("group decisions")
