"""Decide a finished group: rewards, advantages, and which trajectories are trained; users may filter it.

A call's reward comes from the scorer or, if the scorer gives none, from the tools that the call used. It is
credited to the tokens of that call, and discounted to those of earlier ones, beside the advantage of the
trajectory's score. With step advantages, the returns of the calls made in one state are compared.

The rewards of one role are compared over the trajectories of a group that give it one. The tokens of a role
are trained with the advantage of its own reward instead of that of the trajectory's score.

The built-in ones treat values within rounding error of the baseline as 0.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from agentrl.base.registry import Registry, refuse_bare
from agentrl.base.user_code import contain_call, describe
from agentrl.config.training import RIGHT_THRESHOLD, GroupConfig
from agentrl.documents.document import LARGEST_SCORE, is_finite, is_score, replace_surrogates, score_problem
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.record import CALL_ROLES, ROLE_REWARDS, TURN_REWARDS, Record
from agentrl.documents.status import RecordStatus, StopReason
from agentrl.documents.task import Task
from agentrl.errors import GroupError, ScorerError

_REWARDS_HINT = "return one finite number for each of ScorerContext.calls, or {index of the call: reward}"


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
                f"scorer {name} rewards the model call {describe(unknown[0])} of {calls}", hint=_REWARDS_HINT
            )
        given = [given.get(index, 0.0) for index in range(calls)]
    if not isinstance(given, (list, tuple)) or len(given) not in (0, calls):
        raise ScorerError(
            f"scorer {name} returned the turn rewards {describe(given)} for {calls} model calls",
            hint=_REWARDS_HINT,
        )
    for value in given:
        if not is_score(value):
            raise ScorerError(f"scorer {name} returned the turn reward {describe(value)}", hint=_REWARDS_HINT)
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

    The estimator compares the discounted returns of the calls at the same position of all ``records``, so
    that no call is in its own baseline. A trajectory that ended before that position, or has no turn rewards,
    has the return 0 there. Returns are compared, and no compared rewards added up: then how many baselines
    are subtracted would depend on when a trajectory ends.
    """
    longest = max((len(record.turn_rewards) for record in records), default=0)
    if longest == 0:
        return {}
    returns = [turn_returns(record, config) for record in records]
    columns = [
        [value * config.adv_scaling for value in estimate(config.advantage, _column(returns, index))]
        for index in range(max(longest, *(record.stored_calls for record in records)))
    ]
    lengths = [max(record.stored_calls, len(record.turn_rewards)) for record in records]
    return {
        record.id: tuple(column[index] for column in columns[:length])
        for index, (record, length) in enumerate(zip(records, lengths, strict=True))
    }


def turn_rewards_agree(records: Sequence[Record], config: GroupConfig) -> bool:
    """Return whether the returns of turn rewards differ by less than ``min_score_spread`` at every place."""
    returns = [turn_returns(record, config) for record in records]
    longest = max(map(len, returns), default=0)
    return all(agrees(_column(returns, index), config.min_score_spread) for index in range(longest))


def turn_returns(record: Record, config: GroupConfig) -> list[float]:
    """Return Σ_k γ^k·r_(t+k) of the turn rewards r from each model call t on; empty without turn rewards.

    γ is the discount: 0 leaves each call its own reward. Only calls that are trained count as steps: one that
    is not keeps its own reward, and those before it get that undiscounted.
    """
    returns, later = list(record.turn_rewards), 0.0
    for index in reversed(range(len(returns))):
        if index in record.untrained_calls:
            later += returns[index]
        else:
            later = returns[index] = returns[index] + config.discount * later
    return returns


def _column(returns: Sequence[Sequence[float]], index: int) -> list[float]:
    return [values[index] if index < len(values) else 0.0 for values in returns]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A model call of the policy, as step advantages compare it."""

    index: int
    """Among all calls of the trajectory."""
    role: str | None
    anchor: str | None
    """Digest of the state that it was made in; None in documents that have none."""


Steps = Mapping[str, Sequence[Step]]
"""{Record id: its model calls by index}."""


def steps_of(calls: Iterable[DispatchedSamplingTask]) -> tuple[Step, ...]:
    """Return the policy's calls of a trajectory as steps."""
    own = (call for call in calls if call.fixed is None)
    return tuple(Step(index=call.index, role=call.role, anchor=call.anchor) for call in own)


