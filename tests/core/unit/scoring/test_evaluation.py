"""Test the numbers of an evaluation, the paired comparison of two, and estimates of ease and ability."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from agentrl.scoring.evaluation import (
    LIMIT,
    EvaluatedTask,
    Prices,
    Trials,
    compare_tasks,
    count_failures,
    difference,
    estimate_ability,
    estimates,
    pass_at_k,
    pass_probability,
    sign_test,
    spread_probability,
    summarize,
    summarize_groups,
    update_ease,
)


def task(*scores: float, name: str = "t", scorer: str = "exact", **fields: object) -> EvaluatedTask:
    turns = (2,) * len(scores)
    made = EvaluatedTask(task_id=name, digest="d", scorer=scorer, agent="react", scores=scores, turns=turns)
    return replace(made, **fields)  # type: ignore[arg-type]


def test_pass_at_k_is_the_chance_of_a_pass_among_k() -> None:
    assert pass_at_k(4, 2, 1) == 0.5
    assert pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)
    assert pass_at_k(4, 2, 4) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0
    with pytest.raises(ValueError, match="pass@5 of 4"):
        pass_at_k(4, 1, 5)


def test_tasks_count_alike_and_failures_in_no_mean() -> None:
    tasks = [task(1, 1, 1, 1), task(0, 0.4, failed=2, failures=("engine",)), task(failed=1)]
    row = summarize(tasks)
    assert (row.tasks, row.scored, row.failed, row.turns) == (3, 6, 3, 2)
    assert row.score is not None
    assert row.score.value == pytest.approx((1 + 0.2) / 2)
    assert {k: value.value for k, value in row.pass_at.items()} == {1: 0.5, 2: 0.5}
    assert count_failures(tasks) == {"engine": 1}


def test_the_threshold_says_which_scores_pass() -> None:
    strict = replace(task(0.6, 0.9), right_threshold=0.8)
    rates = [summarize([item]).pass_at[1].value for item in (task(0.6, 0.9), strict)]
    assert rates == [1.0, 0.5]


def test_nothing_scored_gives_no_numbers() -> None:
    row = summarize([task(failed=1)])
    assert (row.score, dict(row.pass_at), row.turns, row.cost) == (None, {}, None, None)


def test_an_interval_covers_the_mean_is_the_same_again_and_narrows_with_tasks() -> None:
    few = estimates([[0.0, 1.0] * 5])[0]
    many = estimates([[0.0, 1.0] * 200])[0]
    assert few is not None
    assert many is not None
    assert few.low < few.value == 0.5 < few.high
    assert many.high - many.low < 0.11 < few.high - few.low
    assert estimates([[0.0, 1.0] * 5])[0] == few
    # the normal approximation of the standard error: 1.96 · 0.5 / √400
    assert many.high - many.value == pytest.approx(0.049, abs=0.008)


def test_the_cost_is_of_all_tokens() -> None:
    row = summarize([task(1, input_tokens=500_000, generated_tokens=100_000)] * 2, Prices(input=2, output=10))
    assert row.cost == pytest.approx(2 * 1 + 10 * 0.2)


def test_groups_are_by_tag_environment_scorer_and_agent_where_tasks_differ() -> None:
    tasks = [
        task(1, tags=("easy", "sum"), environment="maths"), task(0, tags=("sum",)), task(0.5, scorer="f1"),
    ]  # fmt: skip
    groups = summarize_groups(tasks)
    assert {kind: list(members) for kind, members in groups.items()} == {
        "environment": ["maths"], "tag": ["easy", "sum"], "scorer": ["exact", "f1"],
    }  # fmt: skip
    assert groups["tag"]["sum"].tasks == 2
    assert summarize_groups([task(1), task(0)]) == {}


def test_the_sign_test_is_exact() -> None:
    assert sign_test(0, 0) == 1.0
    assert sign_test(5, 0) == pytest.approx(2 / 32)
    assert sign_test(3, 3) == 1.0
    assert sign_test(9, 1) == pytest.approx(2 * 11 / 1024)


def test_a_clear_difference_is_found_and_none_is_not() -> None:
    clear = difference([(0.0, 1.0)] * 12 + [(1.0, 1.0)] * 8)
    assert (clear.better, clear.worse) == (12, 0)
    assert clear.effect.value == pytest.approx(0.6)
    assert clear.effect.low > 0.3
    assert max(clear.p_permutation, clear.p_sign) < 0.001
    none = difference([(0.0, 1.0), (1.0, 0.0)] * 10)
    assert none.effect.low < 0 < none.effect.high
    assert min(none.p_permutation, none.p_sign) > 0.5


def test_only_tasks_with_the_same_content_are_compared() -> None:
    a = [task(0, name="1"), task(0, name="2"), task(0, name="3"), task(name="5")]
    b = [task(1, name="1"), task(1, name="2", digest="edited"), task(1, name="4"), task(1, name="5")]
    found = compare_tasks(a, b)
    assert found is not None
    assert (found.tasks, found.only_a, found.only_b) == (1, 2, 3)
    assert found.score.effect.value == 1.0
    assert compare_tasks(a[1:2], b) is None


def test_half_is_the_likeliest_to_have_spread() -> None:
    assert spread_probability(0.5, 8) == pytest.approx(1 - 2 * 0.5**8)
    assert spread_probability(0.2, 8) == pytest.approx(spread_probability(0.8, 8))
    assert spread_probability(0.95, 8) == pytest.approx(0.3366, abs=1e-4)
    assert spread_probability(0.0, 8) == spread_probability(1.0, 8) == spread_probability(0.4, 1) == 0


def test_the_ability_explains_the_mean_of_many_groups() -> None:
    assert estimate_ability([]) == pytest.approx(0, abs=1e-6)
    ability = estimate_ability([Trials(8, 6)] * 200)
    assert pass_probability(ability, 0.0) == pytest.approx(0.75, abs=1e-3)
    hard = estimate_ability([Trials(8, 6, ease=-1.0)] * 200)
    assert hard == pytest.approx(ability + 1, abs=0.01)
    assert estimate_ability([Trials(8, 8)] * 1000) <= LIMIT


def test_an_ease_moves_towards_its_groups_and_back_to_the_prior() -> None:
    assert update_ease(Trials(8, 4), ability=0.0) == pytest.approx(0, abs=1e-6)
    once = update_ease(Trials(8, 0), ability=0.0)
    twice = update_ease(Trials(8, 0, ease=once), ability=0.0)
    assert -LIMIT < twice < once < -1
    assert update_ease(Trials(0, 0, ease=-1.5), ability=2.0) == pytest.approx(-1.5, abs=1e-6)
    # a policy that passes 0.9 of a mean task and half of this one: the task is about ln 9 harder
    many = update_ease(Trials(10_000, 5_000), ability=math.log(9))
    assert many == pytest.approx(-math.log(9), abs=0.01)


def test_eases_from_one_group_predict_which_later_groups_agree() -> None:
    """Of tasks of unlike difficulty, those chosen by their ease have spread far more often."""
    rng = random.Random(0)
    eases = [rng.gauss(0, 1.5) for _ in range(400)]

    def passes(ease: float, ability: float) -> int:
        return sum(rng.random() < pass_probability(ability, ease) for _ in range(8))

    early, late = 0.0, 2.0
    known = [update_ease(Trials(8, passes(ease, early)), early) for ease in eases]
    nearest = sorted(range(400), key=lambda i: abs(known[i] + late))[:100]
    spread = [sum(0 < passes(eases[i], late) < 8 for i in some) / 100 for some in (nearest, range(100))]
    assert spread[0] > 0.85 > 0.7 > spread[1]
