"""The bonus on the policy's entropy: its share of the loss, its reduction, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from token_batches import random_batch, step_loss

from agentrl.losses.compute import token_losses
from agentrl.losses.loss import LOSSES
from agentrl.losses.settings import LossSettings

POLICY_LOSSES = [name for name in LOSSES.names() if LOSSES.get(name).from_policy]


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_token_in_the_mask_gets_the_bonus_also_where_a_bound_holds(loss: str) -> None:
    entropy = torch.rand(24).requires_grad_()
    batch = replace(random_batch(1), entropy=entropy)
    settings = LossSettings(loss_calculater=loss, strict_in_bound=True, importance_correction="token_mask")
    plain, bonus = (token_losses(batch, replace(settings, entropy_coef=each)) for each in (0.0, 0.25))
    assert bool(bonus.masked.any())
    torch.testing.assert_close(bonus.losses, plain.losses - 0.25 * entropy)
    assert torch.equal(bonus.masked, plain.masked)
    assert not torch.autograd.grad(plain.losses.sum(), entropy, allow_unused=True)[0]


@pytest.mark.parametrize("token_level", [True, False])
def test_the_bonus_is_reduced_as_the_loss_is(token_level: bool) -> None:
    entropy = torch.rand(24).requires_grad_()
    batch = replace(random_batch(2), entropy=entropy, advantages=torch.zeros(24))
    settings = LossSettings(entropy_coef=0.5, token_level_loss=token_level)
    step_loss(batch, settings)[0].backward()
    lengths = torch.bincount(batch.row)[batch.row]
    expected = torch.full((24,), 1 / 24) if token_level else 1 / (lengths * batch.trajectories)
    torch.testing.assert_close(entropy.grad, -0.5 * expected)


def test_a_batch_without_entropies_is_refused() -> None:
    with pytest.raises(ValueError, match="no entropy"):
        token_losses(random_batch(0), LossSettings(entropy_coef=0.1))
