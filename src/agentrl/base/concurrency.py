"""Run asyncio tasks and blocking functions beside other work; end them without losing their errors.

``Backoff`` says how long they wait before they try again.

Why not ``asyncio.to_thread``? All callers share its cores + 4 threads, and a call that hangs keeps its thread
also after its time limit: a few hung tools would stop every tool, scorer and database call of the process.
Its time limit runs while a call waits for a thread. And Python waits for such threads when it exits.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import threading
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from agentrl.errors import AgentRLError, OutageError

T = TypeVar("T")

logger = logging.getLogger(__name__)

END_SECONDS = 20.0
"""Time for cancelled tasks to end: more than any task of this package takes to release its leases."""

LAST_SECONDS = 1.0
"""Time to end after a second cancellation: code that a task calls may have swallowed the first."""

_REPLACED = (Exception, asyncio.CancelledError)
"""What an interrupted block may raise and the error of its job replaces."""


class _CpuLimitError(BaseException):
    """A function takes too long. Not an Exception: packages such as sympy suppress those."""


def within_cpu(seconds: float, function: Callable[..., T], *arguments: Any) -> T | None:
    """Return the function's result; None if it takes more than ``seconds`` of the process's CPU time.

    Call it for what data can make endless: formulas, schemas, regular expressions. A limit of the clock would
    depend on the machine's other work. A signal ends the function, and Python handles signals in the main
    thread alone: a call from another thread is not limited.
    """
    if threading.current_thread() is not threading.main_thread():
        return function(*arguments)
    is_running = True

    def stop(*_: object) -> None:
        if is_running:
            raise _CpuLimitError

    before = signal.signal(signal.SIGPROF, stop)
    try:
        # repeatedly: Python drops an exception that is raised in a destructor or by the garbage collector
        signal.setitimer(signal.ITIMER_PROF, seconds, seconds / 8)
        return function(*arguments)
    except _CpuLimitError:
        return None
    finally:
        is_running = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@dataclass(slots=True)
class Backoff:
    """The seconds to wait between attempts at one thing: ``first``, then ``factor`` times more each time.

    ``jitter`` is the share of each wait that is random: what fails for many at once must not be tried again
    by all of them at the same moment.
    """

    what: str
    """What is waited for, for the log at level DEBUG."""
    first: float
    longest: float
    factor: float = 2.0
    jitter: float = 0.0
    attempts: int = 0
    """Waits since the start, or since ``reset``."""
    seconds: float = 0.0
    """The wait that ``next`` returned last."""

    def next(self) -> float:
        """Return how long to wait now."""
        try:
            seconds = min(self.longest, self.first * float(self.factor) ** self.attempts)
        except OverflowError:
            # An outage of a night has thousands of attempts: no float holds the power.
            seconds = self.longest if self.first else 0.0
        self.attempts += 1
        self.seconds = seconds * random.uniform(1 - self.jitter, 1)
        logger.debug("waiting %.3g s for %s", self.seconds, self.what)
        return self.seconds

    def reset(self) -> None:
        """Begin again with ``first``: an attempt has succeeded."""
        self.attempts = 0


_current: ContextVar[Deadline | None] = ContextVar("agentrl_deadline", default=None)


def current_deadline() -> Deadline | None:
    """Return the deadline of the innermost ``time_limit``; None without one."""
    return _current.get()


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError if the block takes longer than ``seconds``, its ``current_deadline``."""
    deadline = Deadline(seconds)
    token = _current.set(deadline)
    try:
        async with deadline.enforced():
            yield
    finally:
        _current.reset(token)


def clock_stopped() -> AbstractContextManager[None]:
    """Stop the clock of the ``current_deadline`` in a block, if there is one."""
    deadline = _current.get()
    return nullcontext() if deadline is None else deadline.paused()


