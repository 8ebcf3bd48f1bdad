"""Run functions in worker processes, so that they cannot block the event loop, and kill them at a time limit.

Each function runs in the main thread of its worker, where SIGALRM works. A worker is started by *spawn* when
it is first needed, and it ends with the process that started it.

Why not pebble or concurrent.futures? They kill a worker alone, and what its function has started goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from weakref import WeakKeyDictionary

from agentrl.base.concurrency import SCORER_THREADS, clock_stopped
from agentrl.base.user_code import describe
from agentrl.errors import ConfigError, FailureError, ScorerError

_LARGEST = 8
_PR_SET_PDEATHSIG = 1
_SPAWN = multiprocessing.get_context("spawn")


async def run_in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(*arguments)``, run in a worker process; the result of a coroutine function too.

    A FailureError and a ConfigError of the function are raised here, and a ScorerError describes any other
    exception. Raises ConfigError for a function that cannot be sent to a process. The worker of a call that
    is cancelled is killed. Waiting for a free worker takes no time of the ``current_deadline``.
    """
    call, loop = _pickled(function, arguments), asyncio.get_running_loop()
    slots = _slots.setdefault(loop, asyncio.Semaphore(min(_LARGEST, os.cpu_count() or 1)))
    with clock_stopped():
        await slots.acquire()
    try:
        worker = _take_idle() or _Worker()
        try:
            return await worker.run(call)
        finally:
            if worker.is_alive:
                _idle.append(worker)
    finally:
        slots.release()


def _pickled(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    try:
        pickle.dumps(function)
    except Exception as error:
        raise ConfigError(
            f"{describe(function)} cannot be sent to a worker process: {describe(error)}",
            hint="define it at the top level of a module, not inside a function and not as a lambda",
        ) from error
    try:
        return pickle.dumps((function, arguments))
    except Exception as error:
        raise ScorerError(f"a trajectory cannot be sent to a worker process: {describe(error)}") from error


class _Worker:
    """One worker process, which runs one function at a time."""

    def __init__(self) -> None:
        self._connection, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs,), daemon=True, name="agentrl scorer")
        self._process.start()
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive() and not self._connection.closed

    async def run(self, call: bytes) -> Any:
        """Run one pickled call. Kills the process if the caller is cancelled."""
        try:
            await SCORER_THREADS.run(self._connection.send_bytes, call)
            await self._readable()
            kind, value = pickle.loads(await SCORER_THREADS.run(self._connection.recv_bytes))
        except (EOFError, OSError) as error:
            self.kill()
            code = self._process.exitcode
            raise ScorerError(f"a scorer's worker process died (exit code {code})") from error
        except BaseException:
            self.kill()
            raise
        if kind == "result":
            return value
        raise value

    def kill(self) -> None:
        """End the process and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError, TypeError):
            os.killpg(self._process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        self._process.kill()
        self._process.join(10)
        self._connection.close()

    async def _readable(self) -> None:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._connection.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._connection.fileno())


_idle: list[_Worker] = []
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
"""As many calls at a time as CPUs, at most 8."""


def _take_idle() -> _Worker | None:
    while _idle:
        worker = _idle.pop()
        if worker.is_alive:
            return worker
        worker.kill()
    return None


def _serve(connection: Connection) -> None:
    """Run the calls that arrive, until the connection ends. Runs in the worker."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.setsid()
    while True:
        try:
            call = connection.recv_bytes()
        except (EOFError, OSError):
            return
        connection.send_bytes(_answer(call))


def _answer(call: bytes) -> bytes:
    try:
        function, arguments = pickle.loads(call)
        result = function(*arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return pickle.dumps(("result", result))
    except (FailureError, ConfigError) as error:
        return pickle.dumps(("error", error))
    except BaseException as error:  # noqa: BLE001  a user's function may raise SystemExit too
        return pickle.dumps(("error", ScorerError(f"raised {describe(error)}")))


async def _awaited(result: Any) -> Any:
    return await result
