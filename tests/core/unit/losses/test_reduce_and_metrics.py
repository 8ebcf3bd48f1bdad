"""The reduction over a step, where π_old comes from, and what a step reports."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from token_batches import random_batch, step_loss, three_tokens, token_metrics

from agentrl.errors import ConfigError
from agentrl.losses.compute import Denominators, TokenMetrics, old_logprobs, reduce_losses, token_losses
from agentrl.losses.loss import LOSSES, TokenBatch
from agentrl.losses.settings import LossSettings

PER_TRAJECTORY = [name for name in LOSSES.names() if not LOSSES.get(name).compares]
"""Losses of a trajectory by itself; ``test_preference_exactness.py`` has those that compare some."""

REDUCTIONS = [(True, False, None), (False, False, None), (False, True, None), (False, True, 7)]


def take(batch: TokenBatch, rows: list[int]) -> TokenBatch:
    """The micro-batch of some trajectories, their rows numbered from 0."""
    wanted = torch.isin(batch.row, torch.tensor(rows))
    new_row = torch.full((batch.trajectories,), -1).scatter(0, torch.tensor(rows), torch.arange(len(rows)))
    names = ("logprobs", "old_logprobs", "behavior_logprobs", "advantages", "version", "age", "mask")
    return TokenBatch(
        **{name: getattr(batch, name)[wanted] for name in names},
        row=new_row[batch.row[wanted]], trajectories=len(rows),
        columns={name: values[wanted] for name, values in batch.columns.items()},
    )  # fmt: skip


def step(
    batch: TokenBatch, parts: list[list[int]], settings: LossSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of a step that is split into ``parts``."""
    micro = [take(batch, rows) for rows in parts]
    whole = Denominators(0, 0)
    for part in micro:
        whole = whole + Denominators(int(part.mask.sum()), len(part.row[part.mask].unique()))
    shares = [
        reduce_losses(
            token_losses(part, settings).losses, part.mask, part.row, part.trajectories, whole, settings
        )
        for part in micro
    ]
    loss = torch.stack(shares).sum()
    (grad,) = torch.autograd.grad(loss, batch.logprobs)
    return loss.detach(), grad


@pytest.mark.exactness
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", PER_TRAJECTORY)
def test_micro_batches_change_neither_loss_nor_gradient(
    loss: str, reduction: tuple[bool, bool, int | None]
) -> None:
    token_level, skip, divisor = reduction
    settings = LossSettings(
        loss_calculater=loss, token_level_loss=token_level, skip_length_normalization=skip,
        loss_length_divisor=divisor,
    )  # fmt: skip
    if settings.loss.from_policy:
        ratio = {"old_logprobs": "behavior"} if settings.loss.compares_behavior else {
            "importance_correction": "tis,seq_mask:0.8:1.2,seq_kl:0.2", "old_logprobs": "recompute",
        }  # fmt: skip
        settings = replace(
            settings, strict_in_bound=False, importance_weight_cap_ratio=4.0, out_of_date_decay=0.3, **ratio
        )
    batch = random_batch(11, tokens=60, trajectories=6)
    batch = replace(batch, mask=torch.rand(60, generator=torch.Generator().manual_seed(5)) > 0.2)
    whole = step(batch, [[0, 1, 2, 3, 4, 5]], settings)
    for parts in ([[0, 1, 2], [3, 4, 5]], [[5, 1], [0], [4, 2, 3]], [[i] for i in range(6)]):
        split = step(batch, parts, settings)
        torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-6)


def test_reductions_by_hand() -> None:
    losses = torch.tensor([1.0, 3.0, 5.0, 100.0])
    mask = torch.tensor([True, True, True, False])
    row = torch.tensor([0, 0, 1, 1])
    whole = Denominators(int(mask.sum()), len(row[mask].unique()))
    assert whole == Denominators(3, 2)

    def value(token_level: bool, skip: bool) -> float:
        settings = LossSettings(token_level_loss=token_level, skip_length_normalization=skip)
        return float(reduce_losses(losses, mask, row, 2, whole, settings))

    assert value(True, False) == pytest.approx(3.0)
    assert value(False, False) == pytest.approx((2.0 + 5.0) / 2)
    assert value(False, True) == pytest.approx((4.0 + 5.0) / 2)


