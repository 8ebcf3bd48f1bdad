"""Test the credit of rewards per model call: exact numbers from the group to the tokens of the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_documents import made_call, made_record, made_task, trained_group
from training_data import token_advantages

from agentrl.config.schema import GroupConfig
from agentrl.data.finalize_group import GroupRules, explain_difference, group_problem
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.record import Record
from agentrl.documents.status import CallStatus, RecordStatus
from agentrl.scoring.groups import turn_advantages
from agentrl.store.groups import GroupOutcome, StoredGroup

TASK = made_task()
OUTPUT = {0: [10, 11, 12], 1: [20], 2: [30, 31]}
"""Generated tokens of each model call."""


def record(place: int, score: float, rewards: list[float] | None, turns: int | None = None) -> Record:
    details: dict[str, Any] = {"scorer": "own"} | ({} if rewards is None else {"turn_rewards": rewards})
    turns = len(rewards or ()) if turns is None else turns
    return made_record(TASK, place, score, score_details=details, turns=turns)


def call(of: Record, index: int, faulty: int | None = None) -> DispatchedSamplingTask:
    status = CallStatus.FORMAT_ERROR if index == faulty else CallStatus.COMPLETED
    return made_call(of.id, index, parent=index - 1 if index else None, output=OUTPUT[index], status=status)


def calls_of(records: list[Record], faulty: int | None = None) -> dict[str, list[DispatchedSamplingTask]]:
    return {item.id: [call(item, index, faulty) for index in range(item.turns)] for item in records}


def decide(records: list[Record], faulty: int | None = None, **flags: Any) -> GroupOutcome:
    group = StoredGroup(task=TASK, records=records, calls=calls_of(records, faulty))
    return GroupRules(config=GroupConfig(**flags), seed=7).decide(group)


def test_a_reward_is_credited_to_the_tokens_of_its_call_only() -> None:
    first, second = record(0, 1.0, [0.5, 0.0, 1.0]), record(1, 0.0, [0.5, 0.25, -1.0])
    with_rewards = decide([first, second])
    plain = decide([record(0, 1.0, None, 3), record(1, 0.0, None, 3)])
    assert token_advantages(plain.data[0]) == dict.fromkeys([10, 11, 12, 20, 30, 31], 1.0)
    own = {10: 1.0, 11: 1.0, 12: 1.0, 20: 1.0 + (0.0 - 0.25), 30: 1.0 + 2.0, 31: 1.0 + 2.0}
    assert token_advantages(with_rewards.data[0]) == own
    assert token_advantages(with_rewards.data[1]) == {token: -value for token, value in own.items()}
    assert [item.turn_advantages for item in with_rewards.records] == [(0, -0.25, 2), (0, 0.25, -2)]
    assert [item.advantage for item in with_rewards.records] == [1.0, -1.0]


def test_a_call_that_others_do_not_have_is_compared_with_0() -> None:
    outcome = decide([record(0, 1.0, [0.0, 0.0, 0.9]), record(1, 0.0, [0.0]), record(2, 0.0, [0.0])])
    assert outcome.records[0].turn_advantages == pytest.approx((0, 0, 0.9))
    assert outcome.records[1].turn_advantages == (0,)
    no_rewards = decide([record(0, 1.0, [0.0, 0.6]), record(1, 0.0, None, 3), record(2, 0.0, [0.0, 0.0])])
    assert no_rewards.records[1].turn_advantages == pytest.approx((0, -0.3, 0))


def test_equal_scores_with_different_turn_rewards_are_trained() -> None:
    outcome = decide([record(0, 1.0, [0.0, 1.0]), record(1, 1.0, [0.0, 0.0])])
    assert [item.status for item in outcome.records] == [RecordStatus.READY] * 2
    assert token_advantages(outcome.data[0]) == {20: 1.0}  # the first call has the advantage 0
    agreed = decide([record(0, 1.0, [0.0, 1.0]), record(1, 1.0, [0.0, 1.0])])
    assert {item.abandoned_because for item in agreed.records} == {"no spread in the group's scores"}


def test_a_faulty_call_never_gains_by_its_reward() -> None:
    records = [record(0, 1.0, [5.0, 0.0]), record(1, 0.0, [0.0, 0.0])]
    outcome = decide(records, faulty=0, drop_zero_advantage=False)
    assert token_advantages(outcome.data[0]) == {10: 0.0, 11: 0.0, 12: 0.0, 20: 1.0}
    assert token_advantages(outcome.data[1])[10] == -6.0


def test_scaling_and_estimators_apply_to_turn_rewards_too() -> None:
    records = [record(0, 1.0, [1.0]), record(1, 0.0, [0.0])]
    assert decide(records, adv_scaling=2.0).records[0].turn_advantages == (2.0,)
    std = 0.5**0.5
    assert decide(records, advantage="grpo").records[0].turn_advantages == pytest.approx((0.5 / std,), 1e-5)
    assert decide(records, advantage="dr_grpo").records[0].turn_advantages == (0.5,)
    alone = decide([record(0, 1.0, [0.25])], advantage="reward", min_score_spread=0.0)
    assert (alone.records[0].advantage, alone.records[0].turn_advantages) == (1.0, (0.25,))


@given(
    st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=6), min_size=2, max_size=6),
    st.sampled_from(["leave_one_out", "dr_grpo"]),
)
def test_turn_advantages_sum_to_zero_over_the_group_at_every_place(
    rewards: list[list[float]], name: str
) -> None:
    records = [record(place, 0.0, item) for place, item in enumerate(rewards)]
    longest = max(map(len, rewards))
    padded = [replace(item, turns=longest) for item in records]
    columns = np.array([turn_advantages(padded, GroupConfig(advantage=name))[item.id] for item in padded])
    assert columns.shape == (len(records), longest)
    np.testing.assert_allclose(columns.sum(axis=0), 0, atol=1e-6)


def test_the_trainer_verifies_turn_advantages() -> None:
    records = [record(0, 1.0, [0.5, 0.0]), record(1, 0.0, [0.0, 0.25])]
    outcome = decide(records)
    calls = calls_of(records)
    group = trained_group(TASK, records, calls, outcome)
    assert group_problem(group, outcome.data) is None
    for data in outcome.data:
        assert explain_difference(data, calls[data.id], GroupConfig()) is None
    forged = replace(outcome.data[0], turn_advantages=(9.0, 9.0))
    assert "turn_advantages" in str(group_problem(group, [forged]))
    assert "spans" in str(explain_difference(forged, calls[forged.id], GroupConfig()))
    own = {**outcome.summary["rules"], "advantage": "m:f"}
    settled = tuple(
        replace(item, advantage=done.advantage, turn_advantages=done.turn_advantages)
        for item, done in zip(records, outcome.records, strict=True)
    )
    task = replace(group.task, group={**outcome.summary, "rules": own})
    by_own = replace(group, task=task, records=settled)
    assert group_problem(by_own, outcome.data) is None
