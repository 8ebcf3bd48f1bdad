"""AgentRL: reinforcement learning for language-model agents, decoupled over MongoDB.

This module is the public API. Decorators register what you write yourself: ``agent``, ``scorer``, ``tool``,
``environment``, ``loss``, ``advantage``, ``value_head``, ``context_manager``, ``group_filter``,
``tool_call_parser`` and ``tracker``; the classes are what such functions take, return and raise.
``run(tasks=…, steps=…)`` starts training from a notebook, ``Store.open("run")`` reads any run there.
assets/examples has a short example of each, and docs/your_own explains them.

Each name is imported at first use, so ``import agentrl`` is fast and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from agentrl.base.moved import find_moved_modules

if TYPE_CHECKING:
    from typing import Any, Protocol, Self

    __version__: str
    """The version of the installation: that of the git tag it was built from."""

    from agentrl.calls.turns import Turn
    from agentrl.chat.chat_format import Message
    from agentrl.chat.parsers.arguments import convert_arguments
    from agentrl.chat.parsers.parser import ParsedMessage, ToolCall, tool_call_parser
    from agentrl.documents.status import StopReason
    from agentrl.environments.environment import Environment, Observation, TaskRequest, environment
    from agentrl.errors import OutageError, ServerFullError, SessionLostError
    from agentrl.losses.loss import TokenBatch, TokenLosses, loss
    from agentrl.losses.settings import LossSettings
    from agentrl.model.value_head import value_head
    from agentrl.observe.trackers import tracker
    from agentrl.rollout.agent_io import Outcome
    from agentrl.rollout.agents import agent, context_manager
    from agentrl.rollout.rollout import FixedModel, Role, Rollout
    from agentrl.scoring.groups import ScoredGroup, advantage, group_filter
    from agentrl.scoring.scorers import ScoredCall, ScorerContext, ScoreResult, scorer
    from agentrl.tools.python import tool, tool_state

    class StartedRun(Protocol):
        """What type checkers see of ``local.started_run.StartedRun``."""

        name: str

        @property
        def is_running(self) -> bool: ...
        @property
        def store(self) -> Store: ...
        def wait(self, seconds: float | None = None) -> StartedRun: ...
        def stop(self) -> None: ...
        def steps(self) -> Any: ...
        def trajectories(self, **where: Any) -> Any: ...
        def evaluate(self, tasks: Any, *, samples: int = 1, version: int | None = None) -> Any: ...

    def run(
        *, tasks: Any, steps: int, model: Any = None, scorer: Any = None, tools: Any = (),
        name: str | None = None, recipe: str = "original-grpo", **flags: Any,
    ) -> StartedRun: ...  # fmt: skip

    class Store(Protocol):
        """What type checkers see of ``screens.notebook.Store``: even for types, the core imports no wing."""

        run_name: str

        @classmethod
        def open(
            cls, run_name: str = "default", *, db_connection_string: str | None = None,
            mongo_dir: str = ".agentrl/mongo", db_timeout_seconds: float = 60.0,
        ) -> Self: ...  # fmt: skip
        def trajectories(
            self, *, status: str | None = None, step: int | None = None, split: str | None = None,
            limit: int | None = None,
        ) -> list[Any]: ...  # fmt: skip
        def steps(self, *, status: str | None = None) -> list[Any]: ...
        def tasks(self, *, split: str | None = None) -> list[Any]: ...
        def groups(self, *, split: str | None = None) -> list[Any]: ...
        def evaluations(self) -> list[Any]: ...
        def close(self) -> None: ...
        def __enter__(self) -> Self: ...
        def __exit__(self, *error: object) -> None: ...


__all__ = [
    "Environment", "FixedModel", "LossSettings", "Message", "Observation", "OutageError", "Outcome",
    "ParsedMessage", "Role", "Rollout", "ScoreResult", "ScoredCall", "ScoredGroup", "ScorerContext",
    "ServerFullError", "SessionLostError", "StartedRun", "StopReason", "Store", "TaskRequest", "TokenBatch",
    "TokenLosses", "ToolCall", "Turn", "advantage", "agent", "context_manager", "convert_arguments",
    "environment", "group_filter", "loss", "run", "scorer", "tool", "tool_call_parser", "tool_state",
    "tracker", "value_head",
]  # fmt: skip

_MODULES = {
    "Environment": "environments.environment",
    "FixedModel": "rollout.rollout",
    "LossSettings": "losses.settings",
    "Message": "chat.chat_format",
    "Observation": "environments.environment",
    "OutageError": "errors",
    "Outcome": "rollout.agent_io",
    "ParsedMessage": "chat.parsers.parser",
    "Role": "rollout.rollout",
    "Rollout": "rollout.rollout",
    "ScoreResult": "scoring.scorers",
    "ScoredCall": "scoring.scorers",
    "ScoredGroup": "scoring.groups",
    "ScorerContext": "scoring.scorers",
    "ServerFullError": "errors",
    "SessionLostError": "errors",
    "StartedRun": "local.started_run",
    "StopReason": "documents.status",
    "Store": "screens.notebook",
    "TaskRequest": "environments.environment",
    "TokenBatch": "losses.loss",
    "TokenLosses": "losses.loss",
    "ToolCall": "chat.parsers.parser",
    "Turn": "calls.turns",
    "advantage": "scoring.groups",
    "agent": "rollout.agents",
    "context_manager": "rollout.agents",
    "convert_arguments": "chat.parsers.arguments",
    "environment": "environments.environment",
    "group_filter": "scoring.groups",
    "loss": "losses.loss",
    "run": "local.started_run",
    "scorer": "scoring.scorers",
    "tool": "tools.python",
    "tool_call_parser": "chat.parsers.parser",
    "tool_state": "tools.python",
    "tracker": "observe.trackers",
    "value_head": "model.value_head",
}

find_moved_modules()

if not TYPE_CHECKING:  # type checkers report an unknown name only without it

    def __getattr__(name: str) -> object:
        """Import a public name at its first use (PEP 562)."""
        if name == "__version__":
            return importlib.import_module("importlib.metadata").version("agentrl-mongo")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
