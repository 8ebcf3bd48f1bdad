"""Test which trajectories of a group are trained, with which advantage."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_documents import made_record, made_task

from agentrl.config.schema import GroupConfig
from agentrl.data.finalize_group import GroupRules
from agentrl.documents.record import Record
from agentrl.documents.status import StopReason
from agentrl.errors import ConfigError, GroupError
from agentrl.scoring.groups import Decision, decide_group, summarize

TASK = made_task()


def record(place: int, score: float | None, turns: int = 2, stop: StopReason = StopReason.ANSWERED) -> Record:
    made = made_record(TASK, place, score, turns=turns, stop_reason=stop)
    return replace(made, id=f"r{place}", min_version=place, max_version=place + 1)


def group(*scores: float | None, **more: Any) -> list[Record]:
    return [record(place, score, **more) for place, score in enumerate(scores)]


def decide(records: list[Record], **flags: Any) -> list[Decision]:
    return decide_group(records, GroupConfig(**flags), random.Random(0))


def advantages(records: list[Record], **flags: Any) -> list[float | None]:
    return [decision.advantage for decision in decide(records, **flags)]


def test_leave_one_out() -> None:
    assert advantages(group(1, 0, 0, 1)) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert advantages(group(1, 0, 0, 1), adv_scaling=3.0) == pytest.approx([2, -2, -2, 2])


def test_a_failed_trajectory_is_in_no_mean() -> None:
    decided = decide(group(1, None, 0))
    assert [(d.record_id, d.advantage) for d in decided] == [("r0", 1.0), ("r2", -1.0)]


def test_a_group_without_spread_is_abandoned() -> None:
    for scores in ((1, 1, 1), (0, 0.09)):
        assert all(d.abandoned_because == "no spread in the group's scores" for d in decide(group(*scores)))
    assert None not in advantages(group(0.0, 0.1))
    assert decide(group(None, None)) == []
    assert [d.advantage for d in decide(group(1))] == [None]


def test_clamping_by_score() -> None:
    assert advantages(group(0.6, 1.0, 0.8), clamp_advantage_by_score=True)[0] == 0.0
    assert advantages(group(0.5, 0.0, 0.0)) == pytest.approx([0.5, -0.25, -0.25])
    assert advantages(group(0.5, 0.0, 0.0), clamp_advantage_by_score=True)[0] == 0.0


def test_balancing_keeps_one_more_wrong_and_two_more_right() -> None:
    few_right = decide(group(1, 0, 0, 0, 0, 0), balance_sample=True)
    assert sum(d.advantage is not None for d in few_right) == 1 + 2
    few_wrong = decide(group(0, 1, 1, 1, 1, 1), balance_sample=True)
    assert sum(d.advantage is not None for d in few_wrong) == 1 + 3
    even = decide(group(0, 0, 1, 1), balance_sample=True)
    assert all(d.advantage is not None for d in even)
    failed = [*group(1, 0), record(2, 0.0, stop=StopReason.FAILED)]
    assert decide(failed, balance_sample=True)[2].abandoned_because == "the engine failed"


@pytest.mark.parametrize("wrong", [-1.0, 0.0, 0.4])
def test_balancing_counts_scores_up_to_the_threshold_as_wrong(wrong: float) -> None:
    even = decide(group(1, 1, 1, 1, wrong, wrong, wrong, wrong), balance_sample=True)
    assert all(d.advantage for d in even)
    few_right = decide(group(1, wrong, wrong, wrong, wrong, wrong, wrong, wrong), balance_sample=True)
    assert sum(d.advantage is not None for d in few_right) == 1 + 2
    assert few_right[0].advantage == pytest.approx(1 - wrong)


def test_the_threshold_decides_who_is_right_everywhere() -> None:
    records = [record(0, 0.7, turns=1), record(1, 0.7, turns=2), record(2, 0.95, turns=1), record(3, 0.9)]
    assert sum(a is None for a in advantages(records, min_turns=2)) == 2
    untrained = [a is None for a in advantages(records, min_turns=2, right_threshold=0.9)]
    assert untrained == [False, False, True, False]
    clamped = advantages(group(0.7, 0.1, 0.1), clamp_advantage_by_score=True, right_threshold=0.9)
    assert clamped[0] == 0.0
    short_and_long = [record(0, 0.8, 2), record(1, 0.8, 4), record(2, 0.2, 3)]
    flags: dict[str, Any] = {"efficient_rewarding": True, "advantage": "dr_grpo"}
    as_right, as_wrong = (advantages(short_and_long, **flags, right_threshold=t) for t in (0.5, 0.8))
    assert as_right[0] == pytest.approx(0.3)  # 0.8 + 0.1 for the shorter of two right answers, mean 0.6
    assert as_wrong[1] is not None
    assert as_wrong[0] is not None
    assert as_wrong[1] > as_wrong[0]


def test_balancing_is_the_same_for_every_process() -> None:
    records = group(1, 0, 0, 0, 0, 0, 0, 0)
    first = decide_group(records, GroupConfig(balance_sample=True), random.Random("seed/task"))
    assert first == decide_group(records, GroupConfig(balance_sample=True), random.Random("seed/task"))


def test_right_answers_in_too_few_calls_are_not_trained() -> None:
    records = [record(0, 1.0, turns=1), record(1, 1.0, turns=2), record(2, 0.0, turns=1)]
    decided = decide(records, min_turns=2)
    assert [d.advantage is None for d in decided] == [True, False, False]
    assert [d.advantage for d in decided][1:] == [1.0, -1.0]
    assert None not in advantages(records)


def test_context_errors_are_reserved() -> None:
    limits = [record(i, 0.0, stop=StopReason.TURNS_LIMIT) for i in range(3)]
    limits.append(record(3, 0.0, stop=StopReason.LENGTH_LIMIT))
    records = [*limits, record(4, 1.0), record(5, 0.0)]
    assert sum(a is None for a in advantages(records, reserve_context_error_count=1)) == 3
    assert sum(a is None for a in advantages(records, reserve_context_error_count=0)) == 4
    assert None not in advantages(records)
    assert None not in advantages(records, reserve_context_error_count=0, efficient_rewarding=True)


def test_efficiency_prefers_short_right_and_long_wrong_ones() -> None:
    records = [record(0, 1.0, 2), record(1, 1.0, 4), record(2, 0.0, 2), record(3, 0.0, 4), record(4, 0.0, 4)]
    result = [a for a in advantages(records, efficient_rewarding=True, advantage="dr_grpo") if a is not None]
    assert result[0] - result[1] == pytest.approx(0.2)
    assert result[3] > result[2]
    assert result[3] == result[4]
    assert sum(result) == pytest.approx(0.0)


def test_overlong_answers_earn_less_and_keep_their_score() -> None:
    flags = {"overlong_limit": 100, "overlong_buffer": 40, "overlong_penalty": 0.5, "advantage": "dr_grpo"}
    records = [
        replace(record(place, 1.0 if place else 0.0), generated_tokens=tokens)
        for place, tokens in enumerate((200, 60, 80, 100, 500))
    ]
    shaped = [-0.5, 1.0, 0.75, 0.5, 0.5]
    expected = [value - sum(shaped) / 5 for value in shaped]
    assert advantages(records, **flags) == pytest.approx(expected)
    assert advantages(records, advantage="dr_grpo")[1:] == pytest.approx([0.2] * 4)
    assert [r.score for r in records] == [0.0, 1.0, 1.0, 1.0, 1.0]
    same = [replace(record(place, 1.0), generated_tokens=100 * place) for place in range(3)]
    assert set(advantages(same, **flags)) == {None}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"overlong_buffer": 8}, "overlong"),
        ({"overlong_buffer": -1}, "overlong"),
        ({"overlong_limit": 9, "overlong_penalty": 0.0}, "overlong"),
        ({"right_threshold": float("nan")}, "right_threshold is nan"),
    ],
)
def test_a_wrong_setting_is_told(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        GroupConfig(**flags)


def test_the_last_one_left_is_abandoned() -> None:
    records = [record(0, 1.0, turns=1), record(1, 0.0)]
    decided = decide(records, min_turns=2)
    assert decided[1].abandoned_because == "alone in its group"


def test_the_reward_itself_is_an_advantage() -> None:
    flags: dict[str, Any] = {"advantage": "reward", "min_score_spread": 0.0}
    assert advantages(group(1, 0.25, -1), **flags) == [1.0, 0.25, -1.0]
    assert advantages(group(1, 1), **flags) == [1.0, 1.0]
    assert advantages(group(0.5), **flags) == [0.5]
    right_too_soon = [record(0, 1.0, turns=1), record(1, 0.0)]
    assert advantages(right_too_soon, min_turns=2, **flags) == [None, 0.0]
    longer = [replace(record(0, 1.0), generated_tokens=100), record(1, 1.0)]
    assert advantages(longer, overlong_limit=100, overlong_buffer=40, **flags) == [0.0, 1.0]


ROUNDED = [0.1 + 0.2 if place % 2 else 0.3 for place in range(10)]
"""Ten equal scores, as sums of floats give them."""


@pytest.mark.parametrize("estimator", ["leave_one_out", "grpo", "dr_grpo", "maxrl"])
def test_rounding_is_no_advantage(estimator: str) -> None:
    flags: dict[str, Any] = {"advantage": estimator, "min_score_spread": 0.0}
    assert len(set(ROUNDED)) == 2
    assert advantages(group(*ROUNDED), **flags) == [0.0] * 10
    near_the_mean = advantages(group(*ROUNDED, 0.3, 0.6, 0.0), **flags)
    assert near_the_mean[:11] == [0.0] * 11
    assert near_the_mean[11:] != [0.0] * 2
    millions = advantages(group(*(score * 1e6 for score in ROUNDED)), **flags)
    assert millions == [0.0] * 10


def test_small_advantages_train() -> None:
    little = advantages(group(1e-5, 0.0, 1.0), advantage="dr_grpo", adv_scaling=1e-9, min_score_spread=0.0)
    assert all(little)
    tiny = advantages(group(3e-12, 1e-12), min_score_spread=0.0)
    assert tiny == pytest.approx([2e-12, -2e-12])


def test_the_spread_is_compared_up_to_rounding() -> None:
    assert 0.3 - 0.2 < 0.1
    assert None not in advantages(group(0.3, 0.2), min_score_spread=0.1)
    assert advantages(group(*ROUNDED), min_score_spread=1e-17) == [None] * 10
    assert advantages(group(1e4, 1e4), min_score_spread=1e-9) == [None] * 2
    assert advantages(group(0.3, 0.3), min_score_spread=0.0) == [0.0, 0.0]


scores = st.lists(st.floats(0, 1, allow_nan=False), min_size=2, max_size=12)


@given(scores=scores, turns=st.data(), flags=st.fixed_dictionaries({
    "balance_sample": st.booleans(), "efficient_rewarding": st.booleans(),
    "advantage": st.sampled_from(["leave_one_out", "grpo", "dr_grpo"]),
}))  # fmt: skip
def test_advantages_sum_to_zero_and_every_record_is_decided(
    scores: list[float], turns: st.DataObject, flags: dict[str, Any]
) -> None:
    records = [record(i, score, turns.draw(st.integers(1, 5))) for i, score in enumerate(scores)]
    decided = decide(records, **flags)
    assert [d.record_id for d in decided] == [r.id for r in records]
    assert all((d.advantage is None) is (d.abandoned_because is not None) for d in decided)
    assert sum(d.advantage or 0.0 for d in decided) == pytest.approx(0.0, abs=1e-4)


def test_summary() -> None:
    assert summarize(group(1, 0, None), failed=1, trained=2, rules={}) == {
        "scored": 2, "failed": 1, "mean_score": 0.5, "pass_rate": 0.5, "outcome": "trained", "trained": 2,
        "versions": [0, 3],
    }  # fmt: skip
    strict = summarize(group(1, 0.7, None), failed=1, trained=2, rules={"right_threshold": 0.7})
    assert strict["pass_rate"] == 0.5
    empty = summarize([], failed=3, trained=0, rules={})
    assert (empty["mean_score"], empty["pass_rate"], empty["outcome"]) == (None, None, "abandoned")


APART: dict[str, Any] = {"advantage": "grpo", "multi_objective_aggregation": "normalize_then_sum"}


def summed(place: int, weights: dict[str, float], *scores: float) -> Record:
    """A Record whose score is a weighted sum of scorers."""
    parts = {
        name: {"weight": weight, "score": score}
        for (name, weight), score in zip(weights.items(), scores, strict=True)
    }
    total = sum(weight * score for weight, score in zip(weights.values(), scores, strict=True))
    return replace(record(place, total), score_details={"parts": parts})


def test_each_scorer_of_a_sum_is_normalized_by_itself() -> None:
    """GDPO's example: (0, 2) and (0, 1) have the same advantage in GRPO."""
    weights = {"right": 1.0, "short": 0.5}
    rows = [(0.0, 0.0), (1.0, 1.0), (1.0, 0.0), (0.0, 0.2)]
    made = [summed(place, weights, *row) for place, row in enumerate(rows)]
    found = [item.advantage for item in decide(made, **APART)]
    columns = [[row[at] for row in rows] for at in (0, 1)]
    normed = [
        [(value - statistics.fmean(column)) / (statistics.stdev(column) + 1e-6) for value in column]
        for column in columns
    ]
    assert found == pytest.approx([right + 0.5 * short for right, short in zip(*normed, strict=True)])
    doubled = [summed(place, weights, right, 10 * short) for place, (right, short) in enumerate(rows)]
    assert [item.advantage for item in decide(doubled, **APART)] == pytest.approx(found, rel=1e-4)


