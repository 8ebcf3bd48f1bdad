"""Task files: JSONL or a JSON list → Tasks. Every bad line is named with its file, line and reason.

A file is read twice: once to check it and to note where each task is, then task by task on demand.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import overload

from agentrl.documents.task import Task
from agentrl.documents.task_json import BadTaskError, make_task, nearest_field, parse
from agentrl.documents.task_source import TaskSource
from agentrl.errors import TaskFileError

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Tasks in their sampling order, ``file:line: reason`` of every line that was skipped, and warnings.

    ``names`` holds every name that the tasks give for what runs them: {field: {name, …}}.
    """

    tasks: Sequence[Task]
    skipped: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    names: dict[str, set[str]] = field(default_factory=dict)


class _FileTasks(Sequence[Task]):
    """Tasks that are read from the file when they are asked for, in their sampling order."""

    def __init__(self, source: TaskSource, split: str, epoch: int, num_generations: int) -> None:
        self._source = source
        self._made = (split, epoch, num_generations)
        self._offsets = array("Q")
        self._lengths = array("Q")
        self._places = array("Q")
        """Order → index of the task in the file."""

    def add(self, offset: int, length: int) -> None:
        """Append the place of one task."""
        self._places.append(len(self._offsets))
        self._offsets.append(offset)
        self._lengths.append(length)

    def shuffle(self, seed: str) -> None:
        """Shuffle the order, the same way on every machine."""
        places = list(self._places)
        random.Random(seed).shuffle(places)
        self._places = array("Q", places)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self._read(order) for order in range(*index.indices(len(self)))]
        order = range(len(self))[index]
        return self._read(order)

    def _read(self, order: int) -> Task:
        place = self._places[order]
        try:
            value = parse(self._source.read(self._offsets[place], self._lengths[place]))
            return replace(make_task(value, *self._made), order=order)
        except (BadTaskError, OSError) as error:
            raise TaskFileError(
                f"the task file {self._source.path} changed while it was loaded: {error}",
                hint="load it again once nothing writes to it: what is loaded stays",
            ) from error


def read_tasks(
    path: str | Path, *, split: str = "train", epoch: int = 0, seed: int = 0, shuffle: bool = True,
    num_generations: int = 8, skip_bad_lines: bool = False,
    known_scorers: Collection[str] | None = None, known_agents: Collection[str] | None = None,
) -> ReadResult:  # fmt: skip
    """Check a task file, plain or gzip. One bad line makes it a TaskFileError, but for ``skip_bad_lines``.

    ``known_scorers`` and ``known_agents`` check names, where given; ``module:function`` is always let
    through. The order is shuffled by ``seed`` and the epoch, the same on every machine. The tasks are read
    from the file as they are used: memory does not grow with their size.
    """
    source = TaskSource(Path(path))
    known = {"scorer": known_scorers, "agent_name": known_agents}
    reading = _Reading(_FileTasks(source, split, epoch, num_generations), known)
    for item in source.items():
        where = f"{path}:{item.line}"
        try:
            if isinstance(item.value, BadTaskError):
                raise item.value
            reading.add(make_task(item.value, split, epoch, num_generations))
            reading.tasks.add(item.offset, item.length)
            reading.warn(where, item.value)
        except BadTaskError as error:
            reading.bad.append(f"{where}: {error}")
    if reading.bad and not skip_bad_lines:
        raise _bad_lines(path, reading.bad, len(reading.tasks))
    if not len(reading.tasks):
        raise TaskFileError(f"{path} holds no tasks", hint='write one {"id": …, "query": …} a line')
    if shuffle:
        reading.tasks.shuffle(f"{seed}/{epoch}")
    return ReadResult(reading.tasks, tuple(reading.bad), reading.warnings(), reading.names)


class _Reading:
    """What the first pass over a file has found."""

    def __init__(self, tasks: _FileTasks, known: dict[str, Collection[str] | None]) -> None:
        self.tasks = tasks
        self.bad: list[str] = []
        self.names: dict[str, set[str]] = {"scorer": set(), "agent_name": set(), "answer_schema": set()}
        self._known = known
        self._ids: set[str] = set()
        self._misspelt: dict[str, tuple[str, int]] = {}

    def add(self, task: Task) -> None:
        """Check the names and the id of a task, and note them. Raises BadTaskError."""
        for name, known in self._known.items():
            _check_name(name, getattr(task, name), known)
        if task.task_id in self._ids:
            raise BadTaskError(f"id {task.task_id[:80]!r} is used above")
        self._ids.add(task.task_id)
        for name, found in self.names.items():
            if getattr(task, name) is not None:
                found.add(getattr(task, name))

    def warn(self, where: str, item: dict[str, object]) -> None:
        """Note every field that looks like a misspelt one."""
        for name in item:
            if nearest_field(name) is not None:
                first, count = self._misspelt.get(name, (where, 0))
                self._misspelt[name] = (first, count + 1)

    def warnings(self) -> tuple[str, ...]:
        """One line for each misspelt field."""
        return tuple(
            f"{where}: the field {name!r} is unknown and kept in meta; did you mean {nearest_field(name)!r}?"
            + (f" ({count} tasks have it)" if count > 1 else "")
            for name, (where, count) in self._misspelt.items()
        )


def _bad_lines(path: str | Path, bad: Sequence[str], good: int) -> TaskFileError:
    more = f"\n  … and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return TaskFileError(
        f"{len(bad)} of {len(bad) + good} tasks of {path} cannot be read:\n  "
        + "\n  ".join(bad[:_SHOWN])
        + more,
        hint="correct these lines, or load the others with --skip_bad_lines",
    )


def _check_name(kind: str, name: str | None, known: Collection[str] | None) -> None:
    if name is not None and known is not None and name not in known and ":" not in name:
        raise BadTaskError(f"{kind} {name!r} is none of {', '.join(sorted(known))}")
