"""Load tasks into a run, and check before the first claim that this process can run them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from agentrl.chat.chat_format import ChatFormat, unseen_problem
from agentrl.config.schema import AgentConfig, GroupConfig, RunConfig, SamplingConfig, TaskConfig
from agentrl.documents.task import Task, scorer_weights
from agentrl.documents.task_file import ReadResult
from agentrl.documents.task_rows import TaskRows
from agentrl.environments.base import ENVIRONMENTS
from agentrl.environments.tasks import read_task_source
from agentrl.errors import AgentRLError, ConfigError, ScorerError, ToolServerError, TrajectoryError
from agentrl.llm.agent_config import AgentSection, ModelEndpoint, load_judge
from agentrl.observe.terminal import clean
from agentrl.registry import allow_imports, paths_among
from agentrl.rollout.agent_io import agent_cfg_path
from agentrl.rollout.agents import AGENTS, check_agent
from agentrl.scoring.advantages import ESTIMATORS
from agentrl.scoring.answers import check_schema, number, unparsed
from agentrl.scoring.groups import GROUP_FILTERS
from agentrl.scoring.judge import JUDGES
from agentrl.scoring.process_pool import run_in_process
from agentrl.scoring.scorers import SCORERS
from agentrl.tools.pool import ToolPool

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.store.tasks import LoadResult, TaskReferences


logger = logging.getLogger(__name__)


async def read_task_file(
    run: RunConfig, tasks: TaskConfig, path: str, *, split: str, num_generations: int
) -> ReadResult:
    """Read the tasks of any source for ``split``. Raises TaskFileError."""
    result = await asyncio.to_thread(
        read_task_source,
        path,
        split=split,
        seed=run.seed,
        shuffle=tasks.shuffle_tasks,
        num_generations=num_generations,
        skip_bad_lines=tasks.skip_bad_lines,
        rows=TaskRows.parse(tasks.task_preset, tasks.task_fields),
        known_scorers=SCORERS.names(),
        known_agents=AGENTS.names(),
    )
    return replace(result, warnings=(*result.warnings, *await unparsed_answers(result.tasks)))


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

    This process may import the Python paths in the file from now on; so may the other processes of the run,
    if this user may write the run's list.
    """
    if result.reading is not None:
        logger.info("%s", result.reading)
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
    problems = unusable_scorers(names)
    if problems:
        raise ConfigError(
            "the tasks name scorers that cannot be used; nothing is loaded:\n  " + "\n  ".join(problems),
            hint="correct the names, or make their modules importable: set PYTHONPATH",
        )


def unusable_scorers(names: Mapping[str, Collection[str]]) -> list[str]:
    """Return why this machine cannot use scorers that tasks name: one text for each."""
    problems = []
    for name in sorted(names.get("scorer", ())):
        try:
            SCORERS.get(name)
        except ConfigError as error:
            problems.append(clean(f"{error.message} ({error.hint})"))
    return problems


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


_REACH_SECONDS = 5.0
_PARSED = 200
_PARSE_SECONDS = 60.0
_SHOWN = 10


def require_groups(groups: GroupConfig, num_generations: int) -> None:
    """Raise ConfigError for groups of one trajectory if advantages compare trajectories."""
    if num_generations == 1 and groups.min_score_spread > 0:
        raise ConfigError(
            "--num_generations is 1, so no group's scores can differ by --min_score_spread"
            f" {groups.min_score_spread:g}: nothing would be trained",
            hint="give --num_generations 2 or more (8 by default)",
        )
    if num_generations == 1 and ESTIMATORS.get(groups.advantage).needs_others:
        raise ConfigError(
            f"--num_generations is 1, and --advantage {groups.advantage} compares a group's trajectories:"
            " nothing would be trained",
            hint="give --num_generations 2 or more, or --advantage reward",
        )


