"""Record the calls between functions of AgentRL in a trainer or a sampler.

A process records until it has trained or finalized a few times, and then writes one file of lines: the file
and line that call, the file and first line of the called function, separated by tabs. Afterwards it runs as
fast as before. A process that ends earlier writes nothing: how it ends is no part of a walk.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.thread import _WorkItem
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, Final, NamedTuple

PACKAGE: Final = "/src/agentrl/"
CARRIERS: Final = frozenset(
    {
        "base/concurrency.py", "base/user_code.py",
        "store/mechanics/connection.py", "store/mechanics/retry.py",
    }
)  # fmt: skip
"""Files whose functions run what they are given: the caller is the function that gave it."""


class Role(NamedTuple):
    """What a process records. A function is `module:Class.method`, and async."""

    begins: tuple[str, ...]
    """The functions with which the walk begins. What they call belongs to it, in their tasks too."""
    counted: str
    """The function whose calls tell when to record."""
    first: int
    last: int
    """The walk is recorded from the first of these calls until the last."""


ROLES: Final = {
    "train": Role(
        ("agentrl.train.loop:Trainer._train_all",), "agentrl.train.loop:Trainer._train", 2, 4,
    ),
    "sample": Role(
        (
            "agentrl.columns.pool:Pool.work",
            "agentrl.rollout.housekeeping:Housekeeping.finalize_own",
        ),
        "agentrl.rollout.housekeeping:GroupFinalizer.finalize", 2, 14,
    ),
}  # fmt: skip
"""Command → its role: two steps, twelve groups. What only happens once, and while engines start, is left out.

