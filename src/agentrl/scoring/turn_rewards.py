"""Check the rewards that scorers give to single model calls, and compute each call's advantage.

A call's reward comes from the scorer or, if the scorer gives none, from the tools that the call used. It is
credited to the tokens of that call alone, beside the advantage of the trajectory's score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.config.sampling import GroupConfig
from agentrl.documents.base import is_finite
from agentrl.documents.record import TURN_REWARDS, Record
from agentrl.errors import ScorerError
from agentrl.scoring.advantages import agrees, estimate
from agentrl.user_code import describe

_HINT = "return one finite number for each of ScorerContext.calls, or {index of the call: reward}"


def checked_turn_rewards(name: str, given: Any, calls: int) -> list[float] | None:
    """Return what scorer ``name`` gives to ``calls`` model calls: one number for each, or an empty list.

    ``given`` is a list, {index: reward}, or None, which is returned. Raises ScorerError for anything else.
    """
    if given is None:
        return None
    if isinstance(given, Mapping):
        unknown = [key for key in given if not isinstance(key, int) or not 0 <= key < calls]
        if unknown:
            raise ScorerError(
                f"scorer {name} rewards the model call {describe(unknown[0])} of {calls}", hint=_HINT
            )
        given = [given.get(index, 0.0) for index in range(calls)]
    if not isinstance(given, (list, tuple)) or len(given) not in (0, calls):
        raise ScorerError(
            f"scorer {name} returned the turn rewards {describe(given)} for {calls} model calls", hint=_HINT
        )
    for value in given:
        if not is_finite(value):
            raise ScorerError(f"scorer {name} returned the turn reward {describe(value)}", hint=_HINT)
    return [float(value) for value in given]


def stored_turn_rewards(
    own: Sequence[float] | None, tool_rewards: Sequence[Sequence[float]]
) -> dict[str, list[float]]:
    """Return ``{"turn_rewards": [one per model call]}`` for a score's details; empty if nothing gives one.

    ``own`` are the scorer's; None takes the sums of ``tool_rewards``, which has those of each call's tools.
    """
    if own is None:
        own = [float(sum(rewards)) for rewards in tool_rewards] if any(tool_rewards) else []
    return {TURN_REWARDS: list(own)} if own else {}


def turn_advantages(records: Sequence[Record], config: GroupConfig) -> dict[str, tuple[float, ...]]:
    """Return the advantage of each model call from the group's turn rewards; empty without any.

    The estimator compares the calls at the same place of all ``records``, so that no call is in its own
    baseline. A trajectory that ended before that place, or has no turn rewards, has the reward 0 there.
    """
    longest = max((len(record.turn_rewards) for record in records), default=0)
    if longest == 0:
        return {}
    columns = [
        [value * config.adv_scaling for value in estimate(config.advantage, _column(records, index))]
        for index in range(max(longest, *(record.turns for record in records)))
    ]
    return {
        record.id: tuple(column[place] for column in columns[: max(record.turns, len(record.turn_rewards))])
        for place, record in enumerate(records)
    }


def turn_rewards_agree(records: Sequence[Record], min_spread: float) -> bool:
    """Return whether the turn rewards differ by less than ``min_spread`` at every place."""
    longest = max((len(record.turn_rewards) for record in records), default=0)
    return all(agrees(_column(records, index), min_spread) for index in range(longest))


def _column(records: Sequence[Record], index: int) -> list[float]:
    rewards = (record.turn_rewards for record in records)
    return [values[index] if index < len(values) else 0.0 for values in rewards]
