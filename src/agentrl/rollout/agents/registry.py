"""Agents by name: ``@agent``, entry points ``agentrl.agents``, and Python paths ``module:function``."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Awaitable, Callable
from importlib.metadata import entry_points

from agentrl.errors import ConfigError
from agentrl.rollout.session import Outcome, Rollout

ENTRY_POINTS = "agentrl.agents"

_BUILT_IN = ("agentrl.rollout.agents.react", "agentrl.rollout.agents.single_turn")
_registered: dict[str, Agent] = {}

Agent = Callable[[Rollout], Awaitable[Outcome]]


def agent(*names: str) -> Callable[[Agent], Agent]:
    """Register an async function ``(Rollout) -> Outcome`` under ``names``."""

    def register(function: Agent) -> Agent:
        for name in names:
            _registered[name] = function
        return function

    return register


def agent_names() -> list[str]:
    """Every registered name, built in or from an entry point."""
    _load_built_in()
    return sorted({*_registered, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def get_agent(name: str) -> Agent:
    """The agent of a name or of a path ``module:function``; ConfigError if there is none."""
    _load_built_in()
    if name in _registered:
        return _registered[name]
    if ":" in name:
        return _from_path(name)
    for point in entry_points(group=ENTRY_POINTS, name=name):
        loaded: Agent = point.load()
        return loaded
    nearest = difflib.get_close_matches(name, agent_names(), n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ConfigError(
        f"there is no agent {name!r}",
        cure=f"{hint}known: {', '.join(agent_names())}; or give a Python path module:function",
    )


def _load_built_in() -> None:
    for module in _BUILT_IN:
        importlib.import_module(module)


def _from_path(path: str) -> Agent:
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the agent {path!r} cannot be imported: {error}",
            cure="the path is module:function; the module's folder must be on PYTHONPATH",
        ) from error
    if not callable(found):
        raise ConfigError(f"the agent {path!r} is no function", cure="name an async function")
    typed: Agent = found
    return typed
