"""Test what a group becomes: its decision, the training data of its Records, and their comparison."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from model_calls import TASK, model_call, record

from agentrl.config.schema import GroupConfig
from agentrl.data.finalize_group import (
    GroupRules,
    call_temperature,
    describe_share,
    explain_difference,
    mask_reason,
    masked_calls,
    to_training_data,
    why_untrained,
)
from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    FixedModelCall,
    SamplingMask,
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
)
from agentrl.documents.record import Record
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import CallStatus, RecordStatus
from agentrl.documents.training import DBRecordData, Node
from agentrl.errors import ConfigError, StoreError
from agentrl.scoring.groups import ScoredGroup, group_filter
from agentrl.store.groups import GroupOutcome, StoredGroup


def stored(records: list[Record], split: str = "train") -> StoredGroup:
    """Trajectories of one call each."""
    calls = {item.id: [model_call(item.id, 0, None, [1], [2, 3])] for item in records}
    return StoredGroup(task=replace(TASK, split=split), records=records, calls=calls)


def decide(
    *scores: float, split: str = "train", rules: GroupRules | None = None, **flags: Any
) -> GroupOutcome:
    rules = rules or GroupRules(config=GroupConfig(**flags), seed=7)
    return rules.decide(stored([record(place, score) for place, score in enumerate(scores)], split))


def test_rules_are_stored_with_the_threshold_and_read_back() -> None:
    rules = GroupRules(config=GroupConfig(balance_sample=True, right_threshold=-0.5), seed=7)
    stored = rules.to_store()
    assert stored["right_threshold"] == -0.5
    assert GroupRules.stored(stored) == rules
    scores = (0.0, 0.0, 0.0, 0.0, -1.0)
    first = decide(*scores, rules=rules)
    assert first.summary["rules"] == stored
    assert first.summary["pass_rate"] == 0.8
    assert len(first.data) == 1 + 3
    again = decide(*scores, rules=GroupRules.stored(first.summary["rules"]))
    assert (again.records, again.summary) == (first.records, first.summary)


def test_an_evaluation_keeps_its_threshold() -> None:
    summary = decide(0.6, 0.8, split="eval-v000001", right_threshold=0.7).summary
    assert (summary["pass_rate"], summary["right_threshold"]) == (0.5, 0.7)
    assert "rules" not in summary


def test_a_trajectory_at_its_baseline_is_abandoned_with_the_reason() -> None:
    """The mean of the others is 0.3 up to rounding: leave_one_out gives 5e-17."""
    scores = (0.1 + 0.2, 0.3, 0.3, 0.5, 0.1)
    outcome = decide(*scores)
    abandoned, ready = RecordStatus.ABANDONED, RecordStatus.READY
    assert [item.status for item in outcome.records] == [abandoned] * 3 + [ready] * 2
    because = "its advantage is 0, and drop_zero_advantage leaves it out"
    assert {item.because for item in outcome.records[:3]} == {because}
    assert outcome.summary["trained"] == len(outcome.data) == 2
    kept = decide(*scores, drop_zero_advantage=False)
    assert [item.advantage for item in kept.data] == pytest.approx([0.0, 0.0, 0.0, 0.25, -0.25])
    assert [span.advantage for item in kept.data[:3] for span in item.spans] == [0.0] * 3


def test_a_group_at_its_baseline_trains_nothing() -> None:
    outcome = decide(*(0.1 + 0.2 if place % 2 else 0.3 for place in range(10)), min_score_spread=0.0)
    assert outcome.data == ()
    assert outcome.summary["outcome"] == "abandoned"


ASKED: list[str] = []


@group_filter("once")
def once(group: ScoredGroup) -> dict[str, str]:
    """Drops the first trajectory the first time only."""
    ASKED.append(group.task)
    return {group.trajectories[0].id: "it is the first"} if len(ASKED) == 1 else {}


def test_a_filters_answer_is_kept_with_the_group() -> None:
    outcome = decide(0.0, 0.0, 1.0, group_filter="once")
    assert outcome.summary["filtered"] == [
        {"record": "train/0/a/0/1", "because": "group filter once: it is the first"}
    ]
    assert [item.advantage for item in outcome.records] == [None, -1.0, 1.0]
    assert outcome.records[0].because == "group filter once: it is the first"
    again = decide(0.0, 0.0, 1.0, rules=GroupRules.of_group(outcome.summary))
    assert (again.records, again.summary) == (outcome.records, outcome.summary)
    assert len(ASKED) == 1
    anew = decide(0.0, 0.0, 1.0, rules=GroupRules.stored(outcome.summary["rules"]))
    assert len(anew.data) == 3
    assert len(ASKED) == 2


def test_the_advantages_of_an_estimator_that_is_not_built_in_are_those_that_records_hold() -> None:
    rules = GroupRules(config=GroupConfig(advantage="nowhere:at_all"), seed=7)
    summary = {**decide(0.0, 1.0).summary, "rules": rules.to_store()}
    records = [
        replace(record(0, 0.0), advantage=-3.0),
        replace(record(1, 1.0), abandoned_because="its advantage is 0"),
    ]
    again = GroupRules.of_group(summary).decide(stored(records))
    assert [item.advantage for item in again.data] == [-3.0]
    assert [item.because for item in again.records] == [None, "its advantage is 0"]
    with pytest.raises(ConfigError, match="cannot be imported"):
        decide(0.0, 1.0, rules=rules)


def test_a_group_decided_elsewhere_imports_nothing() -> None:
    rules = GroupRules(config=GroupConfig(group_filter="nowhere:at_all"), seed=7)
    summary = {**decide(0.0, 1.0).summary, "rules": rules.to_store()}
    assert len(decide(0.0, 1.0, rules=GroupRules.of_group(summary)).data) == 2
    with pytest.raises(ConfigError, match="cannot be imported"):
        decide(0.0, 1.0, rules=rules)
    assert decide(0.5, split="eval-v000001", rules=rules).data == ()


RECORD = record(turns=2)
call = partial(model_call, RECORD.id)
"""A call by its index, its parent's, the ids of its context and of its output."""


