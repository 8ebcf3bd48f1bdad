"""The pull towards a reference model: values, gradients, and what a step reports of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from token_batches import three_tokens
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.losses.batch import TokenBatch
from agentrl.losses.metrics import TokenMetrics
from agentrl.losses.reference import reference_kl
from agentrl.losses.registry import token_losses
from agentrl.losses.settings import LossSettings


def batch_of(logprobs: Tensor) -> TokenBatch:
    zeros = (0.0,) * len(logprobs)
    return replace(three_tokens(zeros, zeros), logprobs=logprobs)


def a_batch(logprobs: Tensor, reference: Tensor | None) -> TokenBatch:
    return replace(batch_of(logprobs), reference_logprobs=reference)


def gradient(estimator: str, logprobs: list[float], reference: list[float]) -> tuple[Tensor, Tensor]:
    there = torch.tensor(logprobs, requires_grad=True)
    values = reference_kl(a_batch(there, torch.tensor(reference)), estimator)
    values.sum().backward()
    assert there.grad is not None
    return values.detach(), there.grad


def test_k3_is_never_negative_and_k1_is_the_log_ratio() -> None:
    values, slope = gradient("k3", [-1.0, -2.0, -0.5], [-1.0, -1.0, -1.5])
    assert values.tolist() == pytest.approx([0.0, math.e - 2, math.exp(-1.0)])
    assert slope.tolist() == pytest.approx([0.0, 1 - math.e, 1 - math.exp(-1.0)])
    values, slope = gradient("k1", [-1.0, -2.0, -0.5], [-1.0, -1.0, -1.5])
    assert values.tolist() == pytest.approx([0.0, -1.0, 1.0])
    assert slope.tolist() == pytest.approx([0.0, -1.0, 1.0])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_values_are_the_divergence_and_k1_has_its_gradient_on_average(estimator: str) -> None:
    torch.manual_seed(0)
    logits, reference = torch.randn(5).requires_grad_(), torch.log_softmax(torch.randn(5), 0)
    logprobs = torch.log_softmax(logits, 0)
    divergence = (logprobs.exp() * (logprobs - reference)).sum()
    (exact,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    estimate = reference_kl(a_batch(logprobs, reference), estimator)
    weights = logprobs.exp().detach()
    assert float((weights * estimate).detach().sum()) == pytest.approx(float(divergence.detach()), rel=1e-5)
    if estimator == "k1":
        (found,) = torch.autograd.grad((weights * estimate).sum(), logits)
        assert found.tolist() == pytest.approx(exact.tolist(), abs=1e-6)


def test_the_loss_has_the_weighted_pull_and_the_step_reports_it() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5])
    batch = a_batch(logprobs, torch.tensor([-1.0, -1.0, -1.5]))
    plain = token_losses(batch, LossSettings())
    pulled = token_losses(batch, LossSettings(kl_coef=0.5))
    assert (pulled.losses - plain.losses).tolist() == pytest.approx([0.0, (math.e - 2) / 2, math.exp(-1) / 2])
    report = (TokenMetrics.of(batch, pulled, logprobs) + TokenMetrics()).report()
    assert report["kl_reference"] == pytest.approx((math.e - 2 + math.exp(-1)) / 3)
    assert "kl_reference" not in TokenMetrics.of(batch_of(logprobs), plain, logprobs).report()


def test_wrong_settings_are_told() -> None:
    for flags in ({"kl_coef": -1.0}, {"kl_coef": math.nan}, {"kl_estimator": "k2"}):
        with pytest.raises(ConfigError, match="kl_"):
            LossSettings(**flags)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="supervised"):
        LossSettings(kl_coef=0.1, loss_calculater="CrossEntropy")
    with pytest.raises(ValueError, match="no reference"):
        token_losses(a_batch(torch.zeros(2), None), LossSettings(kl_coef=0.1))
