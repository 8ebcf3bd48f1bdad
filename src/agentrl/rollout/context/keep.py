"""``disabled``: a full context ends the trajectory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.chat.renderer import Message
    from agentrl.rollout.session import Rollout


async def keep(session: Rollout) -> list[Message] | None:
    """No new context."""
    return None
