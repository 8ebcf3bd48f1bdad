"""Read tasks from any source, or generate those of an environment, and load them into a run."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast
from urllib.parse import parse_qsl

from pydantic import Field

from agentrl.base.process_pool import run_in_process
from agentrl.base.registry import import_modules
from agentrl.base.user_code import allow, describe
from agentrl.base.validation import SettingsModel, read_config
from agentrl.config.schema import TaskConfig
from agentrl.documents.mixture import MIXED_SPLIT, Mixture, SourceSettings, is_mixture, read_mixture
from agentrl.documents.task import Task, scorer_weights
from agentrl.documents.task_file import HUB, Item, ReadResult, TaskSource, open_task_source, read_tasks
from agentrl.documents.task_json import BadTaskError
from agentrl.documents.task_presets import TaskRows
from agentrl.environments.environment import (
    ENVIRONMENTS,
    Environment,
    TaskRequest,
    environment_names,
    names_of,
)
from agentrl.errors import AgentRLError, ScorerError, TaskEnvironmentError, TaskFileError, nearest
from agentrl.observe.terminal import clean
from agentrl.rollout.preflight import TaskNames, unusable_environments
from agentrl.scoring.answers import require_readable, unscorable
from agentrl.scoring.math_equality import number, unparsed

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.store.tasks import LoadResult

logger = logging.getLogger(__name__)

PREFIX = "env:"
DEFAULT_COUNT = 1000
LARGEST_COUNT = 10_000_000
ANSWERING_AGENT = "multi_turn"
"""The agent of tasks whose environment answers messages, unless a task names another."""

_OWN = ("n", "seed", "split", "agent_name")
_HINT = "write env:NAME?n=1000&seed=1, in quotes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address(SettingsModel):
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
    look: Callable[[Task, Item], None] = lambda task, item: None, name: str | None = None,
) -> ReadResult:  # fmt: skip
    """Read the tasks of any source; see ``read_tasks``. An answer that its scorer cannot read is bad.

    ``require_names`` raises BadTaskError for a task that names what cannot be used. ``rows`` are those of the
    flags: a source of a mixture may say how its own rows are read.
    """
    if is_mixture(path):
        mixture = _open_mixture(path, split)
        return ReadResult.mixed(
            {
                source: read_task_source(
                    _beside(path, each.path), split=split, seed=seed, shuffle=shuffle,
                    num_generations=num_generations, skip_bad_lines=skip_bad_lines, rows=_rows(each, rows),
                    require_names=require_names, look=look, name=source,
                )
                for source, each in mixture.sources.items()
            },
            mixture,
        )  # fmt: skip

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
        look=look, names=names, name=name,
    )  # fmt: skip


def _open_mixture(path: str | Path, split: str) -> Mixture:
    """Read a mixture. Raises TaskFileError for another split than the training tasks'."""
    if split != MIXED_SPLIT:
        raise TaskFileError(
            f"{path} is a mixture, and tasks of split {split} have neither weights nor gates",
            hint="evaluate its sources one by one: --eval_file PATH",
        )
    return read_mixture(path)


def _beside(mixture: str | Path, path: str) -> str:
    """Return the path of a source, which is relative to the mixture's file."""
    is_path = not is_address(path) and not path.startswith(HUB)
    return str(Path(mixture).parent / os.path.expanduser(path)) if is_path else path


def _rows(source: SourceSettings, rows: TaskRows | None) -> TaskRows | None:
    """Return how the rows of a source are read: as it says, or else as the flags say."""
    if source.task_preset is None and source.task_fields is None:
        return rows
    return TaskRows.parse(source.task_preset or "auto", source.task_fields or "")


def open_source(text: str, split: str) -> TaskSource:
    """Open a task file, a folder of data or of Harbor tasks, ``hf://NAME`` or ``env:NAME?…``, for ``split``.

    Raises TaskFileError, and ConfigError for what this machine cannot run or read.
    """
    if is_mixture(text):
        raise TaskFileError(f"{text} is a mixture of task files", hint="name one of its sources")
    if is_address(text):
        return generate(text, split)
    return open_task_source(text, "train" if split == "train" else "eval")


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


_PARSED = 200
_PARSE_SECONDS = 60.0


