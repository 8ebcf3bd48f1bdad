"""Describe how a trajectory ended, and validate what extensions return: outcomes, messages, error texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType

from agentrl.chat.chat_format import Message
from agentrl.documents.base import replace_surrogates
from agentrl.documents.status import StopReason
from agentrl.errors import AgentRLError, TrajectoryError
from agentrl.observe.redact import redact_and_cut
from agentrl.scoring.scorers import ScoreResult
from agentrl.user_code import describe

MESSAGE_CHARS = 8 * 1024
"""Longest stored failure message, in characters; a notice gives the number of characters left out."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trajectory ended."""

    stop_reason: StopReason
    final_answer: str | None = None
    score: float | ScoreResult | None = None
    """The agent's own score, instead of the task's scorer; None leaves scoring to the scorer."""
    rewards: Mapping[str, float] | None = None
    """Rewards of roles, {role: reward}. Without ``score`` the score is the mean of those of the policy."""


def checked_outcome(agent: str, value: object) -> Outcome:
    """Return the outcome of ``agent``, storable. Raises TrajectoryError if it is not an outcome."""
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
    return Outcome(reason, replace_surrogates(value.final_answer), value.score, value.rewards)


def checked_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the messages of an extension in the form that templates and documents need.

    Raises TrajectoryError for values that are not messages.
    """
    if not isinstance(messages, (list, tuple)):
        raise TrajectoryError(f"messages are {describe(messages)}", hint="give a list of messages")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TrajectoryError(
                f"a message is {describe(message)}", hint="a message is a mapping with a text 'role'"
            )
    return [dict(replace_surrogates(dict(message))) for message in messages]


def failure_text(error: BaseException | str) -> str:
    """Return the text of a failure as it is stored: secrets hidden, storable, at most ``MESSAGE_CHARS``.

    Errors of other packages are prefixed with the name of their class. Never raises.
    """
    if isinstance(error, str):
        text = error
    else:
        text = str(error) if isinstance(error, AgentRLError) else describe(error)
    shown = redact_and_cut(text, MESSAGE_CHARS)
    return shown.encode("utf-8", "replace").decode("utf-8")
