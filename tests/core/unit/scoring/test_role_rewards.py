"""Test the credit of rewards per role: exact numbers from the group to the tokens of the batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from made_documents import made_call, made_record, made_task, trained_group
from training_data import token_advantages

from agentrl.config.schema import GroupConfig
from agentrl.data.finalize_group import GroupRules, explain_difference, group_problem
from agentrl.documents.model_call import DispatchedSamplingTask, FixedModelCall
from agentrl.documents.record import Record
from agentrl.documents.status import RecordStatus
from agentrl.errors import ScorerError
from agentrl.scoring.groups import checked_role_rewards
from agentrl.store.groups import GroupOutcome, StoredGroup

TASK = made_task()
ROLES = ("solver", "critic", "solver")
OUTPUT = {0: [10, 11], 1: [20], 2: [30, 31]}
"""Generated tokens of each model call: the solver's, the critic's, the solver's again."""


def record(place: int, score: float, rewards: dict[str, float], turns: list[float] | None = None) -> Record:
    details: dict[str, Any] = {"scorer": "agent"} | ({} if turns is None else {"turn_rewards": turns})
    if rewards:
        details |= {"role_rewards": rewards, "call_roles": list(ROLES)}
    return made_record(TASK, place, score, score_details=details, turns=len(ROLES))


PAIR = [record(0, 1.0, {"solver": 1.0, "critic": 0.2}), record(1, 0.0, {"solver": 0.0, "critic": 0.8})]


def call(of: Record, index: int, fixed: bool = False) -> DispatchedSamplingTask:
    parts: dict[str, Any] = {"output": OUTPUT[index]}
    if fixed:
        judge = FixedModelCall(model="judge", base_url="http://x/v1")
        parts = {"context": (), "output": (), "fixed": judge}
    parent = 0 if index == 2 else None
    return made_call(of.id, index, parent=parent, role=ROLES[index], opens_branch=index < 2, **parts)


def calls_of(records: list[Record], fixed: bool = False) -> dict[str, list[DispatchedSamplingTask]]:
    return {
        item.id: [call(item, index, fixed and ROLES[index] == "critic") for index in range(len(ROLES))]
        for item in records
    }


def decide(records: list[Record], fixed: bool = False, **flags: Any) -> GroupOutcome:
    rules = GroupRules(config=GroupConfig(**flags), seed=7)
    return rules.decide(StoredGroup(task=TASK, records=records, calls=calls_of(records, fixed)))


def test_each_role_is_compared_with_itself_over_the_group() -> None:
    group = [*PAIR, record(2, 0.0, {"solver": 0.5, "critic": 0.2})]
    first, second, third = map(token_advantages, decide(group).data)
    # solver: 1 − (0 + 0.5)/2, 0 − (1 + 0.5)/2, 0.5 − (1 + 0)/2; critic: 0.2 − (0.8 + 0.2)/2, 0.8 − 0.2, …
    assert first == pytest.approx({10: 0.75, 11: 0.75, 20: -0.3, 30: 0.75, 31: 0.75})
    assert second == pytest.approx({10: -0.75, 11: -0.75, 20: 0.6, 30: -0.75, 31: -0.75})
    assert third == pytest.approx({20: -0.3}), "the solver's advantage is 0, and drop_zero_advantage is on"


def test_grpo_divides_by_the_deviation_of_the_role() -> None:
    first, second = map(token_advantages, decide(PAIR, advantage="grpo", adv_scaling=2.0).data)
    unit = 2 * 0.5 / 0.5**0.5  # both roles: half the difference over the standard deviation, scaled
    assert first == pytest.approx({10: unit, 11: unit, 20: -unit, 30: unit, 31: unit}, rel=1e-4)
    assert second == pytest.approx({token: -value for token, value in first.items()}, rel=1e-4)


def test_a_role_without_a_reward_has_the_advantage_of_the_score_and_turn_rewards_are_added() -> None:
    group = [record(0, 1.0, {"critic": 0.0}, [0.0, 0.0, 0.5]), record(1, 0.0, {"critic": 1.0}, [0.0] * 3)]
    first, second = map(token_advantages, decide(group).data)
    assert first == {10: 1.0, 11: 1.0, 20: -1.0, 30: 1.5, 31: 1.5}
    assert second == {10: -1.0, 11: -1.0, 20: 1.0, 30: -1.5, 31: -1.5}


def test_a_role_of_one_trajectory_only_is_compared_with_none() -> None:
    group = [record(0, 1.0, {"critic": 1.0}), record(1, 0.0, {})]
    first, second = map(token_advantages, decide(group).data)
    assert first == {10: 1.0, 11: 1.0, 30: 1.0, 31: 1.0}, "the critic's advantage is 0"
    assert second == {10: -1.0, 11: -1.0, 20: -1.0, 30: -1.0, 31: -1.0}


def test_equal_scores_with_different_role_rewards_are_trained() -> None:
    apart = decide([record(0, 0.5, {"solver": 1.0}), record(1, 0.5, {"solver": 0.0})])
    assert [item.status for item in apart.records] == [RecordStatus.READY] * 2
    assert token_advantages(apart.data[0]) == {10: 1.0, 11: 1.0, 30: 1.0, 31: 1.0}
    agreed = decide([record(0, 0.5, {"solver": 1.0}), record(1, 0.5, {"solver": 1.0})])
    assert {item.abandoned_because for item in agreed.records} == {"no spread in the group's scores"}


def test_the_tokens_of_a_fixed_model_are_never_trained() -> None:
    for data in decide(PAIR, fixed=True).data:
        assert set(token_advantages(data)) == {10, 11, 30, 31}
        assert {span.call for span in data.spans} == {0, 2}


def test_the_trainer_verifies_the_advantages_of_roles() -> None:
    outcome = decide(PAIR, fixed=True)
    stored = trained_group(TASK, PAIR, calls_of(PAIR, fixed=True), outcome)
    assert group_problem(stored, outcome.data) is None
    first = outcome.data[0]
    assert explain_difference(first, stored.calls[first.id], GroupConfig()) is None
    forged = dataclasses.replace(first, turn_advantages=(5.0, 0.0, 0.0))
    assert "turn_advantages" in str(group_problem(stored, [forged]))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"judge": 1.0}, "rewards the role 'judge', which made no call.*\n.*critic, solver"),
        ({"solver": float("nan")}, "gives the role solver the reward nan"),
        ({"solver": "good"}, "gives the role solver the reward 'good'"),
        ([1.0], "returned the role rewards"),
    ],
)
def test_a_malformed_reward_is_named(given: Any, problem: str) -> None:
    with pytest.raises(ScorerError, match=problem):
        checked_role_rewards("mine", given, ROLES)
