"""Test estimates of a task's ease and the policy's ability from pass rates."""

from __future__ import annotations

import math
import random

import pytest

from agentrl.scoring.evaluation import (
    LIMIT,
    Trials,
    estimate_ability,
    pass_probability,
    spread_probability,
    update_ease,
)


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
