"""Load a task file, or the tasks of an environment, into a run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from agentrl.config.schema import RunConfig, TaskConfig
from agentrl.documents.task_file import ReadResult
from agentrl.environments.base import ENVIRONMENTS
from agentrl.environments.tasks import read_task_source
from agentrl.errors import ConfigError
from agentrl.observe.terminal import clean
from agentrl.registry import allow_imports, paths_among
from agentrl.rollout.agents import AGENTS
from agentrl.scoring.answers import check_schema
from agentrl.scoring.scorers import SCORERS

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.store.task_loading import LoadResult

logger = logging.getLogger(__name__)


async def read_task_file(
    run: RunConfig, tasks: TaskConfig, path: str, *, split: str, num_generations: int
) -> ReadResult:
    """Read a task file or ``env:NAME?…`` for ``split``. Raises TaskFileError."""
    return await asyncio.to_thread(
        read_task_source,
        path,
        split=split,
        seed=run.seed,
        shuffle=tasks.shuffle_tasks,
        num_generations=num_generations,
        skip_bad_lines=tasks.skip_bad_lines,
        known_scorers=SCORERS.names(),
        known_agents=AGENTS.names(),
    )


async def load_read_tasks(store: Store, path: str, result: ReadResult) -> None:
    """Load the tasks that were read from ``path`` into their split. Idempotent.

    Raises TaskFileError if a loaded task has changed, and if the run was begun with another file.

    This process may import the Python paths in the file from now on; so may the other processes of the run,
    if this user may write the run's list.
    """
    for warning in result.warnings:
        logger.warning("%s", warning)
    loaded, _ = await store_tasks(store, result, append=False)
    allow_imports(_paths(result))
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
    """Store the tasks of a file, and add the Python paths in it to the run's list of importable paths.

    Returns what was loaded, and the paths that this user may not add to the list. With ``update``, loaded
    tasks that have not begun are changed. Without ``append``, a run that was begun with another file is
    refused: ``Tasks.load``.
    """
    for image in result.images():
        await store.images.put(image)
    loaded = await store.tasks.load(result.tasks, update=update, append=append)
    paths = _paths(result)
    return loaded, () if await store.imports.add(paths) else tuple(paths)


def _paths(result: ReadResult) -> frozenset[str]:
    """Return the Python paths that the tasks name."""
    fields = ("scorer", "agent_name", "environment")
    return paths_among(name for field in fields for name in result.names.get(field, ()))


def require_scorers(names: Mapping[str, Collection[str]]) -> None:
    """Import the scorers that tasks name. Raises ConfigError that names each that cannot be used."""
    problems = []
    for name in sorted(names.get("scorer", ())):
        try:
            SCORERS.get(name)
        except ConfigError as error:
            problems.append(clean(f"{error.message} ({error.hint})"))
    if problems:
        raise ConfigError(
            "the tasks name scorers that cannot be used; nothing is loaded:\n  " + "\n  ".join(problems),
            hint="correct the names, or make their modules importable: set PYTHONPATH",
        )


def unknown_names(names: Mapping[str, Collection[str]]) -> list[str]:
    """Return why this machine cannot use what tasks name: one text for each agent and so on."""
    checks: dict[str, Callable[[str], object]] = {
        "agent_name": AGENTS.get,
        "environment": lambda name: ENVIRONMENTS.get(name).check(),
        "answer_schema": check_schema,
    }
    warnings = []
    for field, check in checks.items():
        for name in sorted(names.get(field, ())):
            try:
                check(name)
            except ConfigError as error:
                warnings.append(clean(f"{field}: {error.message} ({error.hint})"))
    return warnings