async def probe(
    store: Store,
    tools: ToolPool,
    sampling: SamplingConfig,
    split: str,
    groups: GroupConfig | None = None,
    agent: AgentConfig | None = None,
    *,
    chat_format: ChatFormat | None = None,
) -> None:
    """Try the names in the unfinished tasks of ``split``. Raises ConfigError with all that cannot be used.

    ``groups`` are the rules of a split that is trained; ``agent`` names the agent of tasks that name none. A
    judge that does not answer is only a warning. Names of tool servers that only a manager knows, which is
    down, are checked later: ``require_tools``. Refuses tasks with images if ``chat_format`` shows none.
    """
    named = await store.tasks.references(split)
    problems: list[str] = []
    flags = agent or AgentConfig()

    def check_file(named: tuple[str | None, str | None]) -> None:
        name, path = named
        check_agent(name or flags.agent_name, agent_cfg_path(path, flags.agent_cfg_path))

    checks: Sequence[tuple[Mapping[Any, str], Callable[[Any], object]]] = (
        (named.agent_files, check_file),
        (named.scorers, SCORERS.get),
        (named.environments, lambda name: ENVIRONMENTS.get(name).check()),
        (named.answer_schemas, check_schema),
    )
    for names, check in checks:
        for name, task in names.items():
            _try(problems, task, partial(check, name))
    problems += _tool_problems(tools, named)
    if chat_format is not None and (unseen := _unseen_tools(chat_format, flags, tools)) is not None:
        logger.warning("%s", unseen)
    if named.images is not None and chat_format is not None and chat_format.vision is None:
        problems.append(
            f"tasks show images (task {ascii(named.images)[:80]}), and the model reads text only"
            f" (chat format {chat_format.name})\n    → sample with a Qwen-VL model and its own template"
        )
    if groups is not None and (own := groups.group_filter) is not None:
        _try(problems, None, lambda: GROUP_FILTERS.get(own))
    if groups is not None and named.smallest_group is not None:
        _try(problems, None, lambda: require_groups(groups, named.smallest_group or 0))
    judged = sorted(named.scorers.keys() & JUDGES)
    if judged:
        task = named.scorers[judged[0]]
        section = _try(problems, task, lambda: load_judge(sampling.agent_config_path))
        if section is not None:
            await asyncio.gather(*map(_reach, section.models))
    if problems:
        raise _refusal(problems, split)


async def require_tools(store: Store, tools: ToolPool, split: str) -> None:
    """Raise ConfigError if the unfinished tasks of ``split`` name tool servers that do not exist."""
    problems = _tool_problems(tools, await store.tasks.references(split))
    if problems:
        raise _refusal(problems, split)


def _try(problems: list[str], task: str | None, check: Callable[[], object]) -> AgentSection | None:
    """Call ``check``; append its ConfigError to ``problems``, with a task that is concerned."""
    try:
        result = check()
    except ConfigError as error:
        problems.append(_problem(error, task))
        return None
    return result if isinstance(result, AgentSection) else None


def _tool_problems(tools: ToolPool, named: TaskReferences) -> list[str]:
    problems = []
    for servers, task in named.tools.items():
        try:
            tools.list(servers)
        except ToolServerError as error:
            if error.outage is None:
                problems.append(_problem(error, task))
    return problems


def _problem(error: AgentRLError, task: str | None) -> str:
    where = f" (task {ascii(task)[:80]})" if task is not None else ""
    hint = f"\n    → {error.hint}" if error.hint else ""
    return f"{error.message}{where}{hint}"


def _refusal(problems: Sequence[str], split: str) -> ConfigError:
    more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return ConfigError(
        f"this process cannot work on the tasks of split {split!r}; nothing is claimed:\n  "
        + "\n  ".join(problems[:_SHOWN])
        + more,
        hint="correct this and start it again; `agentrl try` runs one task",
    )


async def _reach(endpoint: ModelEndpoint) -> None:
    """Send an endpoint one request; log a warning if it does not answer."""
    import httpx2

    try:
        async with httpx2.AsyncClient(timeout=_REACH_SECONDS) as client:
            await client.get(f"{endpoint.base_url.rstrip('/')}/models")
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        logger.warning(
            "the judge cannot be reached now", extra={"model": endpoint.model, "why": type(error).__name__}
        )


def _unseen_tools(chat_format: ChatFormat, agent: AgentConfig, tools: ToolPool) -> str | None:
    """Return which tools a first prompt does not name, and what to do; None if it names all."""
    schemas = tools.list()
    system = [{"role": "system", "content": agent.system_prompt}] if agent.system_prompt else []
    try:
        prompt = chat_format.render([*system, {"role": "user", "content": "?"}], schemas)
    except TrajectoryError:
        return None  # the rendering of each trajectory says why
    return unseen_problem(chat_format, prompt, schemas)