def convert(*calls: DispatchedSamplingTask, advantage: float = 0.5, **config: object) -> DBRecordData:
    data = to_training_data(TASK, RECORD, calls, advantage, GroupConfig(**config))  # type: ignore[arg-type]
    assert data is not None
    return data


def trained(data: DBRecordData) -> list[list[int]]:
    ids = unpack_ids(data.input_ids)
    return [ids[span.start : span.end].tolist() for span in data.spans]


def test_turns_that_extend_one_another_are_one_node() -> None:
    data = convert(call(0, None, [1, 2], [10, 11]), call(1, 0, [3], [12]), call(2, 1, [4, 5], [13, 14]))
    assert unpack_ids(data.input_ids).tolist() == [1, 2, 10, 11, 3, 12, 4, 5, 13, 14]
    assert data.nodes == (Node(start=0, end=10),)
    assert trained(data) == [[10, 11], [12], [13, 14]]
    assert [span.call for span in data.spans] == [0, 1, 2]
    assert (data.tokens, data.trainable_tokens, data.turns) == (10, 5, 2)


def test_behavior_logprobs_follow_the_spans() -> None:
    data = convert(call(0, None, [1], [10, 11]), call(1, 0, [3], [12]))
    np.testing.assert_allclose(unpack_floats(data.behavior_logprobs), [-0.10, -0.11, -0.12], rtol=1e-6)


def test_a_context_reset_starts_a_new_root() -> None:
    data = convert(call(0, None, [1], [10]), call(1, None, [7, 8], [11]), call(2, 1, [9], [12]))
    assert data.nodes == (Node(start=0, end=2), Node(start=2, end=7))
    assert trained(data) == [[10], [11], [12]]


def test_several_continuations_of_one_call_share_its_node() -> None:
    data = convert(
        call(0, None, [1], [10]), call(1, 0, [2], [11]), call(2, 0, [3], [12]), call(3, 1, [4], [13])
    )
    assert data.nodes == (
        Node(start=0, end=2),
        Node(start=2, end=6, parent=0),
        Node(start=6, end=8, parent=0),
    )
    assert unpack_ids(data.input_ids).tolist() == [1, 10, 2, 11, 4, 13, 3, 12]
    assert trained(data) == [[10], [11], [13], [12]]
    np.testing.assert_allclose(unpack_floats(data.behavior_logprobs), [-0.10, -0.11, -0.13, -0.12], rtol=1e-6)


def test_a_span_per_policy_version_and_neighboring_spans_of_one_version_merge() -> None:
    data = convert(call(0, None, [1], [10, 11, 12], versions=((3, 0, 1), (3, 1, 1), (4, 1, 3))))
    assert [(s.start, s.end, s.version) for s in data.spans] == [(1, 2, 3), (2, 4, 4)]
    assert (data.min_version, data.max_version) == (3, 4)
    data = convert(call(0, None, [1], [10, 11], versions=((3, 0, 1), (3, 1, 2))))
    assert [(s.start, s.end, s.version) for s in data.spans] == [(1, 3, 3)]