class Deadline:
    """A time limit of ``seconds``, from now on. Time in ``paused`` does not count."""

    def __init__(self, seconds: float) -> None:
        self._seconds = self._left = seconds
        self._since: float | None = asyncio.get_running_loop().time()
        """When the clock was started; None while it is stopped."""
        self._pauses = 0
        self._timeout: asyncio.Timeout | None = None

    def left(self) -> float:
        """Return the seconds that are left."""
        if self._since is None:
            return self._left
        return self._left - (asyncio.get_running_loop().time() - self._since)

    def spent(self) -> float:
        """Return the seconds that are over."""
        return self._seconds - self.left()

    def spend(self, seconds: float) -> None:
        """Let it have begun ``seconds`` earlier."""
        self._left -= seconds
        self._reschedule()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock. The code inside bounds its waits itself."""
        self._pauses += 1
        if self._pauses == 1:
            self._left, self._since = self.left(), None
            self._reschedule()
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self._since = asyncio.get_running_loop().time()
                self._reschedule()

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Raise TimeoutError in the block when no time is left, as ``asyncio.timeout``."""
        try:
            async with asyncio.timeout(max(0.0, self.left())) as self._timeout:
                yield
        finally:
            self._timeout = None

    def _reschedule(self) -> None:
        # Leave an expired one: asyncio raises RuntimeError if its time is changed.
        if self._timeout is None or self._timeout.expired():
            return
        loop = asyncio.get_running_loop()
        self._timeout.reschedule(None if self._since is None else loop.time() + max(0.0, self._left))


