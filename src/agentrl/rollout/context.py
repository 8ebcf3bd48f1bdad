"""Context managers: what to do with a full context, chosen by ``--new_context``."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.chat.renderer import Message
from agentrl.registry import Registry
from agentrl.rollout.rollout import ContextManager, Rollout

CONTEXT_MANAGERS: Registry[ContextManager] = Registry(
    "context manager", group="agentrl.context_managers", flag="--new_context"
)

SUMMARY_REQUEST = (
    "The conversation has become too long to go on. Write down, for yourself, everything found out so far"
    " that matters for the question: facts, numbers, sources, what was tried and failed, and what to do next."
    " Call no tool and do not answer the question yet."
)
SUMMARY_HEADING = "What you have found out so far:"

_LATEST, _KEPT = 15, 10


def context_manager(*names: str) -> Callable[[ContextManager], ContextManager]:
    """Register an async function ``(Rollout) -> list[Message] | None`` under ``names``.

    It returns the messages that the new context starts with, or None to end the trajectory.
    """
    return CONTEXT_MANAGERS.register(*names)


@context_manager("disabled")
async def end_trajectory(rollout: Rollout) -> list[Message] | None:
    """Return None: a full context ends the trajectory."""
    return None


@context_manager("discard_all_tools")
async def discard_tools(rollout: Rollout) -> list[Message] | None:
    """Return the context without tool results and, if many messages are left, without the latest ones."""
    return without_tools(rollout.messages)


@context_manager("discard_all")
async def summarize(rollout: Rollout) -> list[Message] | None:
    """Return the question and the policy's own summary of everything after it.

    The summary is one more model call of the trajectory. It is sampled within ``--prompt_reserve_tokens``,
    and it is recorded and trained like every other call.
    """
    rollout.append_messages([{"role": "user", "content": SUMMARY_REQUEST}])
    turn = await rollout.generate()
    summary = turn.text.rpartition("</think>")[2].strip()
    system = [message for message in rollout.messages[:1] if message["role"] == "system"]
    return [*system, {"role": "user", "content": f"{rollout.question}\n\n{SUMMARY_HEADING}\n{summary}"}]


def without_tools(messages: list[Message]) -> list[Message]:
    """Return ``messages`` without tool results and without the latest assistant messages.

    Of n messages other than tool results, the last min(15, n − 10) are dropped as well, but system and user
    messages among them are kept.
    """
    left = [message for message in messages if message["role"] != "tool"]
    boundary = len(left) - max(0, min(_LATEST, len(left) - _KEPT))
    return [
        message
        for place, message in enumerate(left)
        if place < boundary or message["role"] in ("system", "user")
    ]
