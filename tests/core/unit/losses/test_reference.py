"""The pull towards a reference model: values, gradients, and what a step reports of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from token_batches import three_tokens, token_metrics
from torch import Tensor

from agentrl.losses.compute import WEIGHT_CAP, TokenMetrics, reference_kl, token_losses
from agentrl.losses.loss import TokenBatch
from agentrl.losses.settings import LossSettings


def a_batch(logprobs: Tensor, reference: Tensor | None = None) -> TokenBatch:
    zeros = (0.0,) * len(logprobs)
    return replace(three_tokens(zeros, zeros), logprobs=logprobs, reference_logprobs=reference)


def gradient(estimator: str, logprobs: list[float], reference: list[float]) -> tuple[Tensor, Tensor]:
    there = torch.tensor(logprobs, requires_grad=True)
    values = reference_kl(a_batch(there, torch.tensor(reference)), estimator)
    return values.detach(), torch.autograd.grad(values.sum(), there)[0]


def test_k3_is_never_negative_and_k1_is_the_log_ratio() -> None:
    values, slope = gradient("k3", [-1.0, -2.0, -0.5], [-1.0, -1.0, -1.5])
    assert values.tolist() == pytest.approx([0.0, math.e - 2, math.exp(-1.0)])
    assert slope.tolist() == pytest.approx([0.0, 1 - math.e, 1 - math.exp(-1.0)])
    values, slope = gradient("k1", [-1.0, -2.0, -0.5], [-1.0, -1.0, -1.5])
    assert values.tolist() == pytest.approx([0.0, -1.0, 1.0])
    assert slope.tolist() == pytest.approx([0.0, -1.0, 1.0])


def policies(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a policy over seven tokens, and the logprobs of a sampler and of a reference near it."""
    torch.manual_seed(seed)
    logits = torch.randn(7)
    sampler = torch.log_softmax(logits + 0.5 * torch.randn(7), 0)
    return logits.requires_grad_(), sampler, torch.log_softmax(torch.randn(7), 0)


def expectation(estimator: str, logits: Tensor, sampler: Tensor, reference: Tensor) -> tuple[float, Tensor]:
    """Value and gradient of the estimator, over every token that the sampler might have drawn."""
    logprobs = torch.log_softmax(logits, 0)
    batch = replace(a_batch(logprobs, reference), behavior_logprobs=sampler)
    mean = (sampler.exp() * reference_kl(batch, estimator)).sum()
    return float(mean.detach()), torch.autograd.grad(mean, logits)[0]


def divergence(logits: Tensor, reference: Tensor, *, reverse: bool = False) -> tuple[float, Tensor]:
    """KL(πθ‖π_ref), or KL(π_ref‖πθ) with ``reverse``, and its gradient."""
    logprobs = torch.log_softmax(logits, 0)
    terms = reference.exp() * (reference - logprobs) if reverse else logprobs.exp() * (logprobs - reference)
    value = terms.sum()
    return float(value.detach()), torch.autograd.grad(value, logits)[0]


@pytest.mark.parametrize("seed", range(3))
def test_each_estimator_has_the_gradient_of_its_divergence_on_policy(seed: int) -> None:
    logits, _, reference = policies(seed)
    own = torch.log_softmax(logits.detach(), 0)
    value, exact = divergence(logits, reference)
    for estimator in ("weighted_k3", "k1", "k2"):
        torch.testing.assert_close(expectation(estimator, logits, own, reference)[1], exact)
    for estimator in ("weighted_k3", "k1", "k3"):
        assert expectation(estimator, logits, own, reference)[0] == pytest.approx(value, rel=1e-5)
    _, reverse = divergence(logits, reference, reverse=True)
    torch.testing.assert_close(expectation("k3", logits, own, reference)[1], reverse)
    assert float((reverse - exact).norm() / exact.norm()) > 0.1


@pytest.mark.parametrize("seed", range(3))
def test_only_the_weighted_estimator_is_unbiased_off_policy(seed: int) -> None:
    logits, sampler, reference = policies(seed)
    value, exact = divergence(logits, reference)
    found, gradient = expectation("weighted_k3", logits, sampler, reference)
    assert found == pytest.approx(value, rel=1e-5)
    torch.testing.assert_close(gradient, exact)
    for estimator in ("k1", "k2", "k3"):
        biased = expectation(estimator, logits, sampler, reference)[1]
        assert float((biased - exact).norm() / exact.norm()) > 0.1


def test_the_weight_of_a_token_is_capped_and_its_gradient_stays() -> None:
    logprobs = torch.tensor([-0.1], requires_grad=True)
    batch = replace(a_batch(logprobs, torch.tensor([-1.1])), behavior_logprobs=torch.tensor([-9.0]))
    value = reference_kl(batch, "weighted_k3")
    (slope,) = torch.autograd.grad(value.sum(), logprobs)
    assert float(value.detach()) == pytest.approx(WEIGHT_CAP * math.exp(-1), rel=1e-5)
    assert float(slope) == pytest.approx(WEIGHT_CAP * 1.0, rel=1e-5)


def test_the_loss_has_the_weighted_pull_and_the_step_reports_it() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5])
    batch = a_batch(logprobs, torch.tensor([-1.0, -1.0, -1.5]))
    plain = token_losses(batch, LossSettings())
    pulled = token_losses(batch, LossSettings(kl_coef=0.5, kl_estimator="k3"))
    assert (pulled.losses - plain.losses).tolist() == pytest.approx([0.0, (math.e - 2) / 2, math.exp(-1) / 2])
    report = (token_metrics(batch, pulled, logprobs) + TokenMetrics()).report()
    assert report["kl_reference"] == pytest.approx((math.e - 2 + math.exp(-1)) / 3)
    assert "kl_reference" not in token_metrics(a_batch(logprobs), plain, logprobs).report()


def test_a_batch_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="no reference"):
        token_losses(a_batch(torch.zeros(2)), LossSettings(kl_coef=0.1))