def step_additions(
    records: Sequence[Record], rewards: Mapping[str, float], steps: Steps, config: GroupConfig
) -> Additions:
    """Return the step advantage of each model call, times its weight (GiGPO, arXiv 2505.10978).

    The return of a call is Σ_k γ^k·r_(t+k) over the calls of its trajectory from it on, with the turn rewards
    r and the trajectory's own reward (``rewards``, without turn rewards) at its last call. The estimator
    compares the returns of all calls of the group with one anchor and one role, also of one trajectory that
    comes back to a state. A call whose state no other has gets 0. A role with a reward of its own is a
    trajectory of its own: its calls alone are the steps, and its reward is at its last one.
    """
    additions = {record.id: [0.0] * (1 + max(_indexes(record, steps), default=-1)) for record in records}
    for visits in _visits(records, rewards, steps, config):
        values = estimate(config.advantage, [value for _, _, value in visits]) if len(visits) > 1 else [0.0]
        for (record_id, index, _), value in zip(visits, values, strict=True):
            additions[record_id][index] = value * config.step_advantage_weight * config.adv_scaling
    return {key: tuple(values) for key, values in additions.items()}


def step_returns_agree(
    records: Sequence[Record], rewards: Mapping[str, float], steps: Steps, config: GroupConfig
) -> bool:
    """Return whether the returns from every state differ by less than ``min_score_spread``."""
    groups = _visits(records, rewards, steps, config)
    return all(agrees([value for _, _, value in visits], config.min_score_spread) for visits in groups)


def shared_steps(records: Sequence[Record], steps: Steps) -> float:
    """Return the share of the trained model calls whose state another call of the group has, in [0, 1]."""
    zeros = {record.id: 0.0 for record in records}
    groups = _visits(records, zeros, steps, GroupConfig())
    total = sum(len(_indexes(record, steps)) for record in records)
    return sum(len(visits) for visits in groups if len(visits) > 1) / total if total else 0.0


def _visits(
    records: Sequence[Record], rewards: Mapping[str, float], steps: Steps, config: GroupConfig
) -> list[list[tuple[str, int, float]]]:
    """Return (Record id, index of the call, its return) of the calls of each state and role."""
    groups: dict[tuple[str | None, str], list[tuple[str, int, float]]] = defaultdict(list)
    for record in records:
        turns, own, ended = record.turn_rewards, record.role_rewards, set[str | None]()
        later: defaultdict[str | None, float] = defaultdict(float)
        trained = {step.index: step for step in _trained_steps(record, steps)}
        for index in reversed(range(max(len(turns), 1 + max(trained, default=-1)))):
            step, roles = trained.get(index), record.call_roles
            role = step.role if step else roles[index] if index < len(roles) else None
            # Follow each role that has a reward by itself, and all the others as one.
            line = role if role in own else None
            reward = turns[index] if index < len(turns) else 0.0
            if step is None:  # no step of the policy: the step before gets its reward too
                later[line] += reward
                continue
            if line not in ended:
                ended.add(line)
                reward += rewards[record.id] if line is None else own[line]
            later[line] = reward + config.discount * later[line]
            if step.anchor is not None:
                groups[step.role, step.anchor].append((record.id, step.index, later[line]))
    return list(groups.values())


def _indexes(record: Record, steps: Steps) -> list[int]:
    return [step.index for step in _trained_steps(record, steps)]


def _trained_steps(record: Record, steps: Steps) -> list[Step]:
    return [step for step in steps.get(record.id, ()) if step.index not in record.untrained_calls]


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
    for role, column in _columns(records, config):
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


def role_rewards_agree(records: Sequence[Record], config: GroupConfig) -> bool:
    """Return whether the rewards of every role differ by less than ``min_score_spread``."""
    columns = (list(column.values()) for _, column in _columns(records, config))
    return all(agrees(column, config.min_score_spread) for column in columns)


