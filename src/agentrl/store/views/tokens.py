"""Read the generated tokens of a trajectory with what is stored of each.

Logprob and version are of the model call, advantages of the training data, ratios and entropies of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agentrl.documents.base import Document
from agentrl.documents.model_call import DispatchedSamplingTask, unpack_floats, unpack_halves, unpack_ids
from agentrl.documents.record import Record
from agentrl.documents.status import APPLIED_STEPS, DataStatus, values
from agentrl.documents.training import TokenStatistics, TrainableSpan
from agentrl.store.mechanics.connection import Repository, database_call
from agentrl.store.model_calls import read_model_calls
from agentrl.store.names import DATA, RECORD, TOKEN_STATISTICS, VERSION
from agentrl.store.views import VIEWS
from agentrl.store.views.rows import StepRow

NO_VERSION = -1


@dataclass(frozen=True, slots=True)
class StepValues:
    """What one step computed of the tokens of a model call, in nats; NaN for tokens that it did not train."""

    log_ratios: NDArray[np.float32]
    """log πθ − log μ."""
    entropies: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTokens:
    """The generated tokens of one model call; every array has one element per token."""

    call: DispatchedSamplingTask
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """At sampling; NaN where none is stored."""
    versions: NDArray[np.int32]
    """The policy version that sampled the token; −1 if unknown."""
    advantages: NDArray[np.float32]
    """NaN for tokens that are not trained."""
    values: Mapping[int, StepValues] = field(default_factory=dict)
    """By the number of the step; without the steps that stored nothing of the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryTokens:
    """The generated tokens of one trajectory, by model call."""

    record: Record
    calls: Sequence[CallTokens]
    data_status: DataStatus | None
    """None if the trajectory has no training data."""
    steps: Sequence[StepRow]
    """The committed steps that trained it, in order."""
    locations: Mapping[int, str]
    """Policy version → the folder of its weights, which holds the tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spans(Document):
    """What the token view reads of training data."""

    status: DataStatus
    tokens: int
    spans: tuple[TrainableSpan, ...]
    trained_at_steps: tuple[int, ...] = ()


class TokenReads(Repository):
    """Reads tokens for the token view. It never writes."""

    @database_call
    async def trajectory(self, record_id: str) -> TrajectoryTokens | None:
        """Return the tokens of one trajectory; None if there is no such Record."""
        document = await self._collection(RECORD).find_one({"_id": record_id})
        if document is None:
            return None
        record = Record.from_document(document)
        calls = (await read_model_calls(self._connection, [record_id]))[record_id]
        fields = {"status": 1, "tokens": 1, "spans": 1, "trained_at_steps": 1}
        found = await self._collection(DATA).find_one({"_id": record_id}, fields)
        data = None if found is None else _Spans.from_document(found)
        steps = await self._steps(data.trained_at_steps if data else ())
        values = await self._values(record_id, steps, data.tokens if data else 0)
        versions = {span.version for call in calls for span in call.versions}
        return TrajectoryTokens(
            record=record,
            calls=[_tokens(call, data.spans if data else (), values) for call in calls],
            data_status=data.status if data else None,
            steps=steps,
            locations=await self._locations(versions),
        )

    async def _steps(self, numbers: Sequence[int]) -> list[StepRow]:
        query = {"step": {"$in": list(numbers)}, "status": {"$in": values(APPLIED_STEPS)}}
        source, pipeline = VIEWS["audit_steps"]
        cursor = await self._collection(source).aggregate(
            [{"$match": query}, {"$sort": {"step": 1}}, *pipeline]
        )
        return [StepRow.from_document(row) async for row in cursor]

    async def _values(self, record_id: str, steps: Sequence[StepRow], tokens: int) -> dict[int, StepValues]:
        """Return what each of ``steps`` stored, over all ``tokens`` of the training data."""
        query = {"record": record_id, "train_step": {"$in": [step.id for step in steps]}}
        found = self._collection(TOKEN_STATISTICS).find(query, sort=[("step", 1)])
        stored = [TokenStatistics.from_document(document) async for document in found]
        return {item.step: _spread(item, tokens) for item in stored if item.problem(tokens) is None}

    async def _locations(self, versions: set[int]) -> dict[int, str]:
        found = self._collection(VERSION).find({"_id": {"$in": sorted(versions)}}, {"location": 1})
        return {item["_id"]: item["location"] async for item in found}


def _spread(item: TokenStatistics, tokens: int) -> StepValues:
    """Return the values at their places among ``tokens``; NaN elsewhere."""
    places = np.concatenate([np.arange(span.start, span.end) for span in item.spans] or [np.zeros(0, int)])
    spread = []
    for packed in (item.log_ratios, item.entropies):
        values = np.full(tokens, np.nan, np.float32)
        values[places] = unpack_halves(packed)
        spread.append(values)
    return StepValues(*spread)


def _tokens(
    call: DispatchedSamplingTask, spans: Sequence[TrainableSpan], values: Mapping[int, StepValues]
) -> CallTokens:
    ids = unpack_ids(call.output_ids)
    stored = unpack_floats(call.logprobs)
    logprobs = np.full(len(ids), np.nan, np.float32)
    logprobs[: len(stored)] = stored[: len(ids)]
    versions = np.full(len(ids), NO_VERSION, np.int32)
    advantages = np.full(len(ids), np.nan, np.float32)
    own = [span for span in spans if span.call == call.index]
    of_version = {span.version: span.advantage for span in own}
    for span in call.versions:
        versions[span.start : span.end] = span.version
        advantages[span.start : span.end] = of_version.get(span.version, np.nan)
    end = max((span.end for span in own), default=0)  # a call's last token is trained
    fits = end >= len(ids)
    of_steps = {step: _of_call(found, end, len(ids)) for step, found in values.items()} if fits else {}
    return CallTokens(
        call=call, ids=ids, logprobs=logprobs, versions=versions, advantages=advantages, values=of_steps
    )


def _of_call(values: StepValues, end: int, count: int) -> StepValues:
    """Return the values of a call whose ``count`` generated tokens end at ``end``."""
    here = slice(end - count, end)
    return StepValues(values.log_ratios[here], values.entropies[here])
