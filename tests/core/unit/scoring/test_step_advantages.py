"""Step advantages and discounted turn rewards: exact numbers from the group to the tokens of the batch."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_documents import made_call, made_record, made_task, trained_group
from training_data import token_advantages

from agentrl.config.schema import GroupConfig
from agentrl.data.finalize_group import GroupRules, group_problem
from agentrl.documents.model_call import DispatchedSamplingTask, FixedModelCall
from agentrl.documents.record import Record
from agentrl.documents.status import RecordStatus
from agentrl.errors import ConfigError
from agentrl.scoring.groups import alone, turn_returns
from agentrl.store.groups import GroupOutcome, StoredGroup

TASK = made_task()
GIGPO: dict[str, Any] = {"step_advantage": "gigpo", "advantage": "dr_grpo", "turn_discount": 0.5}


class Path:
    """A trajectory: the states of its calls, its score, its turn rewards, and the roles of its calls."""

    def __init__(
        self, states: Sequence[str | None], score: float, rewards: Sequence[float] | None = None,
        roles: Sequence[str | None] | None = None, role_rewards: dict[str, float] | None = None,
        untrained: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.states, self.score, self.roles = states, score, roles or [None] * len(states)
        self.details: dict[str, Any] = {"scorer": "own"}
        if rewards is not None:
            self.details["turn_rewards"] = list(rewards)
        if role_rewards is not None:
            self.details |= {"role_rewards": role_rewards, "call_roles": list(self.roles)}
        self.untrained = untrained

    def record(self, place: int) -> Record:
        return made_record(
            TASK, place, self.score, score_details=self.details, turns=len(self.states),
            untrained_calls=self.untrained,
        )  # fmt: skip

    def calls(self, record: Record) -> list[DispatchedSamplingTask]:
        return [
            made_call(
                record.id, index, parent=index - 1 if index else None, output=[10 * (index + 1)],
                anchor=state, role=role,
            )
            for index, (state, role) in enumerate(zip(self.states, self.roles, strict=True))
        ]  # fmt: skip


def group_of(*paths: Path) -> StoredGroup:
    records = [path.record(place) for place, path in enumerate(paths)]
    calls = {record.id: path.calls(record) for record, path in zip(records, paths, strict=True)}
    return StoredGroup(task=TASK, records=records, calls=calls)


def decide(*paths: Path, **flags: Any) -> GroupOutcome:
    config = GroupConfig(**{"drop_zero_advantage": False, **flags})
    return GroupRules(config=config, seed=7).decide(group_of(*paths))


def totals(outcome: GroupOutcome) -> list[list[float]]:
    """Return the advantage of each call of each trajectory."""
    return [[(item.advantage or 0.0) + own for own in item.turn_advantages] for item in outcome.records]


FORKED = Path(["start", "door", "hall"], 1.0), Path(["start", "wall", "hall"], 0.0)


def test_the_returns_of_the_calls_in_one_state_are_compared() -> None:
    outcome = decide(*FORKED, **GIGPO)
    # The returns from start are 0.25 and 0, from hall 1 and 0; nobody else was at the door or the wall.
    assert totals(outcome) == [[0.5 + 0.125, 0.5, 0.5 + 0.5], [-0.5 - 0.125, -0.5, -0.5 - 0.5]]
    assert token_advantages(outcome.data[0]) == {10: 0.625, 20: 0.5, 30: 1.0}
    assert outcome.summary["shared_steps"] == pytest.approx(4 / 6)
    half = decide(*FORKED, **GIGPO, step_advantage_weight=2.0, adv_scaling=0.5)
    assert totals(half) == [[0.25 + 0.125, 0.25, 0.25 + 0.5], [-0.25 - 0.125, -0.25, -0.25 - 0.5]]


def test_a_trajectory_that_comes_back_to_a_state_is_compared_with_itself() -> None:
    outcome = decide(Path(["start", "wall", "start"], 1.0), Path(["start"], 0.0), **GIGPO)
    # The returns from start are 0.25, 1 and 0: to go to the wall was worse than what came later.
    mean = 1.25 / 3
    assert totals(outcome) == [
        pytest.approx([0.5 + 0.25 - mean, 0.5, 0.5 + 1 - mean]),
        pytest.approx([-0.5 - mean]),
    ]


def test_equal_scores_are_told_apart_by_their_length() -> None:
    short, long = Path(["start", "goal"], 1.0), Path(["start", "wall", "wall", "goal"], 1.0)
    outcome = decide(short, long, **GIGPO)
    assert [item.status for item in outcome.records] == [RecordStatus.READY] * 2
    assert totals(outcome) == [[0.1875, 0.0], [-0.1875, -0.125, 0.125, 0.0]]
    assert decide(short, long).data == ()  # without step advantages: no spread
    alike = decide(short, short, **GIGPO)
    assert {item.abandoned_because for item in alike.records} == {"no spread in the group's scores"}


def test_turn_rewards_are_a_part_of_both_levels() -> None:
    outcome = decide(Path(["s", "t"], 0.0, [0.5, 0.0]), Path(["s", "u"], 0.0, [0.0, 0.0]), **GIGPO)
    assert totals(outcome) == [[0.25 + 0.25, 0.25], [-0.5, -0.25]]


def test_the_reward_of_a_call_that_is_not_trained_comes_with_the_step_before() -> None:
    rewarded, other = (Path(["s", "t"], 0.0, rewards, untrained=(1,)) for rewards in ([0.0, 1.0], [0.0, 0.0]))
    assert totals(decide(rewarded, other, **GIGPO)) == [[0.5 + 0.25], [-0.5 - 0.25]]


def test_without_a_discount_each_call_has_its_own_reward() -> None:
    record = Path(["s"] * 3, 1.0, [0.0, 0.0, 1.0], untrained=(1,)).record(0)
    assert turn_returns(record, GroupConfig()) == [0.0, 0.0, 1.0]
    assert turn_returns(record, GroupConfig(turn_discount=0.5)) == [0.5, 0.0, 1.0]


def test_a_conversation_is_compared_with_nothing() -> None:
    for flags in (GIGPO, {"advantage": "grpo", "multi_objective_aggregation": "normalize_then_sum"}):
        assert alone(GroupConfig(**flags)).advantage == "reward"


def test_old_documents_have_no_states() -> None:
    old = Path([None, None], 1.0), Path([None, None], 0.0)
    assert totals(decide(*old, **GIGPO)) == [[0.5, 0.5], [-0.5, -0.5]]
    before = {"advantage": "grpo", "seed": 7}
    assert GroupRules.stored(before).config.step_advantage == "off"


def test_calls_that_are_not_trained_are_no_steps() -> None:
    aside = decide(
        Path(["start", "title", "goal"], 1.0, untrained=(1,)), Path(["start", "title"], 0.0), **GIGPO
    )
    # From start 0.5 and 0; nobody else trains what answers "title", and the title is no step in between.
    assert totals(aside)[0] == [0.75, 0.5, 0.5]
    group = group_of(*FORKED)
    judge = FixedModelCall(model="judge", base_url="http://x/v1")
    calls = {
        key: [replace(call, fixed=judge) if call.index == 2 else call for call in made]
        for key, made in group.calls.items()
    }
    outcome = GroupRules(config=GroupConfig(**GIGPO), seed=7).decide(replace(group, calls=calls))
    # The score is at the last call of the policy: from start 0.5 and 0.
    assert totals(outcome)[0] == [0.75, 0.5]


def test_a_role_with_a_reward_is_a_trajectory_of_its_own() -> None:
    roles = ("white", "black", "white", "black")
    won = Path(["a", "a", "b", "c"], 1.0, [0.0, 0.2, 0.0, 0.0], roles, {"white": 1.0, "black": -1.0})
    lost = Path(["a", "a", "d", "c"], 0.0, [0.0, 0.0, 0.0, 0.0], roles, {"white": -1.0, "black": 1.0})
    outcome = decide(won, lost, **GIGPO)
    # White: ±1 for the game; from a ±0.5. Black: -1 + 0.2 and 1; from a 0.2 - 0.5 and 0.5, from c ±1.
    white, black = 1.0, (-0.8 - 1.0) / 2
    assert totals(outcome)[0] == pytest.approx([white + 0.5, black - 0.4, white, black - 1.0])


def test_without_step_advantages_returns_at_one_position_are_compared() -> None:
    paths = Path([None] * 3, 0.0, [0.0, 0.0, 1.0]), Path([None] * 2, 0.0, [0.0, 0.5])
    assert totals(decide(*paths, advantage="dr_grpo")) == [[0.0, -0.25, 0.5], [0.0, 0.25]]
    # The returns are 0.25, 0.5, 1 and 0.25, 0.5, which ended before the third call.
    assert totals(decide(*paths, advantage="dr_grpo", turn_discount=0.5)) == [[0.0, 0.0, 0.5], [0.0, 0.0]]
    half = GroupConfig(turn_discount=0.5)
    assert turn_returns(replace(paths[0].record(0), untrained_calls=(1,)), half) == [0.5, 0.0, 1.0]
    assert turn_returns(made_record(TASK, 0, 1.0), half) == []


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
def test_one_baseline_is_subtracted_whenever_a_trajectory_ends(discount: float) -> None:
    """As many baselines as a trajectory has calls would pay for ending (verl issue 7244)."""
    stays, ends = Path([None] * 2, 0.0, [1.0, 1.0]), Path([None], 0.0, [1.0])
    outcome = decide(stays, ends, ends, ends, advantage="dr_grpo", turn_discount=discount, min_score_spread=0)
    first = totals(outcome)[0][0] - totals(outcome)[1][0]
    assert first == pytest.approx(discount)  # what the second call got, without a baseline of its own


def test_the_trainer_computes_them_again() -> None:
    group, config = group_of(*FORKED), GroupConfig(**GIGPO)
    outcome = GroupRules(config=config, seed=7).decide(group)
    stored = trained_group(TASK, group.records, group.calls, outcome)
    assert group_problem(stored, outcome.data) is None
    first = group.records[0].id
    moved = {**group.calls, first: [replace(call, anchor="hall") for call in group.calls[first]]}
    assert "turn_advantages" in str(group_problem(replace(stored, calls=moved), outcome.data))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"step_advantage": "gigpo", "advantage": "reward"}, "compares nothing"),
        ({"step_advantage": "gae"}, "step_advantage"),
        ({"step_advantage_weight": 0.0}, "step_advantage_weight"),
        ({"turn_discount": 1.5}, "turn_discount"),
    ],
)
def test_flags_that_change_nothing_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GroupConfig(**flags)


CALLS = st.lists(st.tuples(st.sampled_from("abc"), st.floats(-1, 1)), min_size=1, max_size=5)
PATHS = st.lists(st.tuples(CALLS, st.floats(0, 1)), min_size=2, max_size=5)


@given(PATHS, st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.sampled_from(["grpo", "dr_grpo"]))
def test_they_are_those_of_verl_agent(
    paths: list[tuple[list[tuple[str, float]], float]], gamma: float, name: str
) -> None:
    """Those of total rewards by episode, plus those of discounted returns by anchor observation."""

    def normed(values: list[float]) -> list[float]:
        std = statistics.stdev(values) + 1e-6 if name == "grpo" and len(values) > 1 else 1.0
        return [(value - statistics.fmean(values)) / std for value in values]

    episodes = normed([sum(reward for _, reward in path) + score for path, score in paths])
    visits: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    for place, (path, score) in enumerate(paths):
        running = 0.0
        for index in reversed(range(len(path))):
            running = path[index][1] + (score if index == len(path) - 1 else 0.0) + gamma * running
            visits[path[index][0]].append((place, index, running))
    expected = [[episodes[place]] * len(path) for place, (path, _) in enumerate(paths)]
    for group in visits.values():
        for (place, index, _), value in zip(group, normed([value for *_, value in group]), strict=True):
            expected[place][index] += value
    made = [Path([s for s, _ in path], score, [r for _, r in path]) for path, score in paths]
    flags = {**GIGPO, "turn_discount": gamma, "advantage": name, "min_score_spread": 0.0}
    for ours, theirs in zip(totals(decide(*made, **flags)), expected, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)
