"""Check, before anything is loaded or claimed, that this process can use what tasks and flags name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrl.base.registry import Registry
from agentrl.chat.chat_format import ChatFormat, unseen_problem
from agentrl.config.schema import AgentConfig, GroupConfig, SamplingConfig
from agentrl.documents.task import Task, scorer_weights
from agentrl.documents.task_json import BadTaskError
from agentrl.environments.environment import ENVIRONMENTS, require_names
from agentrl.errors import AgentRLError, ConfigError, TaskEnvironmentError, ToolServerError, TrajectoryError
from agentrl.llm.agent_config import ModelEndpoint, load_judge
from agentrl.observe.terminal import clean
from agentrl.rollout.agent_io import agent_cfg_path
from agentrl.rollout.agents import AGENTS, check_agent
from agentrl.scoring.answers import check_schema
from agentrl.scoring.groups import ESTIMATORS, GROUP_FILTERS
from agentrl.scoring.judge import JUDGES
from agentrl.scoring.reward_model import REWARD, RewardModel, refused_endpoints
from agentrl.scoring.scorers import SCORERS
from agentrl.tools.pool import ToolPool

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.store.tasks import TaskReferences


logger = logging.getLogger(__name__)

_REACH_SECONDS = 5.0
_SHOWN = 10


class TaskNames:
    """Checks the scorer, the agent and the schema that a task names, each name once.

    A name without a path is known if it is built in, of an entry point or of ``--import_modules`` when this
    is made. What the path of another task registers does not count: the answer would depend on their order.
    """

    def __init__(self) -> None:
        self._known = {id(registry): registry.names() for registry in (AGENTS, SCORERS)}
        self._problems: dict[tuple[str, str], str | None] = {}

    def require(self, task: Task) -> None:
        """Raise BadTaskError if the task names what this process cannot use."""
        named = [("scorer", name) for name in scorer_weights(task.scorer)]
        named += [("agent_name", task.agent_name)] if task.agent_name is not None else []
        for field, name in (*named, ("answer_schema", task.answer_schema)):
            if (field, name) not in self._problems:
                self._problems[field, name] = self._problem(field, name)
            if (problem := self._problems[field, name]) is not None:
                raise BadTaskError(problem)

    def agent(self, name: str) -> None:
        """Raise ConfigError for an agent that cannot be used."""
        self._get(AGENTS, name)

    def scorer(self, name: str) -> None:
        """Raise ConfigError for a scorer that cannot be used."""
        self._get(SCORERS, name)

    def _problem(self, field: str, name: str) -> str | None:
        checks = {"scorer": self.scorer, "agent_name": self.agent, "answer_schema": check_schema}
        try:
            checks[field](name)
        except ConfigError as error:
            return clean(f"{error.message} ({error.hint})")
        return None

    def _get(self, registry: Registry[Any], name: str) -> None:
        known = self._known[id(registry)]
        if ":" not in name and name not in known:
            raise registry.unknown(name, known)
        registry.get(name)


def unusable_environments(names: Mapping[str, Collection[str]]) -> list[str]:
    """Return why this machine cannot run environments that tasks name: one text for each."""
    warnings = []
    for name in sorted(names.get("environment", ())):
        try:
            ENVIRONMENTS.get(name).check()
        except ConfigError as error:
            warnings.append(clean(f"environment: {error.message} ({error.hint})"))
    return warnings


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


def require_judge(scorers: Collection[str], path: str) -> None:
    """Raise ConfigError if ``scorers`` need a judge or a reward model that cannot be used."""
    if not JUDGES.isdisjoint(scorers):
        load_judge(path)
    if REWARD in scorers:
        RewardModel.open(path)


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
    judge or reward model that does not answer is only a warning. Names of tool servers that only a manager
    knows, which is down, are checked later: ``require_tools``. Refuses tasks with images if ``chat_format``
    shows none.
    """
    named = await store.tasks.references(split)
    flags = agent or AgentConfig()
    problems = [*_name_problems(named, flags), *_tool_problems(tools, named)]
    problems += await _meta_problems(store, named)
    if chat_format is not None:
        problems += _image_problems(chat_format, named)
        if (unseen := _unseen_tools(chat_format, flags, tools)) is not None:
            logger.warning("%s", unseen)
    if groups is not None:
        problems += _group_problems(groups, named)
    problems += await _judge_problems(named, sampling.agent_config_path)
    problems += await _reward_problems(named, sampling.agent_config_path)
    if problems:
        raise _refusal(problems, split)


