"""Decide a finished group: which trajectories are trained, and with which advantage; users may filter it."""

from __future__ import annotations

import copy
import inspect
import random
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from agentrl.config.groups import RIGHT_THRESHOLD, GroupConfig
from agentrl.documents.base import replace_surrogates
from agentrl.documents.record import Record
from agentrl.documents.status import StopReason
from agentrl.documents.task import Task
from agentrl.errors import GroupError
from agentrl.registry import Registry
from agentrl.scoring.advantages import ESTIMATORS, agrees, estimate
from agentrl.scoring.rewards import (
    added,
    role_additions,
    role_rewards_agree,
    turn_advantages,
    turn_rewards_agree,
)
from agentrl.user_code import contain_call, describe

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
        answer=copy.deepcopy(task.answer), meta=copy.deepcopy(task.meta),
        trajectories=tuple(
            ScoredTrajectory(
                id=record.id, score=0.0 if record.score is None else record.score, turns=record.turns,
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


def alone(config: GroupConfig) -> GroupConfig:
    """Return the rules for a group of one trajectory, which nothing is compared with: A is its score."""
    return replace(
        config, advantage="reward", min_score_spread=0.0, drop_zero_advantage=False, minimal_advantage=0.0,
        balance_sample=False,
    )  # fmt: skip


def decide_group(
    records: Sequence[Record],
    config: GroupConfig,
    rng: random.Random,
    filtered: Mapping[str, str] | None = None,
) -> list[Decision]:
    """Decide every scored Record of a group; ``records`` without a score are ignored.

    The order is: (1) abandon what ``--group_filter`` dropped (``filtered``, {id: reason}) and ignore it from
    then on; (2) abandon a group without spread as a whole; (3) balance right and wrong answers
    (``balance_sample``) or apply the other filters; (4) compute the advantages of the rest, with a baseline
    over the rest. Filters use the scores; a group has spread if its scores, its turn rewards or the rewards
    of a role have some.
    ``efficient_rewarding`` and the overlong penalty change the rewards that advantages come from, never a
    score.
    """
    scored = [record for record in records if record.score is not None]
    gone = filtered or {}
    left = [record for record in scored if record.id not in gone]
    decided = {item.record_id: item for item in _decide(left, config, rng)}
    return [decided.get(record.id) or _abandon(record, gone[record.id]) for record in scored]


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
    known = {field.name for field in fields(GroupConfig)}
    return GroupConfig(**{key: value for key, value in rules.items() if key in known})


def filtered_of(summary: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the drops of ``--group_filter`` in ``Task.group``, {id: reason}; None if it has no list."""
    listed = summary.get("filtered")
    if not isinstance(listed, list):
        return None
    items = [item for item in listed if isinstance(item, Mapping)]
    return {str(item.get("record")): str(item.get("because")) for item in items}


def _decide(scored: Sequence[Record], config: GroupConfig, rng: random.Random) -> list[Decision]:
    if not scored:
        return []
    scores = [_score(record) for record in scored]
    least = config.min_score_spread
    if agrees(scores, least) and turn_rewards_agree(scored, least) and role_rewards_agree(scored, least):
        return [_abandon(record, "no spread in the group's scores") for record in scored]
    dropped = _balance(scored, config, rng) if config.balance_sample else _filter(scored, config, rng)
    kept = [record for record in scored if record.id not in dropped]
    if len(kept) == 1 and ESTIMATORS.get(config.advantage).needs_others:
        dropped[kept.pop().id] = "alone in its group"
    advantages = _advantages(kept, config) if kept else {}
    of_turns = added(turn_advantages(kept, config), role_additions(kept, advantages, config))
    return [
        Decision(
            record_id=record.id,
            advantage=advantages[record.id],
            turn_advantages=of_turns.get(record.id, ()),
        )
        if record.id in advantages
        else _abandon(record, dropped[record.id])
        for record in scored
    ]


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


def _abandon(record: Record, because: str) -> Decision:
    return Decision(record_id=record.id, abandoned_because=because)


def _balance(records: Sequence[Record], config: GroupConfig, rng: random.Random) -> dict[str, str]:
    """Drop engine failures; keep a random k+1 wrong and k+2 right answers, k being the smaller count."""
    dropped = {r.id: "the engine failed" for r in records if r.stop_reason is StopReason.FAILED}
    wrong = [r for r in records if r.id not in dropped and not _is_right(r, config)]
    right = [r for r in records if r.id not in dropped and _is_right(r, config)]
    smaller = min(len(wrong), len(right))
    for side, kept in ((wrong, smaller + 1), (right, smaller + 2)):
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


def _advantages(records: Sequence[Record], config: GroupConfig) -> dict[str, float]:
    scores = {
        record.id: _score(record) - overlong_penalty(record.generated_tokens, config) for record in records
    }
    if config.efficient_rewarding:
        adjustments = _efficiency(records, config)
        scores = {key: score + adjustments[key] for key, score in scores.items()}
    raw = estimate(config.advantage, list(scores.values()))
    result = {}
    for record, value in zip(records, raw, strict=True):
        scaled = value * config.adv_scaling
        if config.clamp_advantage_by_score:
            scaled = max(scaled, 0.0) if _is_right(record, config) else min(scaled, 0.0)
        result[record.id] = scaled
    return result


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
