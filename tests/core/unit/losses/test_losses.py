"""Per-token losses, their gradients and what is added to them, against formulas written out by hand."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from golden import VECTOR, batch_of
from hypothesis import given
from hypothesis import strategies as st
from parsed_flags import parsed
from token_batches import random_batch, step_loss, three_tokens, token_gradient, token_metrics
from torch import Tensor

from agentrl.config.schema import LossConfig
from agentrl.errors import ConfigError
from agentrl.losses.compute import DIVERGENCE, WEIGHT_CAP, TokenMetrics, reference_kl, token_losses
from agentrl.losses.loss import LOSSES, TokenBatch, largest_within
from agentrl.losses.settings import LossSettings, check_loss

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


def test_vespo_fades_on_both_sides_of_the_trajectorys_ratio_and_takes_its_own_numbers() -> None:
    """log W is the sum over the trajectory; φ is 1 at W = 1, and k and λ are chosen by the sign of A."""
    numbers = settings("VESPO", epsilon=0.2, epsilon_higher=0.0, loss_args='{"k_neg": 5, "lambda_neg": 0.5}')
    for sign, k, rate in ((1.0, 2.0, 3.0), (-1.0, 5.0, 0.5)):
        for log_w in (-3.0, 0.0, 0.7, 8.0):
            batch = three_tokens((log_w / 3,) * 3, (sign,) * 3)
            phi = math.exp(k * log_w + rate * (1 - math.exp(log_w)))
            assert token_gradient(batch, numbers).tolist() == pytest.approx([-sign * phi] * 3, rel=1e-4)


@pytest.mark.parametrize(
    "given", ['{"k_pos": -1}', '{"lambda_neg": 0}', '{"k_neg": Infinity}', '{"lambda_pos": NaN}']
)
def test_vespo_refuses_numbers_whose_weight_does_not_fade(given: str) -> None:
    with pytest.raises(ConfigError, match="needs k of 0 or more and λ above 0"):
        LossSettings(loss_calculater="VESPO", loss_args=given)


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


@pytest.mark.parametrize("name", [name for name in LOSSES.names() if LOSSES.get(name).follows_advantage])
@pytest.mark.parametrize("betas", [None, 0.5])
def test_a_loss_that_follows_the_advantage_is_zero_with_its_gradient_without_one(
    name: str, betas: float | None
) -> None:
    loss = LOSSES.get(name)
    more: dict[str, Any] = {key: betas for key in loss.parameters if key.startswith("ce_grpo")}
    settings = LossSettings(loss_calculater=name, strict_in_bound=False, **more)
    batch = random_batch(3, spread=2.0)
    batch = replace(batch, advantages=batch.advantages.where(batch.row > 1, 0.0))
    result = token_losses(batch, settings)
    result.losses.sum().backward()
    idle = batch.row <= 1
    assert batch.logprobs.grad is not None
    assert not result.losses[idle].any()
    assert not batch.logprobs.grad[idle].any()
    assert batch.logprobs.grad[~idle].any()


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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("positive", "negative"), [(None, None), (0.5, 3.0)])
def test_the_gradient_of_sapo_is_grpos_times_a_gate_that_is_one_at_ratio_one(
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


def test_sapo_by_hand() -> None:
    batch = three_tokens((math.log(0.5), 0.0, math.log(1.5)), (1.0, -1.0, 2.0))
    losses = token_losses(batch, LossSettings(loss_calculater="SAPO")).losses
    assert losses.tolist() == pytest.approx([-1.510163, 4 / 1.05 / 2, -4.979675], abs=1e-5)


def test_sapos_reduction_is_the_mean_over_trajectories_without_bounds() -> None:
    settings = LossSettings(loss_calculater="SAPO")
    assert (settings.sapo_tau_pos, settings.sapo_tau_neg) == (1.0, 1.05)
    assert (settings.token_level_loss, settings.skip_length_normalization) == (False, False)
    assert settings.importance_weight_cap_ratio == math.inf
    assert not settings.strict_in_bound


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


TEACHER = torch.tensor([-0.69315, -2.0, math.nan])
"""Twice the policy's probability of the first token, 1/e of the second's, none of the third's."""


def distilled(**flags: object) -> tuple[TokenBatch, LossSettings]:
    settings = LossSettings(epsilon=0.2, token_level_loss=True, old_logprobs="recompute", **flags)
    return replace(batch_of(VECTOR, settings), columns={"teacher": TEACHER}), settings


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
    batch = replace(batch, columns={**batch.columns, DIVERGENCE: known})
    losses = token_losses(batch, settings).losses
    assert losses.tolist() == pytest.approx([0.35, 0.5, 0.15], abs=1e-4)
    assert torch.autograd.grad(losses.sum(), known)[0].tolist() == [0.5] * 3


def test_the_divergence_from_the_teacher_is_reported_and_needs_its_column() -> None:
    batch, settings = distilled(loss_calculater="OPD")
    report = token_metrics(batch, token_losses(batch, settings), batch.logprobs).report()
    assert report["kl_teacher"] == pytest.approx((-1.0 + 1.0) / 2, abs=1e-4)
    assert report["taught_fraction"] == pytest.approx(2 / 3)
    untaught = replace(batch, columns={"teacher": torch.tensor([-0.69315, math.nan, math.nan])})
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


def test_m2po_drops_the_largest_moments_until_the_mean_is_within_bounds() -> None:
    """Those that moved against their advantage stay, however far; equal ones go together."""
    moved = (0.5, 0.3, 0.3, 0.1, -2.0, 3.0)
    batch = three_tokens(moved, (1.0, 1.0, 1.0, 1.0, 1.0, -1.0))
    # Squares of the active tokens, and their means from below: 0.01, 0.09 and 0.09 (0.063), 0.25 (0.11).
    for threshold, dropped in ((0.2, 0), (0.1101, 0), (0.1, 1), (0.05, 3), (0.02, 3), (0.005, 4)):
        result = token_losses(batch, LossSettings(loss_calculater="M2PO", m2_threshold=threshold))
        assert result.clipped.tolist() == [number < dropped for number in range(6)]
    gradient = token_gradient(batch, LossSettings(loss_calculater="M2PO", m2_threshold=0.1))
    assert gradient[0] == 0
    assert gradient[4].item() == pytest.approx(-math.exp(-2.0))
    with pytest.raises(ConfigError, match="adds a teacher"):
        LossSettings(loss_calculater="M2PO", distill_coef=0.5)


@given(
    st.lists(st.lists(st.floats(0, 9, width=32), max_size=6), min_size=1, max_size=3),
    st.sampled_from([0.0, 0.5, 2.0]),
)
def test_the_largest_value_within_a_mean_of_one_is_found_over_all_parts(
    parts: list[list[float]], more: float
) -> None:
    values = sorted(value + more for part in parts for value in part if value + more > 0)
    kept = [c for c in values if statistics.fmean(v for v in values if v <= c) <= 1]
    limit = largest_within([torch.tensor([value + more for value in part]) for part in parts])
    assert [value for value in values if torch.tensor(value, dtype=torch.float32) <= limit] == kept
    assert (limit == math.inf) == (len(kept) == len(values))


def test_values_that_are_no_numbers_count_nowhere() -> None:
    assert largest_within([torch.tensor([math.nan, 0.5])]) == math.inf
    assert largest_within([torch.tensor([])]) == math.inf
    assert 0.5 <= largest_within([torch.tensor([math.inf, 0.5])]) < math.inf