@pytest.mark.parametrize("status", [CallStatus.FORMAT_ERROR, CallStatus.REPEAT_ERROR])
def test_a_faulty_call_earns_nothing_and_loses_what_its_trajectory_loses(status: CallStatus) -> None:
    calls = (call(0, None, [1], [10], status=status), call(1, 0, [2], [11]))
    right = convert(*calls, advantage=0.5)
    assert [span.advantage for span in right.spans] == [0.0, 0.5]
    wrong = convert(*calls, advantage=-0.5)
    assert [span.advantage for span in wrong.spans] == [-0.5, -0.5]
    assert right.faulty_calls == wrong.faulty_calls == (0,)


@pytest.mark.parametrize("drop", [True, False])
def test_a_faulty_call_changes_no_weight_of_its_neighbors(drop: bool) -> None:
    """Ten good tokens and thirty of a call that may be malformed: each weighs 1/40 of the trajectory."""
    good, other = call(0, None, [1], [10] * 10), call(1, 0, [2], [11] * 30)
    counted = [
        convert(good, replace(other, status=status), drop_zero_advantage=drop).trainable_tokens
        for status in (CallStatus.COMPLETED, CallStatus.FORMAT_ERROR)
    ]
    assert counted == [40, 40]


def test_small_advantages_are_dropped_with_faulty_calls_or_without() -> None:
    faulty = call(1, 0, [2], [11], status=CallStatus.FORMAT_ERROR)
    data = convert(call(0, None, [1], [10]), faulty, advantage=0.5, minimal_advantage=0.4)
    assert [span.advantage for span in data.spans] == [0.5, 0.0]


def test_zero_advantages_stay_where_they_are_not_dropped() -> None:
    calls = (call(0, None, [1], [10], status=CallStatus.FORMAT_ERROR), call(1, 0, [2], [11]))
    data = convert(*calls, advantage=0.5, drop_zero_advantage=False)
    assert [span.advantage for span in data.spans] == [0.0, 0.5]


def test_a_failed_call_is_context_at_most() -> None:
    data = convert(call(0, None, [1], [10], status=CallStatus.FAILED), call(1, 0, [2], [11]))
    assert unpack_ids(data.input_ids).tolist() == [1, 10, 2, 11]
    assert trained(data) == [[11]]


def test_calls_behind_the_last_trained_one_are_left_out() -> None:
    data = convert(call(0, None, [1], [10]), call(1, 0, [2], [11], status=CallStatus.FAILED))
    assert unpack_ids(data.input_ids).tolist() == [1, 10]


def test_a_tool_failure_is_trained() -> None:
    assert trained(convert(call(0, None, [1], [10], status=CallStatus.TOOL_FAILED))) == [[10]]


@pytest.mark.parametrize(
    ("advantage", "config"),
    [(0.0, {}), (0.05, {"minimal_advantage": 0.1}), (-0.05, {"minimal_advantage": 0.1})],
)
def test_nothing_trainable_is_none(advantage: float, config: dict[str, float]) -> None:
    group = GroupConfig(**config)  # type: ignore[arg-type]
    assert to_training_data(TASK, RECORD, [call(0, None, [1], [10])], advantage, group) is None


def test_a_trajectory_without_calls_or_output_is_none() -> None:
    assert to_training_data(TASK, RECORD, [], 1.0, GroupConfig()) is None
    assert to_training_data(TASK, RECORD, [call(0, None, [1], [])], 1.0, GroupConfig()) is None


def test_the_first_token_of_a_root_has_nothing_to_be_predicted_from() -> None:
    assert trained(convert(call(0, None, [], [10, 11]))) == [[11]]


def test_logprobs_that_are_not_finite_are_not_trained(caplog: pytest.LogCaptureFixture) -> None:
    broken = replace(call(0, None, [1], [10]), logprobs=pack_floats([float("nan")]))
    assert trained(convert(broken, call(1, 0, [2], [11]))) == [[11]]
    assert "not finite" in caplog.text


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (call(1, 7, [2], [11]), "continues"),
        (replace(call(1, 0, [2], [11]), logprobs=pack_floats([-1.0, -1.0])), "2 logprobs"),
        (call(1, 0, [2], [11, 12], versions=((0, 0, 1),)), "do not cover"),
        (call(1, 0, [2], [11, 12], versions=((0, 1, 2),)), "do not cover"),
    ],
)
def test_calls_that_contradict_one_another_are_refused(broken: DispatchedSamplingTask, says: str) -> None:
    with pytest.raises(StoreError, match=says):
        to_training_data(TASK, RECORD, [call(0, None, [1], [10]), broken], 1.0, GroupConfig())