def test_a_constant_length_divides_a_trajectorys_sum_whatever_its_own_length_is() -> None:
    losses, row = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 1])
    mask = torch.ones(3, dtype=torch.bool)
    whole = Denominators(int(mask.sum()), len(row[mask].unique()))
    for skip in (False, True):
        settings = LossSettings(
            token_level_loss=False, skip_length_normalization=skip, loss_length_divisor=10
        )
        found = float(reduce_losses(losses, mask, row, 2, whole, settings))
        assert found == pytest.approx((4.0 / 10 + 5.0 / 10) / 2)


def test_corrections_mask_numerators_and_leave_denominators() -> None:
    batch = three_tokens((0.0, 0.0), (1.0, 1.0), behavior=(0.0, -math.log(9.0)))
    settings = LossSettings(importance_correction="token_mask", token_level_loss=True)
    assert step_loss(batch, settings)[0].item() == pytest.approx(-0.5)


def test_old_logprobs() -> None:
    current, behavior = torch.tensor([-1.0, -1.0, -1.0]).requires_grad_(), torch.tensor([-2.0, -2.0, -2.0])
    age = torch.tensor([0, 1, 3])
    expected = {"behavior": [-2.0] * 3, "recompute": [-1.0] * 3, "loglinear": [-2.0, -1.5, -1.25]}
    for method, values in expected.items():
        old = old_logprobs(method, current, behavior, age)
        torch.testing.assert_close(old, torch.tensor(values))
        assert not old.requires_grad
    with pytest.raises(ConfigError, match="--old_logprobs is 'x'"):
        old_logprobs("x", current, behavior, age)


def test_metrics_by_hand() -> None:
    batch = three_tokens(
        (math.log(0.5), math.log(2.0), 0.0), (1.0, 1.0, 1.0), version=(3, 3, 1), age=(0, 0, 2)
    )
    result = token_losses(batch, LossSettings(importance_weight_cap_ratio=math.inf))
    report = token_metrics(batch, result, torch.tensor([1.0, 2.0, 3.0])).report()
    assert report["ratio_mean"] == pytest.approx(3.5 / 3)
    assert report["ratio_max"] == pytest.approx(2.0)
    assert report["clipped_fraction"] == pytest.approx(1 / 3)
    assert report["masked_fraction"] == 0.0
    assert report["kl_k1"] == pytest.approx(0.0, abs=1e-6)
    assert report["kl_k3"] == pytest.approx((0.5 - 1 + math.log(2) + 2 - 1 - math.log(2)) / 3)
    assert report["entropy"] == pytest.approx(2.0)
    assert report["effective_sample_size"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert report["staleness_histogram"] == {"0": 2.0, "2": 1.0}
    assert report["staleness_mean"] == pytest.approx(2 / 3)
    assert report["staleness_max"] == 2.0
    assert report["version_fractions"] == {"1": pytest.approx(1 / 3), "3": pytest.approx(2 / 3)}


def test_metrics_add_up_over_micro_batches() -> None:
    settings = LossSettings(importance_correction="icepop")
    batch = random_batch(2, tokens=40, trajectories=5)
    entropy = torch.rand(40)

    def measure(part: TokenBatch, rows: list[int]) -> TokenMetrics:
        wanted = torch.isin(batch.row, torch.tensor(rows))
        return token_metrics(part, token_losses(part, settings), entropy[wanted])

    whole = measure(batch, [0, 1, 2, 3, 4]).report()
    parts = measure(take(batch, [0, 3]), [0, 3]) + measure(take(batch, [1, 2, 4]), [1, 2, 4])
    joined = (TokenMetrics() + parts).report()
    assert joined.keys() == whole.keys()
    for name, value in whole.items():
        assert joined[name] == pytest.approx(value), name


def test_no_tokens_report_nothing() -> None:
    batch = replace(random_batch(0), mask=torch.zeros(24, dtype=torch.bool))
    result = token_losses(batch, LossSettings())
    assert token_metrics(batch, result, torch.zeros(24)).report() == {}
