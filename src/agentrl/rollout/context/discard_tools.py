"""``discard_all_tools``: tool results go, and of a long remainder the latest messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.chat.renderer import Message
    from agentrl.rollout.session import Rollout

LATEST, KEPT = 15, 10
"""Of n messages left, the last min(LATEST, n − KEPT) go too, system and user messages apart."""


async def discard_tools(session: Rollout) -> list[Message] | None:
    """What is left without tool messages."""
    return without_tools(session.messages)


def without_tools(messages: list[Message]) -> list[Message]:
    """``messages`` without tool results and without the latest assistant messages of a long remainder."""
    left = [message for message in messages if message["role"] != "tool"]
    surplus = max(0, min(LATEST, len(left) - KEPT))
    boundary = len(left) - surplus
    return [
        message
        for place, message in enumerate(left)
        if place < boundary or message["role"] in ("system", "user")
    ]
