"""Manage a full context: end the trajectory, discard messages, or summarize, as ``--new_context`` says."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.base.registry import Registry
from agentrl.chat.chat_format import Message
from agentrl.rollout.rollout import ContextManager, Role

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
    """Register an async function ``(Role) -> list[Message] | None`` under ``names``.

    It gets the Rollout, which is a Role, or the role whose context is full.
    It returns the messages that the new context starts with, or None to end the trajectory.
    """
    return CONTEXT_MANAGERS.register(*names)


@context_manager("disabled")
async def end_trajectory(rollout: Role) -> list[Message] | None:
    """Return None: a full context ends the trajectory."""
    return None


@context_manager("discard_all_tools")
async def discard_tools(rollout: Role) -> list[Message] | None:
    """Return the context without tool results and, if many messages are left, without the latest ones."""
    return without_tools(rollout.messages, fixed=len(rollout.first_messages))


@context_manager("discard_all")
async def discard_all(rollout: Role) -> list[Message] | None:
    """Return the question and the policy's own summary of everything after it."""
    # Give up before the first turn: it is the question that does not fit, and a summary would add to it.
    return None if rollout.turns == 0 else await _summary(rollout)


@context_manager("summarize")
async def summarize(rollout: Role) -> list[Message] | None:
    """Return the question, the policy's own summary, and the latest tool calls with their results.

    The latest calls are left out if they do not fit.
    """
    if rollout.turns == 0:
        return None
    # Take them first: the summary puts its request and its answer behind them.
    latest = latest_calls(rollout.messages)
    summary = await _summary(rollout)
    return [*summary, *latest] if rollout.would_fit([*summary, *latest]) else summary


async def _summary(rollout: Role) -> list[Message]:
    """Return the first messages, with the policy's summary behind the question.

    The summary is one more model call of the trajectory. It is sampled within ``--prompt_reserve_tokens``,
    and it is recorded and trained like every other call.
    """
    rollout.append_messages([{"role": "user", "content": SUMMARY_REQUEST}])
    turn = await rollout.generate()
    *before, question = rollout.first_messages
    # Take the whole text where nothing is outside of a thought: an empty summary would lose everything.
    summary = (turn.content or turn.text).strip()
    return [*before, {**question, "content": f"{question['content']}\n\n{SUMMARY_HEADING}\n{summary}"}]


def latest_calls(messages: list[Message]) -> list[Message]:
    """Return the last assistant message and the tool results that end ``messages``; empty if none do."""
    start = len(messages)
    while start and messages[start - 1]["role"] == "tool":
        start -= 1
    return messages[start - 1 :] if 0 < start < len(messages) else []


def without_tools(messages: list[Message], fixed: int = 0) -> list[Message]:
    """Return ``messages`` without tool results and without the latest assistant messages.

    Of n messages other than tool results, the last min(15, n − 10) are dropped as well, but system and user
    messages among them are kept. So are the first ``fixed`` messages.
    """
    left = [message for index, message in enumerate(messages) if index < fixed or message["role"] != "tool"]
    boundary = max(fixed, len(left) - max(0, min(_LATEST, len(left) - _KEPT)))
    return [
        message
        for index, message in enumerate(left)
        if index < boundary or message["role"] in ("system", "user")
    ]
