"""Follow recorded calls from the functions with which a walk begins, in the order in which they are read."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

SOURCE: Final = Path(__file__).parents[2] / "src" / "agentrl"

LEFT_OUT: Final = {
    "observe/logging.py": "logging calls it, and not the walk",
    "base/user_code.py:_task": "asyncio calls it for each task",
    "store/mechanics/change_stream.py": "it watches the database in the background",
    "store/claims.py:ExpiredLeases": "only a claim that finds no other work looks there",
    "store/claims.py:GroupAdmission._open_groups": "only a claim that may begin groups counts them",
    "rollout/sampler.py:Sampler.is_done": "only a sampler that has nothing to do asks",
    "columns/scores.py:QueuedScores": "only what is not scored at once waits in the queue",
}
"""Files, classes and functions that are no part of a walk, or only now and then, and why."""


class Function(NamedTuple):
    """A function of a module, or a method, with all that is defined in it."""

    file: str
    name: str

    @property
    def is_left_out(self) -> bool:
        """Whether calls of it, and by it, do not count."""
        owner = self.name.partition(".")[0]
        return not LEFT_OUT.keys().isdisjoint((self.file, f"{self.file}:{owner}", f"{self.file}:{self.name}"))


@dataclass(frozen=True)
class Way:
    """A walk to measure: the command whose processes are recorded, and the functions with which it begins."""

    title: str
    command: str
    begins: tuple[Function, ...]


WAYS: Final = {
    "step": Way(
        "A training step",
        "train",
        (
            Function("train/loop.py", "Trainer._next_data"),
            Function("data/stream.py", "DataStream._wait"),  # which the step before has begun
            Function("train/loop.py", "Trainer._train"),
            Function("train/loop.py", "Trainer._train_all"),
        ),
    ),
    "claim": Way(
        "A claim until its DBRecordData",
        "sample",
        (
            Function("columns/pool.py", "Pool.work"),
            Function("rollout/housekeeping.py", "Housekeeping.finalize_own"),
        ),
    ),
}


@dataclass
class Walk:
    """What a walk came through."""

    functions: list[Function] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """In the order in which they are entered."""
    returns: list[tuple[Function, Function]] = field(default_factory=list)
    """Calls into a file that was entered before."""

    @property
    def figures(self) -> dict[str, int]:
        """What may fall, and must not rise."""
        return {"files": len(self.files), "returns": len(self.returns)}


Calls = dict[Function, dict[Function, int]]
"""Function → each function that it calls, with the first line that does."""


def walk(calls: Calls, begins: Iterable[Function]) -> Walk:
    """Walk depth first, and from each function in the order of its lines. Each call is taken once.

    The order is that of a reader who follows every call at once. It depends on what was called, and neither
    on the time nor on the number of the calls.
    """
    found = Walk()
    ahead: list[tuple[Function | None, Function]] = [(None, function) for function in reversed(tuple(begins))]
    seen: set[Function] = set()
    entered: dict[str, None] = {}
    while ahead:
        caller, function = ahead.pop()
        if function.is_left_out:
            continue
        if function.file not in entered:
            entered[function.file] = None
        elif caller is not None and caller.file != function.file:
            found.returns.append((caller, function))
        if function in seen:
            continue
        seen.add(function)
        found.functions.append(function)
        called = calls.get(function, {})
        order = sorted(called, key=lambda each: (called[each], each), reverse=True)
        ahead += [(function, each) for each in order]
    found.files = list(entered)
    return found


def read_calls(traces: Iterable[Path]) -> Calls:
    """Read what the recorder wrote. Functions within a function are part of it."""
    calls: Calls = defaultdict(dict)
    unknown: set[Function] = set()
    for path in traces:
        for line in path.read_text(encoding="utf-8").splitlines():
            file, number, called_file, called_line = line.split("\t")
            called = function_at(called_file, int(called_line))
            if not file:
                unknown.add(called)
            elif (caller := function_at(file, int(number))) != called:
                calls[caller][called] = min(int(number), calls[caller].get(called, int(number)))
    for callback in unknown:
        for caller, named_at in _named_by(callback):
            calls[caller].setdefault(callback, named_at)
    return calls


def _named_by(callback: Function) -> Iterator[tuple[Function, int]]:
    """Yield the functions of the same file that name a callback, with the line: they gave it to asyncio."""
    name = callback.name.rpartition(".")[2]
    for node in ast.walk(_tree(callback.file)):
        if (isinstance(node, ast.Attribute) and node.attr == name) or (
            isinstance(node, ast.Name) and node.id == name
        ):
            caller = function_at(callback.file, node.lineno)
            if caller != callback:
                yield caller, node.lineno


def function_at(file: str, line: int) -> Function:
    """Return the outermost function or method around a line; one without a name for the module itself."""
    for begin, end, name in _functions(file):
        if begin <= line <= end:
            return Function(file, name)
    return Function(file, "")


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse((SOURCE / file).read_text(encoding="utf-8"))


@cache
def _functions(file: str) -> tuple[tuple[int, int, str], ...]:
    """Return the first line, the last line and the name of each function and method of a file."""
    return tuple(_defined_in(_tree(file), ""))


def _defined_in(node: ast.AST, prefix: str) -> Iterator[tuple[int, int, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            begin = min((child.lineno, *(each.lineno for each in child.decorator_list)))
            yield begin, child.end_lineno or begin, prefix + child.name
        elif isinstance(child, ast.ClassDef):
            yield from _defined_in(child, f"{prefix}{child.name}.")
        else:
            yield from _defined_in(child, prefix)
