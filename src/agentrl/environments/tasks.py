"""Read the tasks of any source: a file, a folder, ``hf://NAME``, or an environment that generates them."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, cast
from urllib.parse import parse_qsl

from pydantic import Field

from agentrl.documents.task import Task
from agentrl.documents.task_file import ReadResult, read_tasks
from agentrl.documents.task_folders import open_files
from agentrl.documents.task_messages import BadTaskError
from agentrl.documents.task_rows import TaskRows
from agentrl.documents.task_source import Item, TaskSource
from agentrl.environments.base import ENVIRONMENTS, Environment, TaskRequest
from agentrl.environments.harbor.source import is_harbor, open_harbor
from agentrl.environments.session import environment_names, names_of
from agentrl.errors import AgentRLError, TaskEnvironmentError, TaskFileError, nearest
from agentrl.scoring.answers import require_readable
from agentrl.user_code import describe
from agentrl.validation import Settings, read_config

PREFIX = "env:"
DEFAULT_COUNT = 1000
LARGEST_COUNT = 10_000_000
ANSWERING_AGENT = "multi_turn"
"""The agent of tasks whose environment answers messages, unless a task names another."""

_OWN = ("n", "seed", "split", "agent_name")
_HINT = "write env:NAME?n=1000&seed=1, in quotes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address(Settings):
    """The tasks of an environment: ``env:NAME?n=…&seed=…&split=…&agent_name=…`` and its own options."""

    name: str
    n: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] = DEFAULT_COUNT
    seed: int = 0
    split: str | None = None
    agent_name: str | None = None
    """The agent of all tasks, instead of the one that the environment names."""
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the parts of ``text``. Raises TaskFileError."""
        name, _, query = text.removeprefix(PREFIX).partition("?")
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        except ValueError as error:
            raise TaskFileError(f"{text}: the part behind '?' is not key=value&…", hint=_HINT) from error
        given = dict(pairs)
        if not name or len(given) < len(pairs):
            problem = "a parameter is given twice" if name else "it names no environment"
            raise TaskFileError(f"{text}: {problem}", hint=_HINT)
        own = {key: given.pop(key) for key in _OWN if key in given}
        return read_config(
            cls, {"name": name, "options": given, **own}, text, hint=_HINT, error=TaskFileError
        )

    def request(self, split: str) -> TaskRequest:
        """Return what the environment gets for tasks that are loaded into ``split``."""
        own = self.split or ("train" if split == "train" else "eval")
        return TaskRequest(n=self.n, seed=self.seed, split=own, options=self.options)


def is_address(path: str | Path) -> bool:
    """Return whether ``path`` is the address of an environment rather than a file."""
    return str(path).startswith(PREFIX)


def read_task_source(
    path: str | Path, *, split: str = "train", seed: int = 0, shuffle: bool = True, num_generations: int = 8,
    skip_bad_lines: bool = False, rows: TaskRows | None = None,
    require_names: Callable[[Task], None] = lambda task: None,
    look: Callable[[Task, Item], None] = lambda task, item: None,
) -> ReadResult:  # fmt: skip
    """Read the tasks of any source; see ``read_tasks``. An answer that its scorer cannot read is bad.

    ``require_names`` raises BadTaskError for a task that names what cannot be used.
    """

    def check(task: Task, item: Item) -> None:
        require_readable(task)
        require_names(task)

    def names(task: Task) -> frozenset[str]:
        try:
            return names_of(task) | environment_names(task)
        except TaskEnvironmentError as error:
            raise BadTaskError(error.message) from error

    return read_tasks(
        path, split=split, seed=seed, shuffle=shuffle, num_generations=num_generations,
        skip_bad_lines=skip_bad_lines, source=open_source(str(path), split), rows=rows, check=check,
        look=look, names=names,
    )  # fmt: skip


def open_source(text: str, split: str) -> TaskSource:
    """Open a task file, a folder of data or of Harbor tasks, ``hf://NAME`` or ``env:NAME?…``, for ``split``.

    Raises TaskFileError, and ConfigError for what this machine cannot run or read.
    """
    if is_address(text):
        return generate(text, split)
    if is_harbor(text):
        return open_harbor(text)
    wanted = "train" if split == "train" else "eval"
    if text.startswith("hf://"):
        from agentrl.documents.task_hub import open_hub

        return open_hub(text, wanted)
    return open_files(text, wanted)


def generate(text: str, split: str) -> TaskSource:
    """Generate the tasks of an address for ``split`` into a temporary file, one a line.

    Raises ConfigError for an unknown environment or one that this machine cannot run, and TaskFileError for a
    malformed address or an environment that raises.
    """
    address = Address.parse(text)
    kind = ENVIRONMENTS.get(address.name)
    known = [*_OWN, *kind.options]
    for name in address.options:
        if name not in known:
            raise TaskFileError(
                f"{text}: environment {address.name} has no option {name!r}; it has {', '.join(known)}",
                hint=nearest(name, known) or _HINT,
            )
    kind.check()
    request = address.request(split)
    file = tempfile.TemporaryFile()  # noqa: SIM115  TaskSource closes it
    try:
        for task in _tasks(text, address, kind, request):
            file.write(task + b"\n")
    except BaseException:
        file.close()
        raise
    file.seek(0)
    return TaskSource(Path(text), cast("Any", file))


def _tasks(text: str, address: Address, kind: type[Environment], request: TaskRequest) -> Iterator[bytes]:
    """Yield the JSON of each task. Its id has the index and a digest of all that decides the task."""
    name, chosen = address.name, {"agent_name": address.agent_name} if address.agent_name else {}
    decides = [name, request.seed, request.split, sorted(request.options.items())]
    decided = json.dumps([*decides, chosen] if chosen else decides)
    digest = hashlib.sha256(decided.encode()).hexdigest()[:8]
    stem = f"{name.rpartition(':')[2]}-{digest}"
    fixed: dict[str, Any] = {"environment": name, **kind.task_defaults}
    if kind.answers_messages():
        fixed = {"agent_name": ANSWERING_AGENT, **fixed}
    made = 0
    try:
        for own in islice(kind.tasks(request), request.n):
            task = {"id": f"{stem}-{made:06d}", **fixed, **own, **chosen}
            yield json.dumps(task, ensure_ascii=False, allow_nan=False).encode()
            made += 1
    except AgentRLError:
        raise
    except Exception as error:
        raise TaskFileError(
            f"{text}: environment {name} cannot generate task {made}: {describe(error)}",
            hint="a task is a mapping of JSON values with the fields of a task file (docs/tasks.md)",
        ) from error
