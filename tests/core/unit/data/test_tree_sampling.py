"""Test how the sampling parameters of a model call decide its temperature, or mask it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from model_calls import TASK, model_call, record

from agentrl.config.schema import GroupConfig
from agentrl.data.finalize_group import (
    GroupRules,
    call_temperature,
    explain_difference,
    mask_reason,
    masked_calls,
    to_training_data,
)
from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    SamplingMask,
    pack_floats,
    unpack_floats,
    unpack_ids,
)
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import RecordStatus
from agentrl.documents.training import DBRecordData
from agentrl.errors import StoreError
from agentrl.store.groups import StoredGroup

CONFIG = GroupConfig()


def call(index: int, *, traj: int = 0, **changes: Any) -> DispatchedSamplingTask:
    """One of three turns, with the parameters of a request and ``changes``."""
    return model_call(
        record(traj).id, index, index - 1 if index else None, [5, 6], [10 * index, 10 * index + 1],
        sampling_params=SamplingParams(max_new_tokens=9).to_request() | {"sampling_seed": 5} | changes,
        logprobs=pack_floats([-0.5 - index, -1.0 - index]),
    )  # fmt: skip


def convert(*calls: DispatchedSamplingTask, advantage: float = 0.5, **options: Any) -> DBRecordData | None:
    return to_training_data(TASK, record(), calls, advantage, CONFIG, **options)


def test_spans_have_the_temperature_of_their_call() -> None:
    calls = (call(0, temperature=0.5), call(1), replace(call(2), sampling_params={}))
    data = convert(*calls)
    assert [span.temperature for span in data.spans] == [0.5, 1.0, 1.0]
    assert explain_difference(data, calls, CONFIG) is None
    colder = replace(data, spans=(replace(data.spans[0], temperature=0.4), *data.spans[1:]))
    assert "spans" in str(explain_difference(colder, calls, CONFIG))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"top_p": 0.9}, "top_p 0.9"),
        ({"top_k": 20}, "top_k 20"),
        ({"min_p": 0.05}, "min_p 0.05"),
        ({"presence_penalty": 1.0}, "presence_penalty 1.0"),
        ({"frequency_penalty": -0.5}, "frequency_penalty -0.5"),
        ({"repetition_penalty": 1.1}, "repetition_penalty 1.1"),
        ({"logit_bias": {"5": 2.0}}, "logit_bias {'5': 2.0}"),
        ({"regex": "[a-z]+"}, "regex [a-z]+"),
        ({"json_schema": "x" * 99}, f"json_schema {'x' * 60}…"),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"temperature": 1e-5}, "temperature 1e-05"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"temperature": "cold"}, "temperature cold"),
    ],
)  # fmt: skip
def test_what_shapes_the_distribution_masks_the_call(changes: dict[str, Any], reason: str) -> None:
    shaped = call(1, **changes)
    assert mask_reason(shaped) == reason
    data = convert(call(0), shaped, call(2))
    assert unpack_ids(data.input_ids).tolist() == [5, 6, 0, 1, 5, 6, 10, 11, 5, 6, 20, 21]
    assert [span.call for span in data.spans] == [0, 2]
    assert unpack_floats(data.behavior_logprobs).tolist() == [-0.5, -1.0, -2.5, -3.0]
    assert masked_calls((call(0), shaped, call(2)), 0.5, CONFIG) == [reason]
    assert convert(shaped_alone := replace(shaped, index=0, parent=None)) is None
    assert explain_difference(data, (call(0), shaped, call(2)), CONFIG) is None
    assert "no token to train" in str(explain_difference(data, (shaped_alone,), CONFIG))


def test_logprobs_of_the_sampled_distribution_are_trained() -> None:
    shaped = replace(call(0, top_p=0.9, temperature=0.7), logprobs_of="sampled")
    data = convert(shaped)
    assert [span.temperature for span in data.spans] == [0.7]
    assert mask_reason(replace(shaped, logprobs_of="other")) == "top_p 0.9"
    assert mask_reason(replace(call(0), logprobs_of="other")) == "logprobs of several distributions"
    greedy = replace(call(0, temperature=0.0), logprobs_of="sampled")
    assert mask_reason(greedy) == "temperature 0.0"
    assert call_temperature(greedy) is None


def test_a_truncated_call_brings_the_ids_that_its_tokens_were_sampled_from() -> None:
    mask = SamplingMask.of([[10, 3], [11]])
    calls = (
        call(0), replace(call(1, top_p=0.9), logprobs_of="truncated", sampling_mask=mask.pack()), call(2)
    )  # fmt: skip
    data = convert(*calls)
    found = SamplingMask.unpack(data.sampling_mask, data.trainable_tokens)
    assert found.counts.tolist() == [0, 0, 2, 1, 0, 0]
    assert explain_difference(data, calls, CONFIG) is None
    assert "sampling_mask" in str(explain_difference(replace(data, sampling_mask=b""), calls, CONFIG))
    assert convert(*calls, supervised=True).sampling_mask == b""  # type: ignore[union-attr]
    with pytest.raises(StoreError, match="not one of 2 tokens"):
        convert(replace(calls[1], index=0, parent=None, sampling_mask=mask.select(slice(1)).pack()))


def test_supervised_data_take_every_call_at_temperature_1() -> None:
    data = convert(call(0, temperature=0.0), call(1, top_p=0.9, temperature=0.6), supervised=True)
    assert [(span.call, span.temperature) for span in data.spans] == [(0, 1.0), (1, 1.0)]


def test_a_trajectory_without_a_trainable_call_is_abandoned_with_the_parameter() -> None:
    records = [record(0, score=1.0), record(1, score=0.0)]
    calls = {
        records[0].id: [call(0, temperature=0.5), call(1, presence_penalty=0.5)],
        records[1].id: [call(index, traj=1, presence_penalty=0.5) for index in (0, 1)],
    }
    outcome = GroupRules(config=CONFIG, seed=0).decide(StoredGroup(task=TASK, records=records, calls=calls))
    assert [item.id for item in outcome.data] == [records[0].id]
    assert [item.status for item in outcome.records] == [RecordStatus.READY, RecordStatus.ABANDONED]
    assert outcome.records[1].abandoned_because == (
        "no model call to train: 2 sampled with presence_penalty 0.5, which the engine's logprobs leave out"
    )
    assert outcome.summary["masked_calls"] == [{"because": "presence_penalty 0.5", "calls": 3}]
    assert outcome.summary["trained"] == 1
