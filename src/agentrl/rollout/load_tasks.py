"""Read tasks from any source, and load them into a run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from agentrl.config.schema import TaskConfig
from agentrl.documents.task import Task, scorer_weights
from agentrl.documents.task_file import ReadResult
from agentrl.documents.task_rows import TaskRows
from agentrl.documents.task_source import Item
from agentrl.environments.tasks import read_task_source
from agentrl.errors import ScorerError
from agentrl.observe.terminal import clean
from agentrl.permissions import allow
from agentrl.registry import import_modules
from agentrl.rollout.preflight import TaskNames, unusable_environments
from agentrl.scoring.math_equality import unparsed
from agentrl.scoring.normal_form import number
from agentrl.scoring.process_pool import run_in_process
from agentrl.scoring.scorable import unscorable

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.store.tasks import LoadResult


logger = logging.getLogger(__name__)

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
    tasks that have not begun are changed. Without ``append``, a run that was begun with another file is
    refused: ``Tasks.load``.
    """
    for image in result.images():
        await store.images.put(image)
    loaded = await store.tasks.load(result.tasks, update=update, append=append)
    is_written = await store.imports.add(result.outside)
    return loaded, () if is_written else tuple(sorted(result.outside))
