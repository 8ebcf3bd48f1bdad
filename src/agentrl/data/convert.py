"""Record and its model calls → DBRecordData: which tokens are trained, and with which advantage."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.config.schema import GroupConfig
from agentrl.data.prefix_tree import build_tree
from agentrl.data.sampled import call_temperature, masked_because
from agentrl.documents.dispatch import DispatchedSamplingTask, VersionSpan
from agentrl.documents.packing import pack_floats, pack_ids, unpack_floats
from agentrl.documents.record import Record
from agentrl.documents.status import CallStatus
from agentrl.documents.task import Task
from agentrl.documents.training import DBRecordData, TrainableSpan
from agentrl.errors import StoreError

logger = logging.getLogger(__name__)

FAULTY = frozenset({CallStatus.FORMAT_ERROR, CallStatus.REPEAT_ERROR})


@dataclass(frozen=True, slots=True)
class _TrainableCall:
    call: DispatchedSamplingTask
    advantage: float
    temperature: float


def to_training_data(
    task: Task,
    record: Record,
    calls: Sequence[DispatchedSamplingTask],
    advantage: float,
    config: GroupConfig,
    *,
    supervised: bool = False,
) -> DBRecordData | None:
    """Training data of one scored trajectory, or None when no call of it is to be trained.

    ``calls`` are the Record's, ordered by index. Every generated token of a trainable call is trainable,
    in one span per call and policy version, at the temperature that the call was sampled with. Calls that
    another parameter shaped (``masked_because``) are context. ``supervised``: every call is trainable
    however it was sampled, at temperature 1, since no loss reads its logprobs. Raises StoreError when the
    calls contradict one another or the Record has no score.
    """
    if record.score is None:
        raise StoreError(f"record {record.id} has no score and cannot become training data")
    trainable = _trainable_calls(calls, advantage, config, supervised)
    tree = build_tree(calls, [item.call.id for item in trainable])
    spans: list[TrainableSpan] = []
    logprobs: list[np.ndarray] = []
    for item in sorted(trainable, key=lambda item: tree.output_starts[item.call.id]):
        output_start = tree.output_starts[item.call.id]
        for version in _versions(item.call, first=0 if output_start else 1):
            spans.append(_span(item, version, output_start))
            logprobs.append(unpack_floats(item.call.logprobs)[version.start : version.end])
    if not spans:
        return None
    return DBRecordData(
        id=record.id,
        record=record.id,
        task=task.id,
        split=task.split,
        score=record.score,
        advantage=advantage,
        min_version=min(span.version for span in spans),
        max_version=max(span.version for span in spans),
        tokens=len(tree.input_ids),
        trainable_tokens=sum(span.end - span.start for span in spans),
        turns=record.turns,
        nodes=tree.nodes,
        spans=tuple(spans),
        input_ids=pack_ids(tree.input_ids),
        behavior_logprobs=pack_floats(np.concatenate(logprobs)),
    )


def call_advantage(status: CallStatus, advantage: float) -> float | None:
    """The advantage of one call's tokens; None where the call is not trained at all.

    A malformed tool call and a repeated text earn 0, or the trajectory's advantage where that is lower.
    """
    if status is CallStatus.FAILED:
        return None
    return min(advantage, 0.0) if status in FAULTY else advantage


def masked_calls(calls: Sequence[DispatchedSamplingTask], advantage: float, config: GroupConfig) -> list[str]:
    """Return, for each call masked only because of a sampling parameter, that parameter: ``top_p 0.9``."""
    return [
        shaped
        for call in calls
        if _own_advantage(call, advantage, config) is not None
        and (shaped := masked_because(call)) is not None
    ]


def _trainable_calls(
    calls: Sequence[DispatchedSamplingTask], advantage: float, config: GroupConfig, supervised: bool
) -> list[_TrainableCall]:
    chosen = []
    for call in calls:
        own = _own_advantage(call, advantage, config)
        if own is None or not _is_consistent(call):
            continue
        temperature = 1.0 if supervised else call_temperature(call)
        if temperature is not None and (supervised or masked_because(call) is None):
            chosen.append(_TrainableCall(call, own, temperature))
    return chosen


def _own_advantage(call: DispatchedSamplingTask, advantage: float, config: GroupConfig) -> float | None:
    """Return the advantage of a call that has tokens to train, else None."""
    own = call_advantage(call.status, advantage)
    if own is None or not call.output_ids:
        return None
    if (own == 0.0 and config.drop_zero_advantage) or abs(own) < config.minimal_advantage:
        return None
    return own


def _is_consistent(call: DispatchedSamplingTask) -> bool:
    """False, with a warning, where the engine reported logprobs that no importance ratio can use."""
    logprobs = unpack_floats(call.logprobs)
    if len(logprobs) * 4 != len(call.output_ids):
        raise StoreError(
            f"call {call.id} has {len(call.output_ids) // 4} generated tokens and {len(logprobs)} logprobs"
        )
    if np.isfinite(logprobs).all():
        return True
    logger.warning("call %s has logprobs that are not finite: it is not trained", call.id)
    return False


def _versions(call: DispatchedSamplingTask, first: int) -> list[VersionSpan]:
    """The call's version spans from token ``first`` on, neighbors of one version merged."""
    merged: list[VersionSpan] = []
    reached = 0
    for span in call.versions:
        if span.start != reached or span.end < span.start:
            break
        reached = span.end
        if merged and merged[-1].version == span.version:
            merged[-1] = VersionSpan(version=span.version, start=merged[-1].start, end=span.end)
        else:
            merged.append(span)
    if reached * 4 != len(call.output_ids):
        raise StoreError(
            f"the policy versions of call {call.id} do not cover its {len(call.output_ids) // 4} tokens"
        )
    kept = (VersionSpan(version=s.version, start=max(s.start, first), end=s.end) for s in merged)
    return [span for span in kept if span.start < span.end]


def _span(item: _TrainableCall, version: VersionSpan, output_start: int) -> TrainableSpan:
    return TrainableSpan(
        start=output_start + version.start,
        end=output_start + version.end,
        call=item.call.index,
        version=version.version,
        advantage=item.advantage,
        temperature=item.temperature,
    )
