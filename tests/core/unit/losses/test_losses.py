"""Per-token losses and their gradients against formulas written out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from token_batches import random_batch, three_tokens, token_gradient, token_metrics

from agentrl.config.schema import LossConfig
from agentrl.errors import ConfigError
from agentrl.losses.compute import token_losses
from agentrl.losses.loss import LOSSES
from agentrl.losses.settings import LossSettings

ORIGINAL: dict[str, Any] = {
    "token_level_loss": True, "skip_length_normalization": False, "strict_in_bound": False,
    "importance_weight_cap_ratio": math.inf, "epsilon": 0.2, "epsilon_higher": 0.1,
}  # fmt: skip
"""The clip interval [0.8, 1.3] without bounds on staleness, for every loss."""


def settings(name: str, **numbers: Any) -> LossSettings:
    return LossSettings(loss_calculater=name, **ORIGINAL | numbers)


@pytest.mark.parametrize("seed", range(5))
def test_grpo_gradient_is_ratio_times_advantage_inside_and_zero_where_clipped(seed: int) -> None:
    batch = random_batch(seed)
    result = token_losses(batch, settings("GRPO"))
    expected = torch.where(result.clipped, 0.0, -result.ratio * batch.advantages)
    assert result.clipped.any()
    torch.testing.assert_close(token_gradient(batch, settings("GRPO")), expected)


@pytest.mark.parametrize("seed", range(5))
def test_grpo_gradient_equals_finite_differences(seed: int) -> None:
    batch = random_batch(seed)
    numbers = settings("GRPO", dual_clip=1.5)
    step = 1e-3
    difference = []
    for sign in (+1, -1):
        moved = replace(batch, logprobs=batch.logprobs.detach() + sign * step)
        difference.append(token_losses(moved, numbers).losses)
    numeric = (difference[0] - difference[1]) / (2 * step)
    smooth = (numeric - token_gradient(batch, numbers)).abs() < 2e-3
    assert smooth.sum() >= len(smooth) - 1  # a token may sit on a kink


@pytest.mark.parametrize("seed", range(5))
def test_gspo_gives_each_token_its_trajectorys_ratio_and_its_own_gradient(seed: int) -> None:
    batch = random_batch(seed)
    result = token_losses(batch, settings("GSPO"))
    for row in range(batch.trajectories):
        mine = batch.row == row
        s = torch.exp(batch.log_ratio.detach()[mine].mean())
        torch.testing.assert_close(result.ratio[mine], s.expand(int(mine.sum())))
    expected = torch.where(result.clipped, 0.0, -result.ratio * batch.advantages)
    torch.testing.assert_close(token_gradient(batch, settings("GSPO")), expected)


@pytest.mark.parametrize("seed", range(5))
def test_cispo_gradient_is_the_clipped_weight_times_advantage(seed: int) -> None:
    batch = random_batch(seed)
    ratio = torch.exp(batch.log_ratio.detach())
    expected = -ratio.clamp(0.8, 1.3) * batch.advantages
    torch.testing.assert_close(token_gradient(batch, settings("CISPO")), expected)


@pytest.mark.parametrize("seed", range(5))
def test_minirl_weights_by_the_whole_ratio_to_the_behavior_policy(seed: int) -> None:
    batch = random_batch(seed)
    r = torch.exp(batch.log_ratio.detach())
    kept = ~(((batch.advantages > 0) & (r > 1.3)) | ((batch.advantages < 0) & (r < 0.8)))
    whole = torch.exp(batch.logprobs.detach() - batch.behavior_logprobs)
    numbers = settings("MINIRL", old_logprobs="recompute")
    expected = torch.where(kept, -whole * batch.advantages, 0.0)
    torch.testing.assert_close(token_gradient(batch, numbers), expected)
    capped = r * torch.exp(batch.log_weight).clamp(max=1.1)
    expected = torch.where(kept, -capped * batch.advantages, 0.0)
    numbers = replace(numbers, importance_correction="tis:1.1")
    torch.testing.assert_close(token_gradient(batch, numbers), expected)
    on_mu = replace(batch, old_logprobs=batch.behavior_logprobs)
    kept = ~(((batch.advantages > 0) & (whole > 1.3)) | ((batch.advantages < 0) & (whole < 0.8)))
    expected = torch.where(kept, -whole.clamp(max=1.1) * batch.advantages, 0.0)
    numbers = settings("MINIRL", importance_correction="tis:1.1")
    torch.testing.assert_close(token_gradient(on_mu, numbers), expected)


def test_cross_entropy_ignores_advantages() -> None:
    batch = random_batch(0, spread=3.0)
    numbers = LossSettings(loss_calculater="CrossEntropy")
    torch.testing.assert_close(token_losses(batch, numbers).losses, -batch.logprobs)
    torch.testing.assert_close(token_gradient(batch, numbers), -torch.ones(24))


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    batch = three_tokens((math.log(5.0), math.log(5.0), math.log(0.5)), (-1.0, 1.0, -1.0))
    numbers = settings("GRPO", dual_clip=3.0)
    result = token_losses(batch, numbers)
    torch.testing.assert_close(result.losses, torch.tensor([3.0, -1.3, 0.8]))
    assert result.clipped.tolist() == [True, True, True]
    torch.testing.assert_close(token_gradient(batch, numbers), torch.zeros(3))


@pytest.mark.parametrize("name", ["GRPO", "GSPO"])
def test_the_loss_of_a_negative_advantage_is_bounded_by_default(name: str) -> None:
    batch = three_tokens((math.log(20.0),), (-1.0,))
    assert LossSettings(loss_calculater=name).dual_clip == 3.0
    torch.testing.assert_close(token_losses(batch, settings(name)).losses, torch.tensor([3.0]))
    unbounded = token_losses(batch, settings(name, dual_clip=math.inf))
    torch.testing.assert_close(unbounded.losses, torch.tensor([20.0]))


@pytest.mark.parametrize("name", [name for name in LOSSES.names() if LOSSES.get(name).from_policy])
def test_tokens_whose_logprobs_are_wrong_are_masked_and_counted(name: str) -> None:
    """μ = −1e6, and one below πθ by e^21: no update moves a token that far."""
    batch = three_tokens((-1.0, -1.0, -22.0), (-1.0, -1.0, 1.0), behavior=(-1e6, -1.1, -1.0))
    batch = replace(batch, old_logprobs=batch.behavior_logprobs)
    result = token_losses(batch, LossSettings(loss_calculater=name))
    assert (result.losses[0], result.losses[2]) == (0.0, 0.0)
    assert result.losses[1].abs() < 5
    assert result.masked.tolist() == [True, False, True]
    assert token_gradient(batch, LossSettings(loss_calculater=name))[[0, 2]].tolist() == [0.0, 0.0]
    report = token_metrics(batch, result, torch.zeros(3)).report()
    assert report["extreme_tokens"] == 2.0


@pytest.mark.parametrize("seed", range(3))
def test_dppo_gradient_is_the_weighted_advantage_where_no_probability_moved_too_far(seed: int) -> None:
    batch = random_batch(seed)
    batch = replace(batch, old_logprobs=batch.behavior_logprobs)
    numbers = LossSettings(loss_calculater="DPPO", epsilon=0.1, epsilon_higher=0.05, dppo_kl_coef=0.01)
    log_rho = batch.log_rho
    moved = torch.exp(batch.logprobs.detach()) - torch.exp(batch.behavior_logprobs)
    up, down = (batch.advantages > 0) & (moved > 0.15), (batch.advantages < 0) & (moved < -0.1)
    assert up.any()
    assert down.any()
    expected = torch.where(up | down, 0.0, -torch.exp(log_rho) * batch.advantages) + 0.02 * log_rho
    torch.testing.assert_close(token_gradient(batch, numbers), expected)
    torch.testing.assert_close(token_losses(batch, numbers).clipped, up | down)


def test_ce_gppo_keeps_a_bounded_gradient_beyond_the_clip_and_leaves_the_value() -> None:
    # below with A < 0, above with A > 0, inside, below with A > 0, above with A < 0
    batch = three_tokens(
        tuple(math.log(r) for r in (0.01, 50.0, 1.1, 0.01, 2.0)), (-1.0, 2.0, 1.0, 1.0, -1.0)
    )
    plain = settings("GRPO")
    kept = settings("GRPO", ce_grpo_beta_1=0.75, ce_grpo_beta_2=0.5)
    torch.testing.assert_close(token_losses(batch, kept).losses, token_losses(batch, plain).losses)
    expected = torch.tensor([0.75 * 0.8, -0.5 * 1.3 * 2.0, -1.1, -0.01, 2.0])
    torch.testing.assert_close(token_gradient(batch, kept), expected)
    zero = settings("GRPO", ce_grpo_beta_1=0.0)
    torch.testing.assert_close(token_gradient(batch, zero), token_gradient(batch, plain))


def test_extreme_log_ratios_stay_finite() -> None:
    batch = three_tokens((500.0, -500.0, 0.0), (-1.0, -1.0, 1.0), behavior=(0.0, -900.0, 900.0))
    for name in [name for name in LOSSES.names() if not LOSSES.get(name).compares]:
        numbers = LossSettings(loss_calculater=name)
        if numbers.loss.from_policy and not numbers.loss.compares_behavior:
            bounds = {"epsilon_higher": 0.1 if numbers.loss.clips else 0.0}
            numbers = settings(name, importance_correction="tis:1e30", old_logprobs="recompute", **bounds)
        assert torch.isfinite(token_losses(batch, numbers).losses).all()
        assert torch.isfinite(token_gradient(batch, numbers)).all()


def test_every_flag_of_the_loss_is_a_setting() -> None:
    settings = LossSettings.of(LossConfig())
    assert settings == LossSettings()


@pytest.mark.parametrize("name", ["DAPO", "Dr. GRPO", "dr_grpo", "REINFORCE++", "ppo"])
def test_a_published_loss_without_a_name_of_its_own_is_explained(name: str) -> None:
    with pytest.raises(ConfigError, match="GRPO") as refused:
        LossSettings(loss_calculater=name)
    assert "did you mean" not in str(refused.value.hint)


def test_an_unknown_loss_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'GSPO'"):
        LossSettings(loss_calculater="gspoo")


@pytest.mark.parametrize(
    "flags",
    [{"old_logprobs": "older"}, {"importance_correction": "tis:none"}, {"kl_estimator": "k4"}],
    ids=str,
)
def test_a_name_that_is_none_is_refused(flags: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(flags))} (is|has)"):
        LossSettings(**flags)
