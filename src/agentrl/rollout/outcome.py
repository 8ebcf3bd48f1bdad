"""How a trajectory ended, and checks of what extensions return: outcomes and messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType

from agentrl.chat.renderer import Message
from agentrl.documents.sanitize_bson import replace_surrogates
from agentrl.documents.status import StopReason
from agentrl.errors import TrajectoryError
from agentrl.user_code import describe


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trajectory ended."""

    stop_reason: StopReason
    final_answer: str | None = None


def checked_outcome(agent: str, value: object) -> Outcome:
    """The outcome that ``agent`` returned, sanitized for BSON; TrajectoryError where it is none."""
    if not isinstance(value, Outcome):
        raise TrajectoryError(
            f"agent {agent} returned {describe(value)}", hint="return Outcome(stop_reason, final_answer)"
        )
    if not isinstance(value.final_answer, (str, NoneType)):
        raise TrajectoryError(
            f"agent {agent} returned the final answer {describe(value.final_answer)}",
            hint="an answer is a string, or None",
        )
    try:
        reason = StopReason(value.stop_reason)
    except ValueError as error:
        raise TrajectoryError(
            f"agent {agent} returned the stop reason {describe(value.stop_reason)}",
            hint=f"known: {', '.join(StopReason)}",
        ) from error
    return Outcome(reason, replace_surrogates(value.final_answer))


def checked_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages from an extension, as a template and a document take them."""
    if not isinstance(messages, (list, tuple)):
        raise TrajectoryError(f"messages are {describe(messages)}", hint="give a list of messages")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TrajectoryError(
                f"a message is {describe(message)}", hint="a message is a mapping with a text 'role'"
            )
    return [dict(replace_surrogates(dict(message))) for message in messages]
