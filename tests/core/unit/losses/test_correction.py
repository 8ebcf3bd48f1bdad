"""Importance corrections and bounds on staleness."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from token_batches import random_batch, three_tokens, token_metrics
from torch import Tensor

from agentrl.config.training import Correction, parse_corrections
from agentrl.errors import ConfigError
from agentrl.losses.compute import divergence, out_of_bound, token_losses, weigh
from agentrl.losses.loss import TrajectoryMeans
from agentrl.losses.settings import LossSettings


def weights(
    text: str, w: tuple[float, ...], *, loss: str = "GRPO", old: str = "recompute"
) -> tuple[list[float], list[bool]]:
    """Weights and masks of one trajectory whose tokens have these πθ/μ, all of it in w = π_old/μ or in r."""
    zeros = (0.0,) * len(w)
    behavior = tuple(-math.log(x) for x in w)
    batch = three_tokens(zeros, zeros, old=behavior if old == "behavior" else zeros, behavior=behavior)
    result = weigh(batch, LossSettings(loss_calculater=loss, importance_correction=text, old_logprobs=old))
    return [round(x, 4) for x in result.weight.tolist()], result.masked.tolist()


def test_defaults_and_given_bounds() -> None:
    assert parse_corrections("") == ()
    assert parse_corrections("tis, icepop") == (Correction("tis", 0, 2), Correction("icepop", 0.5, 5))
    both = (Correction("tis", 0, math.inf), Correction("seq_mask", 0.5, 1.5))
    assert parse_corrections("tis:inf,seq_mask:0.5:1.5") == both


@pytest.mark.parametrize(
    "text",
    [
        "tiss", "tis:x", "seq_kl:0.1:0.2", "seq_tis:none", "seq_kl:-1", "tis:1:2", "icepop:0.5",
        "seq_mask:2:1", "token_mask:nan:1", "tis,tis", "tis:-1",
    ],
)  # fmt: skip
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--importance_correction"):
        parse_corrections(text)


def test_an_unknown_correction_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'icepop'"):
        parse_corrections("ice_pop")


def test_each_correction_of_w() -> None:
    w = (0.25, 1.0, 8.0)
    assert weights("", w) == ([1.0, 1.0, 1.0], [False, False, False])
    assert weights("", w, loss="MINIRL") == ([0.25, 1.0, 8.0], [False, False, False])
    assert weights("tis", w) == ([0.25, 1.0, 2.0], [False, False, False])
    assert weights("seq_tis:3", w) == ([2.0, 2.0, 2.0], [False, False, False])
    assert weights("seq_tis:1.5", w) == ([1.5, 1.5, 1.5], [False, False, False])
    assert weights("icepop", w) == ([0.25, 1.0, 8.0], [True, False, True])
    assert weights("token_mask", w) == ([1.0, 1.0, 1.0], [True, False, True])
    assert weights("tis:4,icepop:0.1:10", w) == ([0.25, 1.0, 4.0], [False, False, False])
    assert weights("icepop,tis", w) == weights("tis,icepop", w)
    assert weights("seq_kl:1.5", (1.0, 8.0)) == ([1.0, 1.0], [True, True])  # (7 − log 8)/2 = 2.46 nats
    assert weights("seq_kl:2.5", (1.0, 8.0)) == ([1.0, 1.0], [False, False])


def test_where_the_old_policy_is_the_sampler_masks_look_at_the_whole_ratio() -> None:
    w = (0.25, 1.0, 8.0)
    ones = [1.0, 1.0, 1.0]
    assert weights("", w, old="behavior") == (ones, [False] * 3)
    assert weights("icepop", w, old="behavior") == (ones, [True, False, True])
    assert weights("token_mask", w, old="behavior") == (ones, [True, False, True])
    assert weights("seq_mask:0.5:1.2", w, old="behavior") == (ones, [True] * 3)
    assert weights("seq_mask:0.5:1.3", w, old="behavior") == (ones, [False] * 3)
    assert weights("seq_kl:1", w, old="behavior") == (ones, [True] * 3)


@pytest.mark.parametrize("old", ["behavior", "recompute"])
@pytest.mark.parametrize("size", [1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
def test_a_limit_of_the_kl_keeps_every_trajectory_below_it_also_next_to_the_policy(
    size: float, old: str
) -> None:
    """In float32 e^x − 1 − x is noise of either sign here, and a lower bound of 0 dropped half of it."""
    noise = size * torch.randn(400, generator=torch.Generator().manual_seed(0))
    batch = three_tokens(
        (-1.0,) * 400, (1.0,) * 400, behavior=tuple((-1.0 + noise).tolist()), old=(-1.0,) * 400
    )
    if old == "behavior":
        batch = replace(batch, old_logprobs=batch.behavior_logprobs)
    batch = replace(batch, row=torch.arange(400), trajectories=400)
    settings = LossSettings(importance_correction="seq_kl:1e-3", old_logprobs=old)
    assert not weigh(batch, settings).masked.any()
    exact = [math.expm1(x) - x for x in batch.log_rho.double().tolist()]
    assert divergence(batch, settings).tolist() == pytest.approx(exact, rel=1e-3, abs=1e-22)
    report = token_metrics(batch, token_losses(batch, settings), batch.logprobs).report()
    assert report["kl_k3"] == pytest.approx(sum(exact) / 400, rel=1e-6)


def test_minirl_contains_the_ratio_that_a_cap_bounds() -> None:
    w = (0.25, 1.0, 8.0)
    assert weights("", w, loss="MINIRL", old="behavior")[0] == [1.0, 1.0, 1.0]
    capped, _ = weights("tis:2", w, loss="MINIRL", old="behavior")
    assert [c * x for c, x in zip(capped, w, strict=True)] == [0.25, 1.0, 2.0]
    capped, _ = weights("seq_tis:1.5", w, loss="MINIRL", old="behavior")
    assert [c * x for c, x in zip(capped, w, strict=True)] == pytest.approx([1.5, 1.5, 1.5], abs=1e-3)


@pytest.mark.parametrize("old", ["behavior", "recompute"])
def test_corrections_of_trajectories_take_each_one_by_itself(old: str) -> None:
    batch = random_batch(3)
    log = batch.log_rho if old == "behavior" else batch.log_weight

    def masked(text: str) -> torch.Tensor:
        return weigh(batch, LossSettings(importance_correction=text, old_logprobs=old)).masked

    product = LossSettings(loss_calculater="MINIRL", importance_correction="seq_tis:1.2", old_logprobs=old)
    weight = weigh(batch, product).weight
    for row in range(batch.trajectories):
        mine = batch.row == row
        mean = float(torch.exp(log[mine].mean()))
        assert masked("seq_mask")[mine].tolist() == [not 0.9 <= mean <= 1.1] * int(mine.sum())
        k3 = float((torch.exp(log[mine]) - 1 - log[mine]).mean())
        assert masked("seq_kl:0.1")[mine].tolist() == [k3 > 0.1] * int(mine.sum())
        whole = torch.exp(log[mine].sum()).clamp(max=1.2).expand(int(mine.sum()))
        contained = torch.exp(log[mine]) if old == "behavior" else 1.0
        torch.testing.assert_close(weight[mine] * contained, whole)


def test_means_of_whole_trajectories_replace_those_of_the_micro_batch() -> None:
    batch = random_batch(4)
    lengths = torch.bincount(batch.row, minlength=batch.trajectories)
    first = torch.arange(len(batch.row)) % 2 == 0

    def mean(values: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(batch.trajectories, dtype=torch.float64)
        return (zeros.index_add(0, batch.row, values.double()) / lengths).float()

    for text in ("seq_mask", "seq_kl:0.1", "seq_tis:1.2"):
        settings = LossSettings(importance_correction=text, old_logprobs="recompute")
        whole = weigh(batch, settings)
        means = TrajectoryMeans(
            mean(batch.log_ratio.detach()), mean(batch.log_weight), mean(divergence(batch, settings))
        )
        tensors = (field.name for field in fields(batch) if isinstance(getattr(batch, field.name), Tensor))
        half = replace(batch, **{name: getattr(batch, name)[first] for name in tensors})
        found = weigh(replace(half, means=means, lengths=lengths), settings)
        torch.testing.assert_close(found.weight, whole.weight[first])
        assert torch.equal(found.masked, whole.masked[first])


RATIOS = torch.tensor([1.31, 1.29, 0.79, 0.81, 2.3, 0.1])


def bounds(settings: LossSettings, advantage: float, age: int = 0, *, in_weight: bool = False) -> list[bool]:
    """Which of the tokens with ρ = ``RATIOS`` are masked; ``in_weight``: w is ρ, and r is 1."""
    count = len(RATIOS)
    log, zeros = tuple(torch.log(RATIOS).tolist()), (0.0,) * count
    batch = three_tokens(
        log, (advantage,) * count, old=log if in_weight else zeros, behavior=zeros,
        age=(age,) * count,
    )  # fmt: skip
    return out_of_bound(batch, settings).tolist()


@pytest.mark.parametrize("in_weight", [False, True])
@pytest.mark.parametrize("loss", ["GRPO", "CISPO", "MINIRL"])
def test_bounds_hold_for_the_whole_ratio_wherever_it_lies(loss: str, in_weight: bool) -> None:
    strict = LossSettings(loss_calculater=loss, strict_in_bound=True, epsilon=0.2, epsilon_higher=0.1)
    assert bounds(strict, +1.0, in_weight=in_weight) == [True, False, False, False, True, False]
    assert bounds(strict, -1.0, in_weight=in_weight) == [False, False, True, False, False, True]


@pytest.mark.parametrize("in_weight", [False, True])
def test_gspo_is_bounded_by_the_trajectorys_geometric_mean(in_weight: bool) -> None:
    strict = LossSettings(loss_calculater="GSPO", strict_in_bound=True, epsilon=0.2)
    assert math.exp(float(torch.log(RATIOS).mean())) == pytest.approx(0.79, abs=0.01)
    assert bounds(strict, -1.0, in_weight=in_weight) == [True] * 6
    assert bounds(strict, +1.0, in_weight=in_weight) == [False] * 6
    assert bounds(LossSettings(loss_calculater="GSPO"), -1.0) == [False] * 6


@pytest.mark.parametrize("loss", ["GRPO", "GSPO", "CISPO"])
def test_a_papers_loss_has_no_bounds_on_staleness(loss: str) -> None:
    assert bounds(LossSettings(loss_calculater=loss), -1.0) == [False] * 6


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
