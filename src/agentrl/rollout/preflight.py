"""Validate before the first claim that this process can run the tasks: import and try all that they name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from agentrl.chat.chat_format import ChatFormat
from agentrl.config.schema import AgentConfig, GroupConfig, SamplingConfig
from agentrl.environments.base import ENVIRONMENTS
from agentrl.errors import AgentRLError, ConfigError, ToolServerError
from agentrl.llm.agent_config import AgentSection, ModelEndpoint, load_judge
from agentrl.rollout.agent_cfg import agent_cfg_path
from agentrl.rollout.agents import check_agent
from agentrl.rollout.worker import ToolSource
from agentrl.scoring.advantages import ESTIMATORS
from agentrl.scoring.answers import check_schema
from agentrl.scoring.groups import GROUP_FILTERS
from agentrl.scoring.judge import JUDGES
from agentrl.scoring.scorers import SCORERS

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.store.tasks import TaskReferences

logger = logging.getLogger(__name__)

_REACH_SECONDS = 5.0
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
    tools: ToolSource,
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
    for (name, path), task in named.agent_files.items():
        _try(problems, task, lambda name=name, path=path: _check_agent(flags, name, path))  # type: ignore[misc]
    for name, task in named.scorers.items():
        _try(problems, task, lambda name=name: SCORERS.get(name))  # type: ignore[misc]
    for name, task in named.environments.items():
        _try(problems, task, lambda name=name: ENVIRONMENTS.get(name).check())  # type: ignore[misc]
    for schema, task in named.answer_schemas.items():
        _try(problems, task, lambda schema=schema: check_schema(schema))  # type: ignore[misc]
    problems += _tool_problems(tools, named)
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
            await _reach(section)
    if problems:
        raise _refusal(problems, split)


def _check_agent(flags: AgentConfig, name: str | None, path: str | None) -> None:
    check_agent(name or flags.agent_name, agent_cfg_path(path, flags.agent_cfg_path))


async def require_tools(store: Store, tools: ToolSource, split: str) -> None:
    """Raise ConfigError if the unfinished tasks of ``split`` name tool servers that do not exist."""
    problems = _tool_problems(tools, await store.tasks.references(split))
    if problems:
        raise _refusal(problems, split)


def _try(problems: list[str], task: str | None, check: Callable[[], object]) -> AgentSection | None:
    """Call ``check``; append its ConfigError to ``problems``, with a task that is concerned."""
    try:
        found = check()
    except ConfigError as error:
        problems.append(_problem(error, task))
        return None
    return found if isinstance(found, AgentSection) else None


def _tool_problems(tools: ToolSource, named: TaskReferences) -> list[str]:
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


async def _reach(section: AgentSection) -> None:
    """Send each endpoint one request; log a warning for each that does not answer."""
    await asyncio.gather(*(_reach_one(endpoint) for endpoint in section.models))


async def _reach_one(endpoint: ModelEndpoint) -> None:
    import httpx

    try:
        async with httpx.AsyncClient(timeout=_REACH_SECONDS) as client:
            await client.get(f"{endpoint.base_url.rstrip('/')}/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        logger.warning(
            "the judge cannot be reached now", extra={"model": endpoint.model, "why": type(error).__name__}
        )
