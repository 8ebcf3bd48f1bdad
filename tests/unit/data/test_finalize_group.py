"""Test that the stored rules of a group reproduce its decision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentrl.config.schema import GroupConfig
from agentrl.data.finalize_group import GroupRules
from agentrl.documents.model_call import DispatchedSamplingTask, VersionSpan, pack_floats, pack_ids
from agentrl.documents.record import Record
from agentrl.documents.status import CallStatus, RecordStatus
from agentrl.documents.task import Task
from agentrl.errors import ConfigError
from agentrl.scoring.groups import ScoredGroup, group_filter
from agentrl.store.groups import GroupOutcome, StoredGroup

TASK = Task(id="train/0/a", task_id="a", split="train", epoch=0, order=0, query="q")


def record(place: int, score: float) -> Record:
    return Record(
        id=f"{TASK.id}/{place}/1", task=TASK.id, traj_id=place, attempt=1, split="train", epoch=0, query="q",
        score=score, turns=1,
    )  # fmt: skip


def call(record: Record) -> DispatchedSamplingTask:
    return DispatchedSamplingTask(
        id=f"{record.id}/0", record=record.id, index=0, parent=None, status=CallStatus.COMPLETED,
        messages=(), response={"content": "", "tool_calls": []}, finish_reason="stop",
        versions=(VersionSpan(version=0, start=0, end=2),), prompt_tokens=1, generated_tokens=2, engine="e",
        generate_seconds=0.1, context_ids=pack_ids([1]), output_ids=pack_ids([2, 3]),
        logprobs=pack_floats([-0.5, -0.5]),
    )  # fmt: skip


def decide(
    *scores: float, split: str = "train", rules: GroupRules | None = None, **flags: Any
) -> GroupOutcome:
    records = [record(place, score) for place, score in enumerate(scores)]
    calls = {item.id: [call(item)] for item in records}
    rules = rules or GroupRules(config=GroupConfig(**flags), seed=7)
    return rules.decide(StoredGroup(task=replace(TASK, split=split), records=records, calls=calls))


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
    assert [item.status for item in outcome.records] == [RecordStatus.ABANDONED] * 3 + [
        RecordStatus.READY
    ] * 2
    assert {item.because for item in outcome.records[:3]} == {
        "its advantage is 0, and drop_zero_advantage leaves it out"
    }
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
    calls = {item.id: [call(item)] for item in records}
    again = GroupRules.of_group(summary).decide(StoredGroup(task=TASK, records=records, calls=calls))
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