def test_equal_sums_of_different_scores_are_a_spread() -> None:
    """SkyRL pull request 2104: a filter by the sum drops the groups that GDPO is for."""
    weights = {"right": 0.5, "short": 0.5, "constant": 1.0}
    made = [
        summed(0, weights, 1.0, 0.0, 1.0),
        summed(1, weights, 0.0, 1.0, 1.0),
        summed(2, weights, 0.0, 1.0, 1.0),
    ]
    assert {item.abandoned_because for item in decide(made, advantage="grpo")} == {
        "no spread in the group's scores"
    }
    assert [item.advantage for item in decide(made, **APART)] == [0.0, 0.0, 0.0]
    uneven = {"right": 0.8, "short": 0.2}
    found = decide(
        [summed(place, uneven, *row) for place, row in enumerate([(1.0, 0.0), (0.0, 1.0)])], **APART
    )
    assert [item.advantage for item in found] == pytest.approx([0.6 * 0.5**0.5, -0.6 * 0.5**0.5], rel=1e-5)


@pytest.mark.parametrize(
    "details", [{}, {"parts": {"right": {"weight": 2.0, "score": 1.0}}}, {"parts": None}]
)
def test_a_group_with_a_score_of_another_kind_is_decided_by_its_scores(details: dict[str, Any]) -> None:
    """Such as those that people gave: ms-swift issue 8123 has NaN for all of it."""
    made = [
        summed(0, {"right": 1.0}, 1.0),
        summed(1, {"right": 1.0}, 0.0),
        replace(record(2, 1.0), score_details=details),
    ]
    assert decide(made, **APART) == decide(made, advantage="grpo")


