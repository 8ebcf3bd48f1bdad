"""SAPO against its formula: the gate, its gradient, and its two temperatures."""

from __future__ import annotations

import math

import pytest
import torch
from token_batches import random_batch, three_tokens, token_gradient

from agentrl.losses.compute import token_losses
from agentrl.losses.settings import LossSettings


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("positive", "negative"), [(None, None), (0.5, 3.0)])
def test_the_gradient_is_grpos_times_a_gate_that_is_one_at_ratio_one(
    seed: int, positive: float | None, negative: float | None
) -> None:
    batch = random_batch(seed)
    given = {"sapo_tau_pos": positive, "sapo_tau_neg": negative} if positive else {}
    settings = LossSettings(loss_calculater="SAPO", **given)  # type: ignore[arg-type]
    result = token_losses(batch, settings)
    ratio = torch.exp(batch.logprobs.detach() - batch.old_logprobs)
    tau = torch.where(batch.advantages > 0, positive or 1.0, negative or 1.05)
    p = torch.sigmoid(tau * (ratio - 1))
    expected = -4 * p * (1 - p) * ratio * batch.advantages
    torch.testing.assert_close(token_gradient(batch, settings), expected)
    assert not result.clipped.any()
    assert not result.masked.any()


def test_values_by_hand() -> None:
    batch = three_tokens((math.log(0.5), 0.0, math.log(1.5)), (1.0, -1.0, 2.0))
    losses = token_losses(batch, LossSettings(loss_calculater="SAPO")).losses
    assert losses.tolist() == pytest.approx([-1.510163, 4 / 1.05 / 2, -4.979675], abs=1e-5)


def test_the_paper_s_reduction_is_the_mean_over_trajectories_without_bounds() -> None:
    settings = LossSettings(loss_calculater="SAPO")
    assert (settings.sapo_tau_pos, settings.sapo_tau_neg) == (1.0, 1.05)
    assert (settings.token_level_loss, settings.skip_length_normalization) == (False, False)
    assert settings.importance_weight_cap_ratio == math.inf
    assert not settings.strict_in_bound