def _columns(records: Sequence[Record], config: GroupConfig) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each role with its rewards, {Record id: reward}."""
    roles = {role: None for record in records for role in record.role_rewards}
    for role in sorted(roles):
        yield (
            role,
            {
                record.id: record.role_rewards[role] + _turn_sum(record, config, role)
                for record in records
                if role in record.role_rewards
            },
        )


def _turn_sum(record: Record, config: GroupConfig, role: str | None = None) -> float:
    """Return the turn rewards that are a part of a trajectory's reward, or of its role's.

    With step advantages a trajectory's reward is the sum of all that it got (GiGPO); without, turn rewards
    are compared by themselves.
    """
    if config.step_advantage == "off":
        return 0.0
    rewards = record.turn_rewards
    if record.role_rewards:
        own, roles = record.role_rewards, record.call_roles
        lines = [of if of in own else None for of in roles[: len(rewards)]]
        rewards = tuple(value for value, line in zip(rewards, lines, strict=False) if line == role)
    return sum(rewards)


def _sum(first: Sequence[float], second: Sequence[float]) -> tuple[float, ...]:
    length = max(len(first), len(second))
    padded = [[*values, *[0.0] * (length - len(values))] for values in (first, second)]
    return tuple(left + right for left, right in zip(*padded, strict=True))


_NOISE_OF_RANGE = 1e-6
"""Advantages below this share of the group's range are 0."""

_NOISE_OF_SIZE = 1e-9
"""Rewards that differ by less than this share of the largest are equal."""

_STD_FLOOR = 1e-6

_LARGEST = 4 * LARGEST_SCORE
"""Largest size of an advantage; built-in ones are at most the difference of two scores or a group's size."""

_ADVANTAGES_HINT = "return one finite number for each reward, in the same order"


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """A function from the rewards of a group's trajectories to their advantages, in the same order."""

    function: Callable[[Sequence[float]], Sequence[float]]
    needs_others: bool = True
    """True if it compares trajectories: then a group of one trajectory is not trained."""

    def __call__(self, rewards: Sequence[float]) -> Sequence[float]:
        return self.function(rewards)


def _estimator(extension: Any) -> AdvantageEstimator:
    """Return a plain function as an estimator that compares trajectories."""
    if isinstance(extension, AdvantageEstimator):
        return extension
    if not callable(extension):
        raise TypeError(f"it is of type {type(extension).__name__}, not a function")
    return AdvantageEstimator(extension)


ESTIMATORS: Registry[AdvantageEstimator] = Registry(
    "advantage estimator", group="agentrl.advantages", flag="--advantage", convert=_estimator
)

BUILT_IN = frozenset({"leave_one_out", "grpo", "dr_grpo", "maxrl", "reward"})


def advantage(
    *names: str, needs_others: bool = True
) -> Callable[[Callable[[Sequence[float]], Sequence[float]]], AdvantageEstimator]:
    """Register a function ``(rewards of a group) -> advantages`` under ``names``.

    It is called with the rewards of the trajectories of a group that are trained, and returns one number for
    each, in the same order. With ``needs_others`` False it is also called with a single reward.
    """
    refuse_bare(names, "advantage")

    def decorate(function: Callable[[Sequence[float]], Sequence[float]]) -> AdvantageEstimator:
        estimator = AdvantageEstimator(function, needs_others)
        ESTIMATORS.add(estimator, *names)
        return estimator

    return decorate