async def read_source(
    path: str,
    flags: TaskConfig,
    *,
    split: str,
    seed: int = 0,
    look: Callable[[Task, Item], None] = lambda task, item: None,
) -> ReadResult:
    """Read the tasks of any source by ``flags``, with every check that does not need the run.

    A task that names an agent, a scorer or a schema that this process cannot use is bad: the same in every
    command. ``look`` is that of ``read_tasks``. Raises TaskFileError, and ConfigError for a module of
    ``--import_modules``.
    """
    import_modules(flags.imported_modules)
    result = await asyncio.to_thread(
        read_task_source,
        path,
        split=split,
        seed=seed,
        shuffle=flags.shuffle_tasks,
        num_generations=flags.num_generations,
        skip_bad_lines=flags.skip_bad_lines,
        rows=TaskRows.parse(flags.task_preset, flags.task_fields),
        require_names=TaskNames().require,
        look=look,
    )
    return replace(
        result,
        warnings=(
            *result.warnings,
            *await unparsed_answers(result.tasks),
            *await unscorable(result.kinds),
            *unusable_environments(result.names),
        ),
    )


async def unparsed_answers(tasks: Sequence[Task]) -> list[str]:
    """Return a warning about the answers of scorer ``math`` that math-verify cannot parse.

    Plain numbers are not parsed; of the other answers at most ``_PARSED`` are, spread over the tasks.
    """
    wanted = {}
    for task in (tasks[index] for index in range(0, len(tasks), max(1, len(tasks) // _PARSED))):
        if (
            "math" in scorer_weights(task.scorer)
            and isinstance(task.answer, str)
            and number(task.answer) is None
        ):
            wanted[task.task_id] = task.answer
    if not wanted or find_spec("math_verify") is None:
        return []
    try:
        async with asyncio.timeout(_PARSE_SECONDS):
            bad = await run_in_process(unparsed, tuple(wanted.values()))
    except (TimeoutError, ScorerError) as error:
        return [
            f"math-verify could not parse {len(wanted)} answers: {clean(str(error) or 'it took too long')}"
        ]
    named = [
        f"{task} ({answer[:40]!r})"
        for (task, answer), is_bad in zip(wanted.items(), bad, strict=True)
        if is_bad
    ]
    if not named:
        return []
    return [
        f"math-verify cannot parse {len(named)} of {len(wanted)} answers examined, so only the same text"
        f" scores 1: {', '.join(named[:3])}"
    ]


async def load_read_tasks(store: Store, path: str, result: ReadResult) -> None:
    """Load the tasks that were read from ``path`` into their split. Idempotent.

    Raises TaskFileError if a loaded task has changed, and if the run was begun with another file.

    This process may use the code, servers and files that the file names from now on; so may the other
    processes of the run, if this user may write the run's list.
    """
    if result.reading is not None:
        logger.info("%s", result.reading)
    for warning in result.warnings:
        logger.warning("%s", warning)
    loaded, _ = await store_tasks(store, result, append=False)
    allow(result.outside)
    logger.info(
        "tasks loaded",
        extra={
            "file": path,
            "new": loaded.inserted,
            "there": loaded.existing,
            "skipped": len(result.skipped),
        },
    )


async def store_tasks(
    store: Store, result: ReadResult, *, update: bool = False, append: bool = True
) -> tuple[LoadResult, tuple[str, ...]]:
    """Store the tasks of a file, and add the code, servers and files that it names to the run's list.

    Returns what was loaded, and the names that this user may not add to the list. With ``update``, loaded
    tasks that have not begun are changed, and so is the mixture. Without ``append``, a run that was begun
    with another file is refused: ``Tasks.load``.
    """
    for image in result.images():
        await store.images.put(image)
    is_mixed = False
    if result.tasks[0].split == MIXED_SPLIT:
        is_mixed = await store.mixtures.check(result.mixture, update=update, append=append)
    # Store a new mixture before its tasks: otherwise samplers would begin them in order.
    if result.mixture and not is_mixed:
        await store.mixtures.write(result.mixture)
    loaded = await store.tasks.load(result.tasks, update=update, append=append)
    # And a longer one after them: its turns would wait for tasks that are not there.
    if is_mixed:
        await store.mixtures.write(result.mixture)
    is_written = await store.imports.add(result.outside)
    return loaded, () if is_written else tuple(sorted(result.outside))
