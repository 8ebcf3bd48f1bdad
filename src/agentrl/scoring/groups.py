"""A finished group of trajectories → which of them are trained, and with which advantage."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.config.schema import GroupConfig
from agentrl.documents.record import Record
from agentrl.documents.status import StopReason
from agentrl.scoring.shaping import overlong_penalty

PASS_SCORE = 0.5
"""A score above this is a pass; ``clamp_advantage_by_score`` divides at the same place."""

EFFICIENCY_SPREAD = 0.2
"""Largest difference that ``efficient_rewarding`` makes between two scores of one side."""

FAILED = "failed"
"""The ``group.outcome`` of a group that could not be finalised."""

_STD_FLOOR = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One scored Record's lot: ``advantage`` if it is trained, else ``abandoned_because``."""

    record_id: str
    advantage: float | None = None
    abandoned_because: str | None = None


def decide_group(records: Sequence[Record], config: GroupConfig, rng: random.Random) -> list[Decision]:
    """Decide every scored Record of a group; ``records`` without a score take no part.

    In this order: a group without spread is abandoned whole; ``balance_sample`` evens right and wrong out, or
    else the filters apply; what is left is given advantages, the baseline taken over what is left. Spread and
    filters look at the scores; ``efficient_rewarding`` and the overlong penalty shape the rewards that
    advantages come from, never a score.
    """
    scored = [record for record in records if record.score is not None]
    if not scored:
        return []
    scores = [_score(record) for record in scored]
    if max(scores) - min(scores) < config.min_score_spread:
        return [_abandon(record, "no spread in the group's scores") for record in scored]
    dropped = _balance(scored, rng) if config.balance_sample else _filter(scored, config, rng)
    kept = [record for record in scored if record.id not in dropped]
    if len(kept) == 1:
        dropped[kept[0].id] = "alone in its group"
    advantages = _advantages(kept, config) if len(kept) > 1 else {}
    return [
        Decision(record_id=record.id, advantage=advantages[record.id])
        if record.id in advantages
        else _abandon(record, dropped[record.id])
        for record in scored
    ]


def summarise(records: Sequence[Record], failed: int, trained: int) -> dict[str, object]:
    """The ``group`` sub-document of a Task: how the policy did, and what became of it.

    ``failed`` counts the slots that never got a score; they are in no mean.
    """
    scores = [_score(record) for record in records if record.score is not None]
    versions = [version for record in records for version in (record.min_version, record.max_version)]
    known = [version for version in versions if version is not None]
    return {
        "scored": len(scores),
        "failed": failed,
        "mean_score": statistics.fmean(scores) if scores else None,
        "pass_rate": statistics.fmean(score > PASS_SCORE for score in scores) if scores else None,
        "outcome": "trained" if trained else "abandoned",
        "trained": trained,
        "versions": [min(known), max(known)] if known else [],
    }


def _score(record: Record) -> float:
    return 0.0 if record.score is None else record.score


def _abandon(record: Record, because: str) -> Decision:
    return Decision(record_id=record.id, abandoned_because=because)


def _balance(records: Sequence[Record], rng: random.Random) -> dict[str, str]:
    """Drop engine failures, then at random all but k+1 wrong and k+2 right, k the smaller side's size."""
    dropped = {r.id: "the engine failed" for r in records if r.stop_reason is StopReason.FAILED}
    wrong = [r for r in records if r.id not in dropped and _score(r) == 0.0]
    right = [r for r in records if r.id not in dropped and _score(r) != 0.0]
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
        elif _score(record) > PASS_SCORE and record.turns < config.min_turns:
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
        adjustments = _efficiency(records)
        scores = {key: score + adjustments[key] for key, score in scores.items()}
    raw = ESTIMATORS[config.advantage](list(scores.values()))
    result = {}
    for record, value in zip(records, raw, strict=True):
        scaled = value * config.adv_scaling
        if config.clamp_advantage_by_score:
            scaled = min(scaled, 0.0) if _score(record) <= PASS_SCORE else max(scaled, 0.0)
        result[record.id] = scaled
    return result


def _leave_one_out(scores: Sequence[float]) -> list[float]:
    """Score less the mean of the others (RLOO, arXiv 2402.14740)."""
    total, others = sum(scores), len(scores) - 1
    return [score - (total - score) / others for score in scores]


def _grpo(scores: Sequence[float]) -> list[float]:
    """Score less the mean, over the standard deviation (arXiv 2402.03300)."""
    mean, std = statistics.fmean(scores), statistics.stdev(scores)
    return [(score - mean) / (std + _STD_FLOOR) for score in scores]


def _dr_grpo(scores: Sequence[float]) -> list[float]:
    """Score less the mean (arXiv 2503.20783)."""
    mean = statistics.fmean(scores)
    return [score - mean for score in scores]


ESTIMATORS: Mapping[str, Callable[[Sequence[float]], list[float]]] = {
    "leave_one_out": _leave_one_out,
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
}


def _efficiency(records: Sequence[Record]) -> dict[str, float]:
    """Adjustments that sum to zero: among right answers fewer turns are better, among wrong ones more."""
    adjustments: dict[str, float] = {}
    for is_right, sign in ((True, -1.0), (False, 1.0)):
        side = [record for record in records if (_score(record) > PASS_SCORE) is is_right]
        ranks = _mean_ranks([record.turns for record in side])
        centre = (len(side) - 1) / 2
        width = max(1, len(side) - 1)
        for record, rank in zip(side, ranks, strict=True):
            adjustments[record.id] = sign * EFFICIENCY_SPREAD * (rank - centre) / width
    return adjustments


def _mean_ranks(values: Sequence[int]) -> list[float]:
    """Ranks from 0; equal values share the mean of theirs."""
    ordered = sorted(values)
    first = {value: ordered.index(value) for value in set(values)}
    return [first[value] + (ordered.count(value) - 1) / 2 for value in values]