@advantage("leave_one_out")
def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Return each reward less the mean of the others (RLOO, arXiv 2402.14740)."""
    total, others = sum(rewards), len(rewards) - 1
    return _without_noise([reward - (total - reward) / others for reward in rewards], rewards)


@advantage("grpo")
def grpo(rewards: Sequence[float]) -> list[float]:
    """Return each reward less the mean, over the standard deviation (arXiv 2402.03300)."""
    std = statistics.stdev(rewards)
    return [difference / (std + _STD_FLOOR) for difference in _centered(rewards)]


@advantage("dr_grpo")
def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """Return each reward less the mean (arXiv 2503.20783)."""
    return _centered(rewards)


@advantage("maxrl")
def maxrl(rewards: Sequence[float]) -> list[float]:
    """Return each reward less the mean, over the mean (arXiv 2602.02710); all 0 if the rewards are.

    The rarer a right answer is, the more it counts: the expected gradient is that of log p, p being the
    probability of one, expanded to as many terms as the group has rewards. Raises GroupError for a reward
    below 0.
    """
    if (lowest := min(rewards)) < 0:
        raise GroupError(
            f"the reward {lowest:g} is below 0, and --advantage maxrl divides by the mean reward",
            hint="give scores of 0 or more, or use --advantage dr_grpo",
        )
    mean = statistics.fmean(rewards)
    return [difference / mean if mean else 0.0 for difference in _centered(rewards)]


@advantage("reward", needs_others=False)
def reward(rewards: Sequence[float]) -> list[float]:
    """Return the rewards: REINFORCE, and with batch whitening REINFORCE++ (arXiv 2501.03262)."""
    return list(rewards)


def estimate(name: str, rewards: Sequence[float]) -> list[float]:
    """Return the advantages that the estimator ``name`` gives to ``rewards``, checked.

    Raises GroupError for a reward that is not a score, for an exception in the estimator and for a malformed
    result, and ConfigError for an estimator that does not exist or that this process may not import.
    """
    estimator = ESTIMATORS.get(name)
    if (wrong := next((value for value in rewards if not is_score(value)), None)) is not None:
        raise GroupError(
            f"a trajectory's reward {describe(wrong)} {score_problem(wrong)}",
            hint="score the group again by a scorer with smaller scores: agentrl db rescore",
        )
    what = f"advantage estimator {name}"
    # Read the values inside of contain_call: an estimator may return a generator that raises.
    values = contain_call(lambda: _checked(what, estimator(rewards)), what, GroupError)
    if len(values) != len(rewards):
        raise GroupError(
            f"{what} returned {len(values)} advantages for {len(rewards)} rewards", hint=_ADVANTAGES_HINT
        )
    return values


def spread(rewards: Sequence[float]) -> float:
    """Return max − min of ``rewards``; 0 if they differ only by rounding."""
    width = max(rewards) - min(rewards)
    return width if width > _rounding(rewards) else 0.0


def agrees(scores: Sequence[float], min_spread: float) -> bool:
    """Return whether ``scores`` differ by less than ``min_spread``, up to rounding.

    Scores 0.2 and 0.3 differ by 0.1, although their difference as floats is smaller. At ``min_spread`` 0
    no scores agree, not even equal ones.
    """
    width = spread(scores)
    return min_spread > 0 if width == 0 else width < min_spread - _rounding(scores)


def _checked(what: str, values: Any) -> list[float]:
    """Return ``values`` as floats. Raises GroupError for anything but finite numbers."""
    checked = []
    for value in values:
        if not is_finite(value):
            raise GroupError(
                f"{what} returned {describe(value)}, which is not a finite number", hint=_ADVANTAGES_HINT
            )
        # Refuse what training cannot square: float32 ends at 3.4e38, and _LARGEST squared is 1.6e37.
        if abs(value) > _LARGEST:
            raise GroupError(
                f"{what} returned {describe(value)}, which is beyond ±{_LARGEST:g}", hint=_ADVANTAGES_HINT
            )
        checked.append(float(value))
    return checked


def _centered(rewards: Sequence[float]) -> list[float]:
    mean = statistics.fmean(rewards)
    return _without_noise([reward - mean for reward in rewards], rewards)


def _without_noise(differences: Sequence[float], rewards: Sequence[float]) -> list[float]:
    """Return ``differences`` with those below 1e-6 of the range of ``rewards`` set to 0.0."""
    limit = max(_NOISE_OF_RANGE * spread(rewards), _rounding(rewards))
    return [value if abs(value) > limit else 0.0 for value in differences]


def _rounding(rewards: Sequence[float]) -> float:
    return _NOISE_OF_SIZE * max(map(abs, rewards))


_REASON_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
    """One scored trajectory, as a filter receives it."""

    id: str
    score: float
    turns: int
    """Number of model calls."""
    tool_calls: int
    generated_tokens: int
    """Tokens of all model calls."""
    stop_reason: str | None
    """A value of ``StopReason``, such as ``answered`` or ``turns_limit_error``."""
    final_answer: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group, as a filter receives it: a copy of its task and of its scored trajectories."""

    task: str
    task_id: str
    """``id`` in the task file."""
    split: str
    epoch: int
    query: str
    answer: Any
    meta: Mapping[str, Any]
    """The other fields of the task file."""
    trajectories: tuple[ScoredTrajectory, ...]


