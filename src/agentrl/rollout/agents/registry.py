"""Agents by name: ``@agent``, entry points ``agentrl.agents``, and Python paths ``module:function``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from agentrl.registry import Registry
from agentrl.rollout.session import Outcome, Rollout

Agent = Callable[[Rollout], Awaitable[Outcome]]

_agents: Registry[Agent] = Registry(
    "agent",
    group="agentrl.agents",
    built_in=("agentrl.rollout.agents.react", "agentrl.rollout.agents.single_turn"),
)


def agent(*names: str) -> Callable[[Agent], Agent]:
    """Register an async function ``(Rollout) -> Outcome`` under ``names``."""
    return _agents.register(*names)


def agent_names() -> list[str]:
    """Every registered name, built in or from an entry point."""
    return _agents.names()


def get_agent(name: str) -> Agent:
    """The agent of a name or of a path ``module:function``; ConfigError if there is none."""
    return _agents.get(name)
