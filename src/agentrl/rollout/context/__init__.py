"""What becomes of a full context: ``--new_context`` names one of these."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from agentrl.errors import ConfigError
from agentrl.rollout.context.discard_all import discard_all
from agentrl.rollout.context.discard_tools import discard_tools
from agentrl.rollout.context.keep import keep

if TYPE_CHECKING:
    from agentrl.chat.renderer import Message
    from agentrl.rollout.session import Rollout

ContextManager = Callable[["Rollout"], Awaitable["list[Message] | None"]]
"""The messages that a new context starts from; None ends the trajectory."""

CONTEXT_MANAGERS: Mapping[str, ContextManager] = {
    "disabled": keep,
    "discard_all_tools": discard_tools,
    "discard_all": discard_all,
}


def get_context_manager(name: str) -> ContextManager:
    """The function behind ``--new_context``."""
    if name not in CONTEXT_MANAGERS:
        raise ConfigError(f"--new_context is {name!r}", hint=f"known: {', '.join(CONTEXT_MANAGERS)}")
    return CONTEXT_MANAGERS[name]