GroupFilter = Callable[[ScoredGroup], Mapping[str, str] | Collection[str]]
"""Returns either {id: reason} of the trajectories to drop, or the ids to keep as a list, tuple or set."""

GROUP_FILTERS: Registry[GroupFilter] = Registry(
    "group filter", group="agentrl.group_filters", flag="--group_filter"
)


def group_filter(*names: str) -> Callable[[GroupFilter], GroupFilter]:
    """Register a function ``(ScoredGroup) -> {id: reason}`` or ``-> [id, …]`` under ``names``."""
    refuse_bare(names, "group_filter")
    return GROUP_FILTERS.register(*names)


def dropped_by_filter(name: str, task: Task, records: Sequence[Record]) -> dict[str, str]:
    """Return which of the scored ``records`` of a group the filter ``name`` drops: {id: reason}.

    Raises GroupError for an exception in the filter and for a malformed result, ConfigError for a
    filter that does not exist or that this process may not import.
    """
    function = GROUP_FILTERS.get(name)
    what = f"group filter {name}"
    result = contain_call(lambda: function(_view(task, records)), what, GroupError)
    reasons = contain_call(
        lambda: _reasons(what, result, [record.id for record in records]), what, GroupError
    )
    return {key: f"{what}: {reason}" for key, reason in reasons.items()}


def _view(task: Task, records: Sequence[Record]) -> ScoredGroup:
    return ScoredGroup(
        task=task.id, task_id=task.task_id, split=task.split, epoch=task.epoch, query=task.query,
        # Copy: what a filter changes in its task must not reach what is stored.
        answer=copy.deepcopy(task.answer), meta=copy.deepcopy(task.meta),
        trajectories=tuple(
            ScoredTrajectory(
                id=record.id, score=0.0 if record.score is None else record.score,
                turns=record.turns,
                tool_calls=record.tool_calls, generated_tokens=record.generated_tokens,
                stop_reason=None if record.stop_reason is None else record.stop_reason.value,
                final_answer=record.final_answer,
            )
            for record in records
        ),
    )  # fmt: skip


def _reasons(what: str, result: Any, ids: Sequence[str]) -> dict[str, str]:
    """Return {id: reason} of a filter's result. Raises GroupError for a malformed one."""
    if inspect.iscoroutine(result):
        # Close it: Python would warn of a coroutine that was never awaited.
        result.close()
        raise GroupError(f"{what} is async", hint="write a plain function: def, not async def")
    if not isinstance(result, (Mapping, list, tuple, set, frozenset)):
        raise GroupError(f"{what} returned {describe(result)}", hint=_HINT)
    for key in result:
        if not isinstance(key, str) or key not in ids:
            raise GroupError(
                f"{what} names {describe(key)}, which is not a trajectory of the group", hint=_HINT
            )
    if not isinstance(result, Mapping):
        return {key: "not kept" for key in ids if key not in result}
    return {key: _reason(what, key, result[key]) for key in ids if key in result}


def _reason(what: str, key: str, reason: Any) -> str:
    if not isinstance(reason, str) or not reason.strip():
        raise GroupError(f"{what} drops {key} for the reason {describe(reason)}", hint=_HINT)
    # Replace lone surrogates: BSON holds UTF-8 only, and the whole group could not be stored.
    return str(replace_surrogates(reason))[:_REASON_CHARS]


_HINT = "return {id: reason} of the trajectories to drop, or a list of the ids to keep"


EFFICIENCY_SPREAD = 0.2
"""Largest difference that ``efficient_rewarding`` makes between two right (or two wrong) answers."""

FAILED = "failed"
"""The ``group.outcome`` of a group that could not be finalized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision about one scored Record: ``advantage`` if it is trained, else ``abandoned_because``."""

    record_id: str
    advantage: float | None = None
    turn_advantages: tuple[float, ...] = ()
    abandoned_because: str | None = None

    @property
    def status(self) -> RecordStatus:
        """Return the final status of the Record."""
        return RecordStatus.READY if self.abandoned_because is None else RecordStatus.ABANDONED