def test_a_record_without_a_score_is_refused() -> None:
    with pytest.raises(StoreError, match="no score"):
        to_training_data(TASK, replace(RECORD, score=None), [call(0, None, [1], [10])], 1.0, GroupConfig())


def test_a_long_chain_is_no_recursion() -> None:
    calls = [call(0, None, [1], [10]), *(call(i, i - 1, [2], [11]) for i in range(1, 3000))]
    data = convert(*calls)
    assert data.nodes == (Node(start=0, end=6000),)
    assert data.trainable_tokens == 3000


CONFIG = GroupConfig()


def turn(index: int, *, traj: int = 0, **changes: Any) -> DispatchedSamplingTask:
    """One of three turns, with the parameters of a request and ``changes``."""
    return model_call(
        record(traj).id, index, index - 1 if index else None, [5, 6], [10 * index, 10 * index + 1],
        sampling_params=SamplingParams(max_new_tokens=9).to_request() | {"sampling_seed": 5} | changes,
        logprobs=pack_floats([-0.5 - index, -1.0 - index]),
    )  # fmt: skip


def turned(*calls: DispatchedSamplingTask, advantage: float = 0.5, **options: Any) -> DBRecordData | None:
    return to_training_data(TASK, record(), calls, advantage, CONFIG, **options)


def test_spans_have_the_temperature_of_their_call() -> None:
    calls = (turn(0, temperature=0.5), turn(1), replace(turn(2), sampling_params={}))
    data = turned(*calls)
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
    shaped = turn(1, **changes)
    assert mask_reason(shaped) == reason
    data = turned(turn(0), shaped, turn(2))
    assert unpack_ids(data.input_ids).tolist() == [5, 6, 0, 1, 5, 6, 10, 11, 5, 6, 20, 21]
    assert [span.call for span in data.spans] == [0, 2]
    assert unpack_floats(data.behavior_logprobs).tolist() == [-0.5, -1.0, -2.5, -3.0]
    assert masked_calls((turn(0), shaped, turn(2)), 0.5, CONFIG) == [reason]
    assert turned(shaped_alone := replace(shaped, index=0, parent=None)) is None
    assert explain_difference(data, (turn(0), shaped, turn(2)), CONFIG) is None
    assert "no token to train" in str(explain_difference(data, (shaped_alone,), CONFIG))


def test_logprobs_of_the_sampled_distribution_are_trained() -> None:
    shaped = replace(turn(0, top_p=0.9, temperature=0.7), logprobs_of="sampled")
    data = turned(shaped)
    assert [span.temperature for span in data.spans] == [0.7]
    assert mask_reason(replace(shaped, logprobs_of="other")) == "top_p 0.9"
    assert mask_reason(replace(turn(0), logprobs_of="other")) == "logprobs of several distributions"
    greedy = replace(turn(0, temperature=0.0), logprobs_of="sampled")
    assert mask_reason(greedy) == "temperature 0.0"
    assert call_temperature(greedy) is None


def test_a_truncated_call_brings_the_ids_that_its_tokens_were_sampled_from() -> None:
    mask = SamplingMask.of([[10, 3], [11]])
    calls = (
        turn(0), replace(turn(1, top_p=0.9), logprobs_of="truncated", sampling_mask=mask.pack()), turn(2)
    )  # fmt: skip
    data = turned(*calls)
    found = SamplingMask.unpack(data.sampling_mask, data.trainable_tokens)
    assert found.counts.tolist() == [0, 0, 2, 1, 0, 0]
    assert explain_difference(data, calls, CONFIG) is None
    assert "sampling_mask" in str(explain_difference(replace(data, sampling_mask=b""), calls, CONFIG))
    assert turned(*calls, supervised=True).sampling_mask == b""  # type: ignore[union-attr]
    with pytest.raises(StoreError, match="not one of 2 tokens"):
        turned(replace(calls[1], index=0, parent=None, sampling_mask=mask.select(slice(1)).pack()))


def test_supervised_data_take_every_call_at_temperature_1() -> None:
    data = turned(turn(0, temperature=0.0), turn(1, top_p=0.9, temperature=0.6), supervised=True)
    assert [(span.call, span.temperature) for span in data.spans] == [(0, 1.0), (1, 1.0)]