async def require_tools(store: Store, tools: ToolPool, split: str) -> None:
    """Raise ConfigError if the unfinished tasks of ``split`` name tool servers that do not exist."""
    problems = _tool_problems(tools, await store.tasks.references(split))
    if problems:
        raise _refusal(problems, split)


def _name_problems(named: TaskReferences, flags: AgentConfig) -> list[str]:
    """Return why agents, scorers, environments and schemas of answers cannot be used."""

    known = TaskNames()

    def check_file(named: tuple[str | None, str | None]) -> None:
        name, path = named
        known.agent(name or flags.agent_name)
        check_agent(name or flags.agent_name, agent_cfg_path(path, flags.agent_cfg_path))

    checks: Sequence[tuple[Mapping[Any, str], Callable[[Any], object]]] = (
        (named.agent_files, check_file),
        (named.scorers, known.scorer),
        (named.environments, lambda name: ENVIRONMENTS.get(name).check()),
        (named.answer_schemas, check_schema),
    )
    return [
        problem
        for names, check in checks
        for name, task in names.items()
        for problem in _problems_of(partial(check, name), task)
    ]


async def _meta_problems(store: Store, named: TaskReferences) -> list[str]:
    """Return what the ``meta`` of an environment's first task names and this process may not use."""
    problems = []
    for example in named.environments.values():
        task = await store.tasks.get(example)
        try:
            if task is not None:
                require_names(task)
        except TaskEnvironmentError as error:
            problems.append(_problem(error, example))
    return problems


def _image_problems(chat_format: ChatFormat, named: TaskReferences) -> list[str]:
    if named.images is None or chat_format.vision is not None:
        return []
    return [
        f"tasks show images (task {ascii(named.images)[:80]}), and the model reads text only"
        f" (chat format {chat_format.name})\n    → sample with a Qwen-VL model and its own template"
    ]


def _group_problems(groups: GroupConfig, named: TaskReferences) -> list[str]:
    own, smallest = groups.group_filter, named.smallest_group
    return [
        *([] if own is None else _problems_of(lambda: GROUP_FILTERS.get(own))),
        *([] if smallest is None else _problems_of(lambda: require_groups(groups, smallest))),
    ]


async def _judge_problems(named: TaskReferences, path: str) -> list[str]:
    """Return why the judge of the tasks cannot be used; log a warning if it does not answer."""
    judged = sorted(named.scorers.keys() & JUDGES)
    if not judged:
        return []
    try:
        section = load_judge(path)
    except ConfigError as error:
        return [_problem(error, named.scorers[judged[0]])]
    await asyncio.gather(*map(_reach, section.models))
    return []


async def _reward_problems(named: TaskReferences, path: str) -> list[str]:
    """Return why the reward model of the tasks cannot be used; log a warning for servers that are down."""
    if REWARD not in named.scorers:
        return []
    try:
        wrong, down = await refused_endpoints(await asyncio.to_thread(RewardModel.open, path))
    except AgentRLError as error:
        return [_problem(error, named.scorers[REWARD])]
    for problem in down:
        logger.warning("the reward model cannot be reached now", extra={"why": problem})
    return wrong


def _problems_of(check: Callable[[], object], task: str | None = None) -> list[str]:
    """Return the ConfigError of ``check``, if it raises one, with a task that is concerned."""
    try:
        check()
    except ConfigError as error:
        return [_problem(error, task)]
    return []


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

    from agentrl.base.proxies import ProxiedTransport

    try:
        async with httpx2.AsyncClient(timeout=_REACH_SECONDS, transport=ProxiedTransport()) as client:
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