ALONE: Mapping[str, Any] = {
    "advantage": "reward", "min_score_spread": 0.0, "drop_zero_advantage": False, "minimal_advantage": 0.0,
    "balance_sample": False, "step_advantage": "off", "baseline": "none",
    "multi_objective_aggregation": "sum_then_normalize",
}  # fmt: skip
"""Flags of a group of one trajectory."""


def alone(config: GroupConfig) -> GroupConfig:
    """Return the rules for a group of one trajectory, which nothing is compared with: A is its score."""
    return replace(config, **ALONE)


def decide_group(
    records: Sequence[Record],
    config: GroupConfig,
    rng: random.Random,
    filtered: Mapping[str, str] | None = None,
    steps: Steps | None = None,
    baseline: float | None = None,
) -> list[Decision]:
    """Decide every scored Record of a group; ``records`` without a score are ignored.

    ``steps`` has the model calls, which ``--step_advantage`` reads, and ``baseline`` is that of ``--baseline
    window``: without it such a group raises GroupError.

    The order is: (1) abandon what ``--group_filter`` dropped (``filtered``, {id: reason}) and ignore it from
    then on; (2) abandon a group without spread as a whole; (3) balance right and wrong answers
    (``balance_sample``) or apply the other filters; (4) compute the advantages of the rest, with a baseline
    over the rest. Filters use the scores; a group has spread if its scores, its turn rewards, the rewards of
    a role or, with step advantages, the returns from a state have some.
    ``efficient_rewarding`` and the overlong penalty change the rewards that advantages come from, never a
    score.
    """
    scored = [record for record in records if record.score is not None]
    gone = filtered or {}
    left = [record for record in scored if record.id not in gone]
    if config.baseline == "window" and baseline is None and left:
        raise GroupError(
            "--baseline window needs the mean score of the window, which the group does not store",
            hint="it was decided without the flag, or given up before the mean was read: leave it as it is",
        )
    decided = {item.record_id: item for item in _decide(left, config, rng, steps or {}, baseline or 0.0)}
    return [decided.get(record.id) or abandon(record, gone[record.id]) for record in scored]


def recorded_decisions(records: Sequence[Record]) -> list[Decision]:
    """Return the decisions that a finalized group's scored Records hold."""
    return [
        Decision(
            record_id=record.id,
            advantage=record.advantage,
            turn_advantages=record.turn_advantages,
            abandoned_because=record.abandoned_because,
        )
        for record in records
        if record.score is not None
    ]


def rules_of(rules: Mapping[str, Any]) -> GroupConfig:
    """Return the flags stored in ``Task.group.rules``; missing ones have their defaults."""
    # Skip unknown keys: rules stored by another version may have other flags.
    known = {field.name for field in fields(GroupConfig)}
    return GroupConfig(**{key: value for key, value in rules.items() if key in known})


