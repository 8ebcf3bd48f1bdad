"""Which groups are begun next, as a pure choice."""

from __future__ import annotations

from agentrl.documents.task import Begin
from agentrl.scoring.evaluation import Trials
from agentrl.store.epochs import (
    ORDER,
    ORDERED_EVERY,
    PASS_RATE,
    SLOTS_AT_ONCE,
    Option,
    RateEstimate,
    choose,
    ease_after_group,
    sort_key,
)

ABLE = RateEstimate(3.0)
"""A policy that passes 0.95 of the mean task."""


def option(name: str, ease: float = 0.0, *, epoch: int = 0, generations: int = 8) -> Option:
    before = f"train/{epoch - 1}/{name}" if epoch else None
    return Option(
        id=f"train/{epoch}/{name}", task_id=name, epoch=epoch, generations=generations, ease=ease,
        before=before,
    )  # fmt: skip


def test_known_tasks_near_half_go_first_and_every_fourth_group_goes_by_order() -> None:
    ordered = [option(f"new{number}") for number in range(9)]
    known = [option(f"known{number}", -3.0, epoch=1) for number in range(9)]
    chosen = choose(ordered, known, ABLE, 1, 8)
    by = [choice.by for choice in chosen]
    assert by == [PASS_RATE, PASS_RATE, PASS_RATE, ORDER] * 2
    assert [choice.option.task_id for choice in chosen if choice.by == ORDER] == ["new0", "new1"]
    assert [choice.by for choice in choose(ordered, known, ABLE, ORDERED_EVERY, 2)] == [ORDER, PASS_RATE]


def test_unknown_tasks_go_first_where_the_known_ones_are_no_likelier_to_have_spread() -> None:
    ordered = [option("new")]
    assert choose(ordered, [option("mean", epoch=1)], ABLE, 1, 1)[0].by == ORDER
    assert choose(ordered, [option("easy", 2.0, epoch=1)], ABLE, 1, 1)[0].by == ORDER
    gains_little = choose(ordered, [option("near", -0.5, epoch=1)], RateEstimate(0.5), 1, 1)
    assert gains_little[0].by == ORDER


def test_unknown_tasks_are_expected_to_agree_as_often_as_other_first_groups_did() -> None:
    """Half of the tasks are impossible, the others easy: the mean task has spread, and hardly any other."""
    agreed = tuple(Trials(8, passed) for passed in [0, 8] * 8)
    known = option("known", 1.5, epoch=1)
    assert choose([option("new")], [known], RateEstimate(0.0), 1, 1)[0].by == ORDER
    assert choose([option("new")], [known], RateEstimate(0.0, agreed), 1, 1)[0].by == PASS_RATE


def test_what_is_left_is_begun_whatever_its_spread() -> None:
    assert [c.by for c in choose([], [option("easy", 5.0, epoch=1)], ABLE, 4, 3)] == [PASS_RATE]
    assert [c.by for c in choose([option("new")], [], ABLE, 1, 3)] == [ORDER]
    assert choose([], [], ABLE, 1, 3) == []


def test_a_task_that_is_both_next_in_order_and_known_is_begun_once() -> None:
    same = option("same", -3.0, epoch=1)
    chosen = choose([same, option("b", epoch=1)], [same], ABLE, 1, 4)
    assert [choice.option.id for choice in chosen] == [same.id, "train/1/b"]


def test_an_admission_ends_with_its_capacity_or_its_slots() -> None:
    ordered = [option(f"new{number}") for number in range(20)]
    assert len(choose(ordered, [], RateEstimate(0.0), 1, 3)) == 3
    assert len(choose(ordered, [], RateEstimate(0.0), 1, 20)) == SLOTS_AT_ONCE // 8


def test_a_group_corrects_the_ease_of_its_begin() -> None:
    begun = Begin(number=1, by=ORDER, ability=0.0, ease=0.5)
    assert ease_after_group(begun, {"scored": 8, "pass_rate": 0.0}) < 0
    assert abs(ease_after_group(begun, {"scored": 0, "pass_rate": None}) - 0.5) < 1e-6


def test_groups_begun_by_number_come_behind_those_begun_without() -> None:
    numbered = {"begun": {"number": 2}, "epoch": 0, "order": 0}
    earlier = {"begun": {"number": 1}, "epoch": 1, "order": 9}
    assert sort_key({"epoch": 3, "order": 7, "begun": None}) < sort_key(earlier) < sort_key(numbered)
