"""Runs code of extensions: whatever comes out of it but a result is the failure of one trajectory.

Nothing else passes: not SystemExit, KeyboardInterrupt or a CancelledError of its own, nor those of a task
that the extension started. The cancellation of the task that called it does pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, TypeVar

from agentrl.errors import ConfigError, FailureError

T = TypeVar("T")

_inside: ContextVar[bool] = ContextVar("agentrl_inside_extension", default=False)


class ExtensionExitError(Exception):
    """SystemExit or KeyboardInterrupt of a task that an extension started."""


async def contain(call: Callable[[], Awaitable[T]], what: str, failure: type[FailureError]) -> T:
    """Await ``call()`` in a task of its own; what it raises becomes ``failure``, which names ``what``.

    A FailureError and a ConfigError pass as they are. So does the cancellation of the caller, even where the
    extension suppresses it.
    """
    own = asyncio.current_task()
    _contain_tasks(asyncio.get_running_loop())

    async def run() -> T:
        _inside.set(True)
        try:
            return await call()
        except (SystemExit, KeyboardInterrupt) as error:
            raise ExtensionExitError(describe(error)) from error

    try:
        result = await asyncio.create_task(run(), name=what)
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
    """``contain`` for a function that is not async."""
    try:
        return call()
    except (FailureError, ConfigError):
        raise
    except BaseException as error:
        raise failure(f"{what} raised {describe(error)}") from error


def describe(value: object) -> str:
    """``Class: text`` of an exception, or the representation of a value; says so where it cannot be shown."""
    name = type(value).__name__
    try:
        text = str(value) if isinstance(value, BaseException) else repr(value)
    except BaseException as error:  # noqa: BLE001  an extension's class may raise anything here
        return f"{name}, which cannot be shown ({type(error).__name__})"
    if not isinstance(value, BaseException) or isinstance(value, ExtensionExitError):
        return text
    return f"{name}: {text}" if text else name


def _is_cancelled(task: asyncio.Task[Any] | None) -> bool:
    return task is not None and task.cancelling() > 0


def _is_closed(error: BaseException, own: asyncio.Task[Any] | None) -> bool:
    """Whether the caller's coroutine is closed from outside: then another task runs, or none."""
    return isinstance(error, GeneratorExit) and _current_task() is not own


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _contain_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Have ``loop`` contain the tasks that extensions start: SystemExit in a task ends the loop otherwise."""
    if loop.get_task_factory() is None:
        loop.set_task_factory(_task)


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
        raise ExtensionExitError(describe(error)) from error