def test_a_trajectory_without_a_trainable_call_is_abandoned_with_the_parameter() -> None:
    records = [record(0, score=1.0), record(1, score=0.0)]
    calls = {
        records[0].id: [turn(0, temperature=0.5), turn(1, presence_penalty=0.5)],
        records[1].id: [turn(index, traj=1, presence_penalty=0.5) for index in (0, 1)],
    }
    outcome = GroupRules(config=CONFIG, seed=0).decide(StoredGroup(task=TASK, records=records, calls=calls))
    assert [item.id for item in outcome.data] == [records[0].id]
    assert [item.status for item in outcome.records] == [RecordStatus.READY, RecordStatus.ABANDONED]
    assert outcome.records[1].because == (
        "no model call to train: 2 sampled with presence_penalty 0.5, which the engine's logprobs leave out"
    )
    assert outcome.summary["masked_calls"] == [{"because": "presence_penalty 0.5", "calls": 3}]
    assert outcome.summary["trained"] == 1


def said(index: int, tokens: int, parent: int | None = None, **changes: Any) -> DispatchedSamplingTask:
    """A call of ``tokens`` tokens behind the call ``parent``, or at a root of its own."""
    messages = ({"role": "system", "content": "agent"},)
    return model_call("r", index, parent, generated_tokens=tokens, **{"messages": messages, **changes})


def test_an_agent_that_rewrites_its_history_is_told_of_the_rule_agent() -> None:
    title = said(3, 50, messages=({"role": "system", "content": "title"},))
    calls = [said(0, 100), said(1, 200, 0), said(2, 300), title]
    assert describe_share(calls, "main", [2, 3]) == (
        "46% of 650 sampled tokens can be trained; not: 350 left out by train rule main"
        " (train: agent would train 92%)"
    )
    assert describe_share(calls, "agent", [3]) == (
        "92% of 650 sampled tokens can be trained; not: 50 left out by train rule agent"
    )


def test_what_sampling_masks_and_what_another_model_answers_is_not_trained() -> None:
    fixed = FixedModelCall(model="judge", base_url="http://j")
    calls = [
        said(0, 10),
        said(1, 30, 0, sampling_params={"top_p": 0.9}),
        said(2, 5, 1, fixed=fixed),
    ]
    assert describe_share(calls, None, ()) == (
        "25% of 40 sampled tokens can be trained; not: 30 sampled with top_p 0.9"
    )
    assert why_untrained(calls[2], None, ()) == "answered by judge, not by the policy"
    assert describe_share(calls[:1], None, ()) == "100% of 10 sampled tokens can be trained"
    assert describe_share([], None, ()) == "0% of 0 sampled tokens can be trained"


CALLS = (
    model_call(RECORD.id, 0, None, [5, 6], [7, 8]),
    model_call(RECORD.id, 1, 0, [5, 6], [7, 9], versions=[(1, 0, 2)], status=CallStatus.FORMAT_ERROR),
)


def data(config: GroupConfig = CONFIG) -> DBRecordData:
    converted = to_training_data(TASK, RECORD, CALLS, 0.5, config, turn_advantages=(0.0, -0.5))
    assert converted is not None
    return converted


@pytest.mark.parametrize("config", [CONFIG, GroupConfig(drop_zero_advantage=False)])
def test_data_equal_their_calls_with_and_without_the_rules(config: GroupConfig) -> None:
    assert explain_difference(data(config), CALLS, config) is None
    assert explain_difference(data(config), CALLS, None) is None


def test_the_rules_say_which_calls_must_be_there() -> None:
    kept_zero = GroupConfig(drop_zero_advantage=False)
    assert "spans" in str(explain_difference(data(), CALLS, kept_zero))
    assert "spans" in str(explain_difference(data(kept_zero), CALLS, CONFIG))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input_ids", pack_ids([1])), ("behavior_logprobs", pack_floats([0.0, 0.0])), ("nodes", ()),
        ("tokens", 3), ("trainable_tokens", 9), ("max_version", 7), ("faulty_calls", (0,)),
    ],
)  # fmt: skip
def test_what_differs_is_named(name: str, value: Any) -> None:
    assert explain_difference(replace(data(), **{name: value}), CALLS, CONFIG).startswith(f"{name}: ")


def test_data_without_a_token_to_train_are_told() -> None:
    why = explain_difference(replace(data(), spans=()), CALLS, None)
    assert why == "its model calls have no token to train"


def test_calls_that_contradict_one_another_are_an_error() -> None:
    with pytest.raises(StoreError, match="continues"):
        explain_difference(data(), CALLS[1:], None)