@pytest.mark.parametrize(
    "more", [{"advantage": "dr_grpo"}, {"efficient_rewarding": True}, {"step_advantage": "gigpo"}]
)
def test_normalizing_apart_is_refused_where_it_changes_nothing(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="normalize_then_sum"):
        GroupConfig(**{**APART, **more})


WINDOW: dict[str, Any] = {"advantage": "reward", "baseline": "window", "min_score_spread": 0.0}


def test_the_mean_of_a_window_is_subtracted_from_each_score() -> None:
    def found(scores: list[float], mean: float) -> list[float | None]:
        config = GroupConfig(**WINDOW)
        return [
            item.advantage for item in decide_group(group(*scores), config, random.Random(0), baseline=mean)
        ]

    assert found([1.0], 0.25) == [0.75]
    assert found([0.0, 1.0], 0.25) == [-0.25, 0.75]
    assert found([0.1 + 0.2], 0.3) == [0.0]  # equal but for rounding
    with pytest.raises(GroupError, match="does not store"):
        decide_group(group(1.0), GroupConfig(**WINDOW), random.Random(0))
    with pytest.raises(ConfigError, match="a baseline of its own"):
        GroupConfig(**{**WINDOW, "advantage": "grpo"})


def test_the_rules_of_a_group_have_its_window() -> None:
    rules = GroupRules(config=GroupConfig(**WINDOW), seed=3, baseline_mean=0.25)
    assert GroupRules.stored(rules.to_store()) == rules
    assert "baseline_mean" not in GroupRules(config=GroupConfig(), seed=3).to_store()
