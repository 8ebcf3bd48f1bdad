"""On-policy distillation: golden values, its gradient is that of the reverse KL, and what it refuses."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from golden import VECTOR, batch_of
from parsed_flags import parsed
from token_batches import step_loss, token_metrics

from agentrl.errors import ConfigError
from agentrl.losses.compute import DIVERGENCE, token_losses
from agentrl.losses.loss import TokenBatch
from agentrl.losses.settings import LossSettings, check_loss

TEACHER = torch.tensor([-0.69315, -2.0, math.nan])
"""Twice the policy's probability of the first token, 1/e of the second's, none of the third's."""


def distilled(**flags: object) -> tuple[TokenBatch, LossSettings]:
    settings = LossSettings(epsilon=0.2, token_level_loss=True, old_logprobs="recompute", **flags)
    return dataclasses.replace(batch_of(VECTOR, settings), columns={"teacher": TEACHER}), settings


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"loss_calculater": "OPD"}, (-0.5 + 1.0 + 0.0) / 3),
        ({"loss_calculater": "OPD", "distill_coef": 2.0}, (-1.0 + 2.0 + 0.0) / 3),
        ({"loss_calculater": "GRPO", "distill_coef": 0.5}, (-0.75 + 1.5 - 2.4) / 3),
        ({"loss_calculater": "GRPO"}, (-0.5 + 1.0 - 2.4) / 3),
    ],
)
def test_golden_values_of_ratios_of_one_half_one_and_three_halves(
    flags: dict[str, object], expected: float
) -> None:
    batch, settings = distilled(**flags)
    assert step_loss(batch, settings)[0].item() == pytest.approx(expected, abs=1e-4)


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, requires_grad=True)
    teacher = torch.randn(7).log_softmax(0)
    policy = logits.log_softmax(0)
    divergence = (policy.exp() * (policy - teacher)).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    row = torch.zeros(7, dtype=torch.int64)
    batch = TokenBatch(
        logprobs=policy, old_logprobs=policy.detach(), behavior_logprobs=policy.detach(),
        advantages=torch.randn(7), row=row, version=row, age=row, mask=torch.ones(7, dtype=torch.bool),
        trajectories=1, columns={"teacher": teacher},
    )  # fmt: skip
    losses = token_losses(batch, LossSettings(loss_calculater="OPD")).losses
    (found,) = torch.autograd.grad((policy.detach().exp() * losses).sum(), logits)
    torch.testing.assert_close(found, expected)


def test_a_known_divergence_takes_the_place_of_the_sampled_tokens_judgement() -> None:
    batch, settings = distilled(loss_calculater="OPD", distill_coef=0.5)
    known = torch.tensor([0.7, 0.0, 0.3], requires_grad=True)
    batch = dataclasses.replace(batch, columns={**batch.columns, DIVERGENCE: known})
    losses = token_losses(batch, settings).losses
    assert losses.tolist() == pytest.approx([0.35, 0.5, 0.15], abs=1e-4)
    assert torch.autograd.grad(losses.sum(), known)[0].tolist() == [0.5] * 3


def test_the_divergence_from_the_teacher_is_reported_and_needs_its_column() -> None:
    batch, settings = distilled(loss_calculater="OPD")
    report = token_metrics(batch, token_losses(batch, settings), batch.logprobs).report()
    assert report["kl_teacher"] == pytest.approx((-1.0 + 1.0) / 2, abs=1e-4)
    assert report["taught_fraction"] == pytest.approx(2 / 3)
    untaught = dataclasses.replace(batch, columns={"teacher": torch.tensor([-0.69315, math.nan, math.nan])})
    one = token_metrics(untaught, token_losses(untaught, settings), batch.logprobs)
    assert one.report()["kl_teacher"] == pytest.approx(-1.0, abs=1e-4)
    both = one + token_metrics(batch, token_losses(batch, settings), batch.logprobs)
    assert both.report()["kl_teacher"] == pytest.approx((-1.0 - 1.0 + 1.0) / 3, abs=1e-4)
    alone = batch_of(VECTOR, settings)
    plain = token_metrics(alone, token_losses(alone, LossSettings()), batch.logprobs)
    assert "kl_teacher" not in plain.report()
    with pytest.raises(ValueError, match="no column 'teacher': the run needs --columns teacher"):
        token_losses(batch_of(VECTOR, settings), settings)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--loss_calculater OPD", "reads the logprobs of a teacher, and --columns is ''"),
        ("--distill_coef 0.1", "reads the logprobs of a teacher"),
        ("--loss_calculater OPD --columns teacher", "drops trajectories by them"),
        ("--loss_calculater OPD --columns teacher --drop_zero_advantage false", "drops trajectories by them"),
        ("--loss_calculater CrossEntropy --distill_coef 1", "does not correct for the policy"),
    ],
)
def test_flags_without_a_teacher_or_that_drop_by_score_are_refused(words: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_loss(parsed(*words.split()))


@pytest.mark.parametrize(
    "words",
    [
        "--loss_calculater OPD --columns teacher --drop_zero_advantage false --min_score_spread 0",
        "--distill_coef 0.1 --columns teacher,mine",
    ],
)
def test_flags_that_distil_are_accepted(words: str) -> None:
    check_loss(parsed(*words.split()))