@asynccontextmanager
async def background(*jobs: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run ``jobs`` in tasks of their own during the block; cancel those that still run at its end.

    A job may return before the block ends. A job that fails cancels the block, and its error is raised. One
    that fails while it is cancelled raises its error unless the block raises one. Errors beside the one that
    is raised are logged. The cancellation of the caller passes through. The end is bounded as in
    ``end_tasks``.

    In an ``asyncio.TaskGroup`` the block would wait for the jobs, and errors would be ExceptionGroups.
    """
    owner = asyncio.current_task()
    assert owner is not None
    earlier_cancellations = owner.cancelling()
    tasks = [asyncio.create_task(job) for job in jobs]
    failures: list[BaseException] = []
    is_open = True

    def ended(task: asyncio.Task[object]) -> None:
        if is_open and (error := _error_of(task)) is not None:
            failures.append(error)
            if len(failures) == 1:
                owner.cancel()

    for task in tasks:
        task.add_done_callback(ended)
    raised: BaseException | None = None
    try:
        yield
    except BaseException as error:  # noqa: BLE001  raised again below, unless that of a job comes first
        raised = error
    # Ignore failures from here on: the owner waits for the jobs to end, and must not be cancelled.
    is_open = False
    # Take back the one cancellation of ``ended``; one by the caller stays.
    is_interrupted = bool(failures) and owner.uncancel() <= earlier_cancellations
    await _end(tasks)
    failures += [each for each in map(_error_of, tasks) if each is not None and each not in failures]
    if failures and (raised is None or (is_interrupted and isinstance(raised, _REPLACED))):
        if isinstance(raised, Exception):
            failures.append(raised)
        raised, *failures = failures
    for failure in failures:
        _log_failure(failure)
    if raised is not None:
        raise raised


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Open an ``asyncio.TaskGroup`` that raises its first error itself, not in an ExceptionGroup.

    A cancellation of the caller while the group ends comes before the error: TaskGroup drops it.
    """
    owner = asyncio.current_task()
    assert owner is not None
    earlier_cancellations = owner.cancelling()
    try:
        async with _TaskGroup() as group:
            yield group
            await group.all_ended()
    except BaseExceptionGroup as errors:
        if owner.cancelling() > earlier_cancellations:
            with suppress(asyncio.CancelledError):  # from Python 3.13 on it is raised at the next await
                await asyncio.sleep(0)
            raise asyncio.CancelledError from errors.exceptions[0]
        raise errors.exceptions[0] from None


class _TaskGroup(asyncio.TaskGroup):
    """Can wait for its tasks inside the block.

    In Python 3.11 and 3.12, an error that comes after the block leaves the caller marked as cancelled: its
    next call of the database would raise CancelledError.
    """

    def __init__(self) -> None:
        super().__init__()
        self._started: set[asyncio.Task[Any]] = set()

    def create_task(self, *given: Any, **named: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = super().create_task(*given, **named)
        self._started.add(task)
        task.add_done_callback(self._started.discard)
        return task

    async def all_ended(self) -> None:
        """Wait until every task has ended, also those that others start meanwhile."""
        while self._started:
            await asyncio.wait(self._started)


async def end_tasks(*tasks: asyncio.Task[Any], seconds: float | None = None) -> None:
    """Cancel tasks and wait for their ends, at most ``seconds`` (``END_SECONDS``) and ``LAST_SECONDS``.

    Errors that nobody has seen are logged: those of tasks that fail in the end, or have failed before and
    were not awaited. So is a task that does not end. A caller that is cancelled meanwhile waits for the end.
    """
    running = [task for task in tasks if not task.done()]
    await _end(running, seconds)
    for task in tasks:
        # asyncio itself logs such an error too, but only when the task is garbage-collected
        is_unseen = task in running or task._log_traceback
        if is_unseen and (error := _error_of(task)) is not None:
            _log_failure(error)


async def wait_for_any(
    *events: asyncio.Event, tasks: Collection[asyncio.Task[Any]] = (), timeout: float | None
) -> None:
    """Wait until an event is set, a task ends, or ``timeout`` seconds have passed; None waits on."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait([*waits, *tasks], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(*waits)


async def _end(tasks: Collection[asyncio.Task[Any]], seconds: float | None = None) -> None:
    if all(task.done() for task in tasks):
        return
    ending = asyncio.create_task(_cancel(tasks, END_SECONDS if seconds is None else seconds))
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        await asyncio.wait([ending])
        raise


async def _cancel(tasks: Collection[asyncio.Task[Any]], seconds: float) -> None:
    for wait in (seconds, LAST_SECONDS):
        for task in tasks:
            task.cancel()
        _, left = await asyncio.wait(tasks, timeout=wait)
        if not left:
            return
    for task in left:
        logger.error("a cancelled task does not end and is left", extra={"task": task.get_name()})


def _error_of(task: asyncio.Task[Any]) -> BaseException | None:
    """Return the error of a task, if it has ended by one."""
    return task.exception() if task.done() and not task.cancelled() else None


def _log_failure(error: BaseException) -> None:
    if isinstance(error, AgentRLError):
        logger.info("a task that nobody awaits failed: %s", error.message)
    else:
        logger.warning("a task that nobody awaits failed", exc_info=error)


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
        # Keep one for each loop: a semaphore belongs to the loop in which it first waited.
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
                # Drop it: the caller was cancelled meanwhile, and a future is settled once.
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
        # Cancel with ``given``, which is all that asyncio knows; a task that has ended ignores it.
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


# Inherit from it: asyncio takes no other class for its default executor.
class _DefaultExecutor(ThreadPoolExecutor):
    """asyncio's default executor, except that functions of a block in ``asyncios`` run in its Threads."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="asyncio")

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        threads = _default_threads.get()
        if threads is None:
            return super().submit(function, *arguments, **named)
        return threads.submit(function, *arguments, **named)


_default_threads: ContextVar[Threads | None] = ContextVar("agentrl_default_threads", default=None)
_prepared: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


@contextmanager
def _asyncios(threads: Threads | None) -> Iterator[None]:
    token = _default_threads.set(threads)
    try:
        yield
    finally:
        _default_threads.reset(token)


def own_code() -> AbstractContextManager[None]:
    """Return a block in which asyncio's default executor is its own again: a user's code calls this package.

    What the package does there must not wait for the threads of those that wait for it.
    """
    return _asyncios(None)


TOOL_THREADS = Threads("tools")
ENVIRONMENT_THREADS = Threads("environments")
SCORER_THREADS = Threads("scorers")
AGENT_THREADS = Threads("functions of agents")
GRAPH_THREADS = Threads("nodes of graphs")
DECISION_THREADS = Threads("group decisions")
PROMPT_THREADS = Threads("renderings of prompts")
