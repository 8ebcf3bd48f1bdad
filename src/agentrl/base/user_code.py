"""Users' code: decide which of it data may name, and run it so that it ends one trajectory at most.

Data (rows, imported runs, requests and stored tasks) may name code, servers and files that the operator
allows: by flags, by a task file of her own, or by the run's list ``Imports``. Every door asks ``is_allowed``
or ``require_allowed``. A name tells by its shape what it is:

    module:function              code
    package({"level": 1})        a package or function that is called with these arguments
    //host:port                  a server
    /folder, ./file.yml          a file or folder, ``.`` being the folder in which the process was started
    exact                        something built in, which needs no permission

What runs is contained: every exception of an agent, scorer, tool and so on becomes a FailureError. That
includes SystemExit, KeyboardInterrupt and a CancelledError that the code raises itself, and exceptions of
tasks that it starts. Only the cancellation of the calling task passes through.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from contextvars import ContextVar
from pathlib import PurePosixPath
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from agentrl.errors import ConfigError, FailureError, quoted

T = TypeVar("T")

_allowed: ContextVar[set[str] | None] = ContextVar("agentrl_allowed_names", default=None)
_CODE: Final = re.compile(r"([\w-]+(?:\.[\w-]+)*)(?::\w+)?(?:\(\))?")
"""A module with a function in it, or a package that is called without arguments. Packages that load others by
their name may read a longer one in their own way: verifiers takes the ``os`` of ``package.x/os``."""
_CODE_FLAGS: Final = frozenset({
    "advantage", "critic_head", "group_filter", "loss_calculater", "new_context", "report_to",
    "tool_call_parser", "tools",
})  # fmt: skip
"""Flags that name functions."""
_TRUSTING_FLAGS: Final = frozenset({"allowed_modules", "import_modules", "trust_remote_code"})
"""Flags that let a process import modules."""
_PATH: Final = re.compile(r"[^\s,:'\"\[\]()]+:[^\s,'\"\[\]()]*")
"""``module:function`` in the value of a flag, which may list several."""
_PORTS: Final = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_SHOWN: Final = 200


def allow(names: Iterable[str]) -> None:
    """Restrict this process to ``names``: what is not among them, and not below one of them, is refused.

    Below a module or package lies all that it holds, below a host its ports, below a folder its files.
    Further calls add names. Before the first call everything is allowed. A process that reads names from a
    shared database calls this, so that the database cannot make it run other code or reach other servers.
    """
    allowed = _allowed.get()
    if allowed is None:
        _allowed.set(set(names))
    else:
        # Add to the same set: tasks that run already have copied the variable, and share what it holds.
        allowed.update(names)


def call_name(code: str, arguments: str) -> str:
    """Return the name of a call of ``code`` with ``arguments``, which are JSON.

    Arguments are part of what is allowed: they may choose commands to run. None are ``{}``.
    """
    return f"{code}({'' if arguments.strip() in ('', '{}') else arguments})"


def server_name(url: str) -> str:
    """Return the name of the server at ``url``; a malformed one, or one with a user, is put in quotes."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return f"//{url!a}"
    host = parts.hostname or ""
    # Refuse a backslash: some clients read it as a slash, and so reach another host than urlsplit names.
    is_plain = host and port and "@" not in parts.netloc and "\\" not in url and url.isprintable()
    return f"//{f'[{host}]' if ':' in host else host}:{port}" if is_plain else f"//{url!a}"


def file_name(path: str) -> str:
    """Return the name of a file or folder. Links are not followed."""
    plain = os.path.normpath(path)
    # Take one slash of two: normpath keeps them, and here they would name a server.
    return plain.replace("//", "/", 1) if os.path.isabs(plain) else f"./{plain}"


def names_outside(names: Iterable[str]) -> frozenset[str]:
    """Return the ``names`` that need a permission: all except what is built in."""
    return frozenset(name for name in names if any(mark in name for mark in ":(/"))


def code_of_flags(flags: Mapping[str, Any]) -> frozenset[str]:
    """Return ``flag name`` for each name of code in the flags of a process, as a run stores them."""
    named = {f"{flag} {name}" for flag in _CODE_FLAGS for name in _PATH.findall(str(flags.get(flag)))}
    whole = {f"{flag} {flags[flag]}" for flag in _TRUSTING_FLAGS if flags.get(flag)}
    return frozenset(named | whole)


def is_allowed(name: str) -> bool:
    """Return whether data may name ``name`` in this process."""
    allowed = _allowed.get()
    return allowed is None or not names_outside([name]) or not allowed.isdisjoint((name, *_above(name)))


def is_listed(name: str) -> bool:
    """Return whether data may name ``name`` even where nothing was restricted: in requests of clients."""
    return not names_outside([name]) or (_allowed.get() is not None and is_allowed(name))


def require_allowed(name: str, what: str = "function") -> None:
    """Raise ConfigError unless data may name ``name``, which is a ``what``."""
    if is_allowed(name):
        return
    if name.startswith("//"):
        means, flag = "is on a server that this process may not reach", f"--allowed_hosts {name[2:]}"
    elif name.startswith(("/", "./")):
        means = "is a file or folder that this process may not read"
        flag = f"--allowed_folders {quoted(name)}"
    elif name.endswith(")") and not name.endswith("()"):
        means, flag = "is called with arguments that nobody allowed", ""
    else:
        means = "is of a module that this process may not import"
        flag = f"--allowed_modules {name.partition(':')[0].removesuffix('()')}"
    raise ConfigError(
        f"the {what} {name[:_SHOWN]!r} {means}",
        hint=f"if you trust it: {f'{flag}, or ' if flag else ''}load the task file that names it with"
        " `agentrl tasks load` as a user who may write Imports",
    )


def flags_allowing(names: Iterable[str]) -> str:
    """Return the flags that allow ``names``."""
    flags: dict[str, set[str]] = {}
    for name in names:
        if name.startswith("//"):
            flags.setdefault("--allowed_hosts", set()).add(name[2:])
        elif name.startswith(("/", "./")):
            flags.setdefault("--allowed_folders", set()).add(name)
        else:
            flags.setdefault("--allowed_modules", set()).add(name.partition(":")[0].partition("(")[0])
    return " ".join(f"{flag} {quoted(','.join(sorted(values)))}" for flag, values in sorted(flags.items()))


def _above(name: str) -> Iterable[str]:
    """Yield what allows ``name`` beside itself."""
    if name.startswith("//"):
        yield name.rpartition(":")[0]
    elif name.startswith(("/", "./")):
        path = PurePosixPath(name)
        # Allow nothing that still climbs: the parents of its text are not the folders that hold it.
        if ".." not in path.parts:
            places = [path] if path.is_absolute() else [path, PurePosixPath(os.getcwd()) / path]
            for place in places:
                for parent in (place, *place.parents):
                    yield file_name(str(parent))
    elif not name.endswith(")") or name.endswith("()"):
        yield name.removesuffix("()")
        found = _CODE.fullmatch(name)
        parts = found[1].split(".") if found else []
        yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


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
