"""Test that the stored rules of a group reproduce its decision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from model_calls import TASK, model_call, record

from agentrl.config.schema import GroupConfig
from agentrl.data.finalize_group import GroupRules
from agentrl.documents.record import Record
from agentrl.documents.status import RecordStatus
from agentrl.errors import ConfigError
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
    assert {item.abandoned_because for item in outcome.records[:3]} == {because}
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
    assert outcome.records[0].abandoned_because == "group filter once: it is the first"
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
    assert [item.abandoned_because for item in again.records] == [None, "its advantage is 0"]
    with pytest.raises(ConfigError, match="cannot be imported"):
        decide(0.0, 1.0, rules=rules)


def test_a_group_decided_elsewhere_imports_nothing() -> None:
    rules = GroupRules(config=GroupConfig(group_filter="nowhere:at_all"), seed=7)
    summary = {**decide(0.0, 1.0).summary, "rules": rules.to_store()}
    assert len(decide(0.0, 1.0, rules=GroupRules.of_group(summary)).data) == 2
    with pytest.raises(ConfigError, match="cannot be imported"):
        decide(0.0, 1.0, rules=rules)
    assert decide(0.5, split="eval-v000001", rules=rules).data == ()