def filtered_of(summary: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the drops of ``--group_filter`` in ``Task.group``, {id: reason}; None if it has no list."""
    listed = summary.get("filtered")
    if not isinstance(listed, list):
        return None
    items = [item for item in listed if isinstance(item, Mapping)]
    return {str(item.get("record")): str(item.get("because")) for item in items}


def _decide(
    scored: Sequence[Record], config: GroupConfig, rng: random.Random, steps: Steps, baseline: float
) -> list[Decision]:
    if not scored:
        return []
    if _all_agree(scored, config, steps):
        return [abandon(record, "no spread in the group's scores") for record in scored]
    dropped = _balance(scored, config, rng) if config.balance_sample else _filter(scored, config, rng)
    kept = [record for record in scored if record.id not in dropped]
    if len(kept) == 1 and ESTIMATORS.get(config.advantage).needs_others:
        dropped[kept.pop().id] = "alone in its group"
    rewards = _rewards(kept, config)
    advantages = _advantages(kept, rewards, config, baseline) if kept else {}
    if config.step_advantage == "off":
        of_calls: Additions = turn_advantages(kept, config)
    else:
        of_calls = step_additions(kept, rewards, steps, config)
    of_turns = added(of_calls, role_additions(kept, advantages, config))
    return [
        Decision(
            record_id=record.id,
            advantage=advantages[record.id],
            turn_advantages=of_turns.get(record.id, ()),
        )
        if record.id in advantages
        else abandon(record, dropped[record.id])
        for record in scored
    ]


def _all_agree(scored: Sequence[Record], config: GroupConfig, steps: Steps) -> bool:
    """Return whether nothing that the group's trajectories got differs by ``min_score_spread``."""
    objectives = _objectives(scored, config)
    if not all(
        agrees([weight * value for value in scores], config.min_score_spread) for weight, scores in objectives
    ):
        return False  # equal sums may be of different scores
    scores = {record.id: _score(record) for record in scored}
    totals = [scores[record.id] + _turn_sum(record, config) for record in scored]
    if not agrees(totals, config.min_score_spread) or not role_rewards_agree(scored, config):
        return False
    if config.step_advantage == "off":
        return turn_rewards_agree(scored, config)
    return step_returns_agree(scored, scores, steps, config)


def summarize(
    records: Sequence[Record], failed: int, trained: int, rules: Mapping[str, Any]
) -> dict[str, object]:
    """Return the ``group`` sub-document of a Task: mean score, pass rate and outcome.

    ``failed`` counts the slots without a score; no mean counts them. ``rules`` are the group's rules or an
    earlier summary: ``pass_rate`` is the fraction of scores above its ``right_threshold``.
    """
    threshold = float(rules.get("right_threshold", RIGHT_THRESHOLD))
    scores = [_score(record) for record in records if record.score is not None]
    versions = [version for record in records for version in (record.min_version, record.max_version)]
    known = [version for version in versions if version is not None]
    return {
        "scored": len(scores),
        "failed": failed,
        "mean_score": statistics.fmean(scores) if scores else None,
        "pass_rate": statistics.fmean(score > threshold for score in scores) if scores else None,
        "outcome": "trained" if trained else "abandoned",
        "trained": trained,
        "versions": [min(known), max(known)] if known else [],
    }


def _score(record: Record) -> float:
    return 0.0 if record.score is None else record.score


def _is_right(record: Record, config: GroupConfig) -> bool:
    return _score(record) > config.right_threshold


def abandon(record: Record, because: str) -> Decision:
    """Return the decision not to train a Record."""
    return Decision(record_id=record.id, abandoned_because=because)


def _balance(records: Sequence[Record], config: GroupConfig, rng: random.Random) -> dict[str, str]:
    """Drop engine failures; keep a random k+1 wrong and k+2 right answers, k being the smaller count."""
    dropped = {r.id: "the engine failed" for r in records if r.stop_reason is StopReason.FAILED}
    wrong = [r for r in records if r.id not in dropped and not _is_right(r, config)]
    right = [r for r in records if r.id not in dropped and _is_right(r, config)]
    smaller = min(len(wrong), len(right))
    for side, kept in ((wrong, smaller + 1), (right, smaller + 2)):
        # Draw from the group's own generator: whoever decides the group again drops the same ones.
        surplus = rng.sample(side, max(0, len(side) - kept))
        dropped.update({record.id: "more of its kind than balance_sample keeps" for record in surplus})
    return dropped


def _filter(records: Sequence[Record], config: GroupConfig, rng: random.Random) -> dict[str, str]:
    dropped: dict[str, str] = {}
    for record in records:
        if record.stop_reason is StopReason.FAILED:
            dropped[record.id] = "the engine failed"
        elif _is_right(record, config) and record.turns < config.min_turns:
            dropped[record.id] = f"right in fewer than min_turns ({config.min_turns}) model calls"
    if config.reserve_context_error_count >= 0 and not config.efficient_rewarding:
        out_of_context = [r for r in records if r.stop_reason and r.stop_reason.is_context_error]
        surplus = max(0, len(out_of_context) - config.reserve_context_error_count)
        for record in rng.sample(out_of_context, surplus):
            dropped.setdefault(record.id, "more context errors than reserve_context_error_count")
    return dropped


def _rewards(records: Sequence[Record], config: GroupConfig) -> dict[str, float]:
    """Return the scores as efficiency and the overlong penalty change them."""
    scores = {
        record.id: _score(record) - overlong_penalty(record.generated_tokens, config) for record in records
    }
    if config.efficient_rewarding:
        adjustments = _efficiency(records, config)
        scores = {key: score + adjustments[key] for key, score in scores.items()}
    return scores


def _advantages(
    records: Sequence[Record], rewards: Mapping[str, float], config: GroupConfig, baseline: float
) -> dict[str, float]:
    objectives = _objectives(records, config)
    if objectives:
        # Weigh what is normalized: a weight in the scores themselves would be divided out again.
        weighed = [
            [weight * value for value in estimate(config.advantage, scores)] for weight, scores in objectives
        ]
        raw = [_exact_sum(of_record) for of_record in zip(*weighed, strict=True)]
    else:
        totals = [rewards[record.id] + _turn_sum(record, config) for record in records]
        if config.baseline == "window":
            totals = _without_noise([value - baseline for value in totals], [*totals, baseline])
        raw = estimate(config.advantage, totals)
    result = {}
    for record, value in zip(records, raw, strict=True):
        scaled = value * config.adv_scaling
        if config.clamp_advantage_by_score:
            scaled = max(scaled, 0.0) if _is_right(record, config) else min(scaled, 0.0)
        result[record.id] = scaled
    return result


def _exact_sum(terms: Sequence[float]) -> float:
    """Return the sum; 0 if the terms cancel each other but for rounding."""
    total = math.fsum(terms)
    return total if abs(total) > _NOISE_OF_SIZE * math.fsum(map(abs, terms)) else 0.0


def _objectives(records: Sequence[Record], config: GroupConfig) -> list[tuple[float, list[float]]]:
    """Return the weight of each scorer and its scores of ``records``, if they are normalized apart.

    GDPO (arXiv 2601.05242): A is the weighted sum of what the estimator makes of each scorer's scores;
    ``--advantage_whitening batch`` is its normalization over the batch. Empty if the scores are of one scorer
    or not of the same sum, as beside those that people or an agent gave: then the score itself counts.
    """
    if config.multi_objective_aggregation == "sum_then_normalize" or not records:
        return []
    parts = [record.score_parts for record in records]
    weights = {name: weight for name, (weight, _) in parts[0].items() if weight}
    if any({name: weight for name, (weight, _) in each.items() if weight} != weights for each in parts):
        return []
    return [(weight, [each[name][1] for each in parts]) for name, weight in weights.items()]


def overlong_penalty(generated_tokens: int, config: GroupConfig) -> float:
    """Return the penalty for the length of a trajectory, in [0, ``config.overlong_penalty``].

    It is 0 up to ``overlong_limit`` − ``overlong_buffer`` generated tokens of all turns, grows linearly over
    the buffer, and is maximal from ``overlong_limit`` on (soft overlong punishment, DAPO, arXiv 2503.14476,
    equation 13).
    """
    if config.overlong_buffer == 0:
        return 0.0
    used = generated_tokens - (config.overlong_limit - config.overlong_buffer)
    return config.overlong_penalty * min(1.0, max(0.0, used / config.overlong_buffer))


def _efficiency(records: Sequence[Record], config: GroupConfig) -> dict[str, float]:
    """Return adjustments that sum to 0: fewer turns are better for right answers, worse for wrong ones."""
    adjustments: dict[str, float] = {}
    for is_right, sign in ((True, -1.0), (False, 1.0)):
        side = [record for record in records if _is_right(record, config) is is_right]
        ranks = _mean_ranks([record.turns for record in side])
        center = (len(side) - 1) / 2
        width = max(1, len(side) - 1)
        for record, rank in zip(side, ranks, strict=True):
            adjustments[record.id] = sign * EFFICIENCY_SPREAD * (rank - center) / width
    return adjustments


def _mean_ranks(values: Sequence[int]) -> list[float]:
    """Return ranks from 0; equal values get the mean of their ranks."""
    ordered = sorted(values)
    first = {value: ordered.index(value) for value in set(values)}
    return [first[value] + (ordered.count(value) - 1) / 2 for value in values]
