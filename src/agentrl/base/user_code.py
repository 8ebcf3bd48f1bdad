"""Run users' code so that it can end one trajectory, and never the process.

Every exception of an agent, scorer, tool and so on becomes a FailureError. That includes SystemExit,
KeyboardInterrupt and a CancelledError that the code raises itself, and exceptions of tasks that it starts.
Only the cancellation of the calling task passes through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, TypeVar

from agentrl.errors import ConfigError, FailureError

T = TypeVar("T")

_inside: ContextVar[bool] = ContextVar("agentrl_inside_user_code", default=False)


class UserExitError(Exception):
    """SystemExit or KeyboardInterrupt in a task of users' code; unlike these, it does not end the loop."""


async def contain(call: Callable[[], Awaitable[T]], what: str, failure: type[FailureError]) -> T:
    """Return the result of ``call()``, awaited in a task of its own.

    Raises ``failure``, with ``what`` in its message, for any exception. A FailureError and a ConfigError pass
    through unchanged. So does the cancellation of the caller, even if ``call`` suppresses it.
    """
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is None:
        loop.set_task_factory(_task)  # SystemExit in a plain task would end the loop

    async def run() -> T:
        _inside.set(True)
        try:
            return await call()
        except (SystemExit, KeyboardInterrupt) as error:
            raise UserExitError(describe(error)) from error

    return await contain_errors(lambda: asyncio.create_task(run(), name=what), what, failure)


async def contain_errors(call: Callable[[], Awaitable[T]], what: str, failure: type[FailureError]) -> T:
    """Return the result of ``call()``; like ``contain``, without a task of its own.

    It is for code of this package, which contains the users' code that it calls.
    """
    own = asyncio.current_task()
    try:
        result = await call()
    except BaseException as error:
        if _is_closed(error, own):
            raise
        if _is_cancelled(own):
            raise asyncio.CancelledError from error
        if isinstance(error, (FailureError, ConfigError)):
            raise
        raise failure(f"{what} raised {describe(error)}") from error
    if _is_cancelled(own):
        raise asyncio.CancelledError
    return result


def contain_call(call: Callable[[], T], what: str, failure: type[FailureError]) -> T:
    """Return ``call()``; like ``contain``, for a function that is not async."""
    try:
        return call()
    except (FailureError, ConfigError):
        raise
    except BaseException as error:
        raise failure(f"{what} raised {describe(error)}") from error


def describe(value: object) -> str:
    """Return ``Class: text`` of an exception, or the ``repr`` of a value. Never raises."""
    name = type(value).__name__
    try:
        text = str(value) if isinstance(value, BaseException) else repr(value)
    except BaseException as error:  # noqa: BLE001  a user's class may raise anything here
        return f"{name}, which cannot be shown ({type(error).__name__})"
    if not isinstance(value, BaseException) or isinstance(value, UserExitError):
        return text
    return f"{name}: {text}" if text else name


def _is_cancelled(task: asyncio.Task[Any] | None) -> bool:
    return task is not None and task.cancelling() > 0


def _is_closed(error: BaseException, own: asyncio.Task[Any] | None) -> bool:
    """Return whether the caller's coroutine is closed from outside: then another task runs, or none."""
    return isinstance(error, GeneratorExit) and _current_task() is not own


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T],
    **options: Any,
) -> asyncio.Task[T]:
    if not _inside.get() or not asyncio.iscoroutine(coroutine):
        return asyncio.Task(coroutine, loop=loop, **options)
    task = asyncio.Task(_without_exit(coroutine), loop=loop, **options)
    task.add_done_callback(lambda _: coroutine.close())  # a task cancelled before it starts never awaits it
    return task


async def _without_exit(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise UserExitError(describe(error)) from error