Fewer groups do not meet each way in which a trajectory and a group may end.
"""

_RESUMED: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_LOOP: Final = asyncio.Handle._run.__code__
"""What an event loop calls: above it is only the function that runs the loop."""
_MAKES_TASK: Final = asyncio.BaseEventLoop.create_task.__code__
_PASS_ON: Final = (_MAKES_TASK, ThreadPoolExecutor.submit.__code__, threading.Thread.__init__.__code__)

Place = tuple[CodeType, int]
"""A code object and the offset of an instruction in it."""

_made_at: ContextVar[Place | None] = ContextVar("made_at", default=None)
"""Where the current task was made; None outside the walk, offset 0 before it was recorded."""


class Known(NamedTuple):
    """What is known of a code object."""

    file: str = ""
    """Below the package; empty for other packages."""
    is_function: bool = False
    """False for the body of a module or of a class."""
    resumes: bytes = b""
    """The instructions of a coroutine or generator, which is entered each time it goes on."""
    passes_on: bool = False
    """Whether it is given what another task or thread will run."""


class Recorder:
    """The profile function of every thread."""

    def __init__(self, role: Role, output: Path) -> None:
        self._role, self._output = role, output
        self._known: dict[CodeType, Known] = {}
        self._calls: set[tuple[Place | None, CodeType]] = set()
        self._handed: dict[CodeType, set[Place | None]] = {}
        """What other threads were given, and where."""
        self._count = 0

    def begin(self) -> None:
        """Follow the functions of the role, and profile between two calls of one: all else stays as fast."""
        for name in self._role.begins:
            _before(name, lambda code: _made_at.set((code, 0)))
        _before(self._role.counted, self._counted)
        run = _WorkItem.run

        def recorded(item: _WorkItem[Any]) -> None:
            sys.setprofile(self._event if self._is_on else None)  # a model is loaded in such a thread
            run(item)

        _WorkItem.run = recorded  # type: ignore[assignment,method-assign]
        threading.setprofile(self._event)

    @property
    def _is_on(self) -> bool:
        return self._role.first <= self._count < self._role.last

    def _counted(self, code: CodeType) -> None:
        self._count += 1
        if self._is_on:
            sys.setprofile(self._event)
        elif self._count == self._role.last:
            sys.setprofile(None)
            partial = self._output.with_suffix(".partial")
            partial.write_text("".join(sorted(set(self._lines()))), encoding="utf-8")
            partial.rename(self._output)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        known = self._known.get(code) or self._look_at(code)
        if known.is_function and not (known.resumes and known.resumes[frame.f_lasti + 1] & 3):
            self._entered(frame, known)
        if known.passes_on and _made_at.get() is not None:
            self._passed_on(frame)

    def _look_at(self, code: CodeType) -> Known:
        begin = code.co_filename.rfind(PACKAGE)
        file = code.co_filename[begin + len(PACKAGE) :] if begin >= 0 else ""
        self._known[code] = known = Known(
            file=file,
            is_function=bool(file) and bool(code.co_flags & inspect.CO_OPTIMIZED),
            resumes=code.co_code if file and code.co_flags & _RESUMED else b"",
            passes_on=code in _PASS_ON
            or (file == "base/concurrency.py" and code.co_qualname == "Threads.run"),
        )
        return known

    def _entered(self, frame: FrameType, known: Known) -> None:
        code, made_at = frame.f_code, _made_at.get()
        if self._count >= self._role.last:
            sys.setprofile(None)
        elif self._is_on and (made_at is not None or code in self._handed):
            caller = self._caller(frame, by_carrier=known.file in CARRIERS)
            callers: Set[Place | None] | None = {caller} if caller else self._handed.get(code)
            if callers is None:  # the root of a task; or a callback, and nobody knows who gave it
                callers = {made_at if made_at and made_at[1] and _is_in_task() else None}
            self._calls.update((place, code) for place in callers)
            if made_at is None:  # the root of a thread
                _made_at.set(next(iter(callers)))

    def _caller(self, frame: FrameType, by_carrier: bool = False) -> Place | None:
        """Return where the function of ``frame`` is called; None at the root of a thread or of a task."""
        above = frame.f_back
        while above is not None and above.f_code is not _LOOP:
            known = self._known.get(above.f_code) or self._look_at(above.f_code)
            if known.file and (by_carrier or known.file not in CARRIERS):
                return above.f_code, above.f_lasti
            above = above.f_back
        return None

    def _passed_on(self, frame: FrameType) -> None:
        """Remember for a new task or thread where it comes from."""
        place = self._caller(frame) or _made_at.get()
        assert place is not None
        given = frame.f_locals
        if frame.f_code is not _MAKES_TASK:
            for code in _codes(tuple(given.values())):
                self._handed.setdefault(code, set()).add(place)
        elif (context := given.get("kwargs", given).get("context")) is not None:
            context.run(_made_at.set, place)
        else:  # the task gets a copy of this context
            _made_at.set(place)

    def _lines(self) -> Iterator[str]:
        for place, code in tuple(self._calls):
            called = f"{self._known[code].file}\t{code.co_firstlineno}\n"
            if place is None:
                yield f"\t0\t{called}"
            elif self._known[place[0]].is_function:  # not a call while a module is imported
                yield f"{self._known[place[0]].file}\t{_line(*place)}\t{called}"


def _is_in_task() -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False


def _line(code: CodeType, offset: int) -> int:
    lines = (line for begin, end, line in code.co_lines() if begin <= offset < end and line)
    return next(lines, code.co_firstlineno)


def _codes(value: object) -> Iterator[CodeType]:
    """Find the functions in the arguments of a call."""
    if isinstance(value, functools.partial):
        value = (value.func, *value.args)
    if isinstance(value, MethodType):
        value = value.__func__
    if isinstance(value, FunctionType):
        yield value.__code__
    elif isinstance(value, tuple):
        for item in value:
            yield from _codes(item)


def _before(name: str, call: Callable[[CodeType], object]) -> None:
    """Call ``call`` with the code of an async method each time before it runs, in its task."""
    module, _, path = name.partition(":")
    owner = getattr(sys.modules[module], path.partition(".")[0])
    method = getattr(owner, path.partition(".")[2])

    @functools.wraps(method)
    async def called(*arguments: Any, **named: Any) -> Any:
        call(method.__code__)
        return await method(*arguments, **named)

    setattr(owner, method.__name__, called)


def record(command: str, folder: str) -> None:
    """Record this process, which runs ``agentrl COMMAND``, into a file of ``folder``."""
    recorder = Recorder(ROLES[command], Path(folder) / f"{command}-{os.getpid()}.tsv")
    run = asyncio.run

    def record_and_run(*arguments: Any, **named: Any) -> Any:
        asyncio.run = run
        recorder.begin()
        return run(*arguments, **named)

    asyncio.run = record_and_run  # the modules are imported by then
