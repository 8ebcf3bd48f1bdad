"""Check the rewards of single model calls and of roles, and compute what they add to each call's advantage.

A call's reward comes from the scorer or, if the scorer gives none, from the tools that the call used. It is
credited to the tokens of that call alone, beside the advantage of the trajectory's score.

The rewards of one role are compared over the trajectories of a group that give it one. The tokens of a role
are trained with the advantage of its own reward instead of that of the trajectory's score.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.config.groups import GroupConfig
from agentrl.documents.base import is_score
from agentrl.documents.record import CALL_ROLES, ROLE_REWARDS, TURN_REWARDS, Record
from agentrl.errors import ScorerError
from agentrl.scoring.advantages import ESTIMATORS, agrees, estimate
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
        if not is_score(value):
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

    The estimator compares the calls at the same position of all ``records``, so that no call is in its own
    baseline. A trajectory that ended before that position, or has no turn rewards, has the reward 0 there.
    """
    longest = max((len(record.turn_rewards) for record in records), default=0)
    if longest == 0:
        return {}
    columns = [
        [value * config.adv_scaling for value in estimate(config.advantage, _column(records, index))]
        for index in range(max(longest, *(record.turns for record in records)))
    ]
    return {
        record.id: tuple(column[index] for column in columns[: max(record.turns, len(record.turn_rewards))])
        for index, record in enumerate(records)
    }


def turn_rewards_agree(records: Sequence[Record], min_spread: float) -> bool:
    """Return whether the turn rewards differ by less than ``min_spread`` at every position."""
    longest = max((len(record.turn_rewards) for record in records), default=0)
    return all(agrees(_column(records, index), min_spread) for index in range(longest))


def _column(records: Sequence[Record], index: int) -> list[float]:
    rewards = (record.turn_rewards for record in records)
    return [values[index] if index < len(values) else 0.0 for values in rewards]


Additions = Mapping[str, tuple[float, ...]]
"""{Record id: what is added to the advantage of each model call}."""


def checked_role_rewards(
    name: str, given: Any, roles: Sequence[str | None], what: str = "scorer"
) -> dict[str, float] | None:
    """Return the rewards that ``name`` gives to roles, {role: reward}; None if it gives none.

    ``roles`` has the role of each model call. Raises ScorerError for a role that made no call, and for a
    reward that is not a finite number.
    """
    if given is None:
        return None
    known = sorted({role for role in roles if role is not None})
    hint = f"the roles of this trajectory are: {', '.join(known) or 'none'}"
    if not isinstance(given, Mapping):
        raise ScorerError(f"{what} {name} returned the role rewards {describe(given)}", hint=hint)
    for role, value in given.items():
        if role not in known:
            raise ScorerError(
                f"{what} {name} rewards the role {describe(role)}, which made no call", hint=hint
            )
        if isinstance(value, bool) or not is_score(value):
            raise ScorerError(
                f"{what} {name} gives the role {role} the reward {describe(value)}",
                hint="give a finite number",
            )
    return {role: float(value) for role, value in given.items()}


def stored_role_rewards(rewards: Mapping[str, float] | None, roles: Sequence[str | None]) -> dict[str, Any]:
    """Return what a score's details hold of roles: their rewards, and the role of each model call."""
    if not rewards:
        return {}
    return {ROLE_REWARDS: dict(rewards), CALL_ROLES: list(roles)}


def role_additions(
    records: Sequence[Record], advantages: Mapping[str, float], config: GroupConfig
) -> Additions:
    """Return what makes the advantage of each call that of its role; empty without role rewards.

    ``advantages`` are those of the trajectories, which calls of a role without a reward keep. A role with a
    reward in one trajectory only has the advantage 0 there, unless the estimator needs no others.
    """
    own: dict[str, dict[str, float]] = {record.id: {} for record in records}
    for role, column in _columns(records):
        if len(column) == 1 and ESTIMATORS.get(config.advantage).needs_others:
            values = [0.0]
        else:
            values = estimate(config.advantage, list(column.values()))
        for record_id, value in zip(column, values, strict=True):
            own[record_id][role] = value * config.adv_scaling
    return {
        record.id: tuple(
            own[record.id][role] - advantages[record.id] if role in own[record.id] else 0.0
            for role in record.call_roles
        )
        for record in records
        if own[record.id]
    }


def added(first: Additions, second: Additions) -> dict[str, tuple[float, ...]]:
    """Return the sums of two additions, call by call; the shorter one is continued with 0."""
    return {key: _sum(first.get(key, ()), second.get(key, ())) for key in {**first, **second}}


def role_rewards_agree(records: Sequence[Record], min_spread: float) -> bool:
    """Return whether the rewards of every role differ by less than ``min_spread``."""
    return all(agrees(list(column.values()), min_spread) for _, column in _columns(records))


def _columns(records: Sequence[Record]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each role with its rewards, {Record id: reward}."""
    roles = {role: None for record in records for role in record.role_rewards}
    for role in sorted(roles):
        yield (
            role,
            {record.id: record.role_rewards[role] for record in records if role in record.role_rewards},
        )


def _sum(first: Sequence[float], second: Sequence[float]) -> tuple[float, ...]:
    length = max(len(first), len(second))
    padded = [[*values, *[0.0] * (length - len(values))] for values in (first, second)]
    return tuple(left + right for left, right in zip(*padded, strict=True))
