"""Importance corrections and bounds on staleness."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from token_batches import random_batch, three_tokens

from agentrl.errors import ConfigError
from agentrl.losses.correction import out_of_bound, weigh
from agentrl.losses.correction_spec import Correction, parse_corrections
from agentrl.losses.settings import LossSettings


def weights(text: str, w: tuple[float, ...], *, by_default: bool = False) -> tuple[list[float], list[bool]]:
    """Weights and masks of one trajectory whose tokens have these w = π_old/μ."""
    zeros = (0.0,) * len(w)
    batch = three_tokens(zeros, zeros, old=zeros, behavior=tuple(-math.log(x) for x in w))
    result = weigh(batch, parse_corrections(text), weighted_by_default=by_default)
    return [round(x, 4) for x in result.weight.tolist()], result.masked.tolist()


def test_defaults_and_given_bounds() -> None:
    assert parse_corrections("") == ()
    assert parse_corrections("tis, icepop") == (Correction("tis", 0, 2), Correction("icepop", 0.5, 5))
    assert parse_corrections("tis:inf,seq_mask:0.5:1.5") == (
        Correction("tis", 0, math.inf),
        Correction("seq_mask", 0.5, 1.5),
    )


@pytest.mark.parametrize(
    "text",
    ["tiss", "tis:x", "tis:1:2", "icepop:0.5", "seq_mask:2:1", "token_mask:nan:1", "tis,tis", "tis:-1"],
)
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--importance_correction"):
        parse_corrections(text)


def test_an_unknown_correction_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'icepop'"):
        parse_corrections("ice_pop")


def test_each_correction() -> None:
    w = (0.25, 1.0, 8.0)
    assert weights("", w) == ([1.0, 1.0, 1.0], [False, False, False])
    assert weights("", w, by_default=True) == ([0.25, 1.0, 8.0], [False, False, False])
    assert weights("tis", w) == ([0.25, 1.0, 2.0], [False, False, False])
    assert weights("icepop", w) == ([0.25, 1.0, 8.0], [True, False, True])
    assert weights("token_mask", w) == ([1.0, 1.0, 1.0], [True, False, True])
    assert weights("tis:4,icepop:0.1:10", w) == ([0.25, 1.0, 4.0], [False, False, False])
    assert weights("icepop,tis", w) == weights("tis,icepop", w)


def test_seq_mask_takes_the_geometric_mean_of_a_trajectory() -> None:
    assert weights("seq_mask", (0.5, 2.0, 1.0))[1] == [False, False, False]
    assert weights("seq_mask", (0.5, 1.0, 1.0))[1] == [True, True, True]
    batch = random_batch(3)
    masked = weigh(batch, parse_corrections("seq_mask"), weighted_by_default=False).masked
    for row in range(batch.trajectories):
        mine = batch.row == row
        mean = float(torch.exp(batch.log_weight[mine].mean()))
        assert masked[mine].tolist() == [not 0.9 <= mean <= 1.1] * int(mine.sum())


RATIOS = torch.tensor([1.31, 1.29, 0.79, 0.81, 2.3, 0.1])


def bounds(
    settings: LossSettings, advantage: float, age: int = 0, ratios: torch.Tensor = RATIOS
) -> list[bool]:
    count = len(ratios)
    zeros = (0.0,) * count
    batch = three_tokens(zeros, (advantage,) * count, age=(age,) * count)
    return out_of_bound(ratios, batch, settings).tolist()


def test_strict_bounds_mask_in_the_direction_of_the_advantage() -> None:
    strict = LossSettings(strict_in_bound=True, epsilon_higher=0.1, out_of_date_decay=9.0)
    assert bounds(strict, +1.0, age=5) == [True, False, False, False, True, False]
    assert bounds(strict, -1.0, age=5) == [False, False, True, False, False, True]
    assert bounds(strict, 0.0) == [False] * 6


def test_loose_bounds_are_widened_by_the_cap_and_narrowed_by_age() -> None:
    loose = LossSettings(epsilon_higher=0.1, importance_weight_cap_ratio=4.0)  # [1 - 0.8, 1 + 1.2]
    assert bounds(loose, +1.0) == [False, False, False, False, True, False]
    assert bounds(loose, -1.0) == [False, False, False, False, False, True]
    decayed = replace(loose, out_of_date_decay=math.log(2.0))  # two steps old: [0.8, 1.3]
    assert bounds(decayed, +1.0, age=2) == [True, False, False, False, True, False]
    assert bounds(decayed, -1.0, age=2) == [False, False, True, False, False, True]
    assert bounds(decayed, +1.0, age=0) == bounds(loose, +1.0)
