"""Every golden value of docs/losses.md; that of each recipe also by a formula in plain arithmetic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from golden import GOLDEN, RELATIVE, STEP, TOLERANCE, Golden, batch_of
from recipes import CONFIGS, RECIPES, table
from token_batches import step_loss

from agentrl.config.agreement import require_trainable
from agentrl.config.schema import LossConfig, RunConfig
from agentrl.losses.settings import LossSettings, check_loss

ROOT = Path(__file__).parents[4]
TOKENS = range(len(STEP.row))
ROWS = [[t for t in TOKENS if STEP.row[t] == row] for row in sorted(set(STEP.row))]
A = STEP.advantages
LOG_R = [new - old for new, old in zip(STEP.logprobs, STEP.start, strict=True)]
LOG_W = [old - mu for old, mu in zip(STEP.start, STEP.behavior, strict=True)]
LOG_RHO = [new - mu for new, mu in zip(STEP.logprobs, STEP.behavior, strict=True)]

PerToken = Callable[[int], float]


def over_tokens(loss: PerToken) -> float:
    return sum(loss(t) for t in TOKENS) / len(TOKENS)


def over_trajectories(loss: PerToken) -> float:
    return sum(sum(loss(t) for t in row) / len(row) for row in ROWS) / len(ROWS)


def summed(loss: PerToken) -> float:
    return sum(loss(t) for t in TOKENS) / len(ROWS)


def row_of(t: int) -> list[int]:
    return next(row for row in ROWS if t in row)


def mean(values: list[float], t: int) -> float:
    return sum(values[u] for u in row_of(t)) / len(row_of(t))


def ppo(
    log: list[float], low: float, high: float, dual: float = math.inf, advantages: Sequence[float] = A
) -> PerToken:
    def loss(t: int) -> float:
        ratio, advantage = math.exp(log[t]), advantages[t]
        worse = max(-ratio * advantage, -min(max(ratio, low), high) * advantage)
        return min(worse, dual * -advantage) if advantage < 0 else worse

    return loss


def times(loss: PerToken, weight: PerToken) -> PerToken:
    return lambda t: loss(t) * weight(t)


def capped(log: list[float], cap: float) -> PerToken:
    return lambda t: min(math.exp(log[t]), cap)


def inside(log: list[float], low: float, high: float) -> PerToken:
    return lambda t: float(low <= math.exp(log[t]) <= high)


def within_kl(limit: float) -> PerToken:
    k3 = [math.exp(x) - 1 - x for x in LOG_RHO]
    return lambda t: float(mean(k3, t) <= limit)


def not_too_far(low: float, high: float) -> PerToken:
    """0 for a token that has moved beyond the bound in the direction of its advantage."""

    def keep(t: int) -> float:
        rho = math.exp(LOG_RHO[t])
        return float(not ((A[t] > 0 and rho > high) or (A[t] < 0 and rho < low)))

    return keep


def reinforce(weight: PerToken) -> PerToken:
    return lambda t: -weight(t) * A[t] * STEP.logprobs[t]


def k3_to_reference(t: int) -> float:
    d = STEP.logprobs[t] - STEP.reference[t]
    return math.exp(-d) - 1 + d


def k2_to_reference(t: int) -> float:
    return (STEP.logprobs[t] - STEP.reference[t]) ** 2 / 2


def plus(one: PerToken, other: PerToken, weight: float) -> PerToken:
    return lambda t: one(t) + weight * other(t)


WHITE = [(a - statistics.fmean(A)) / statistics.pstdev(A) for a in A]
"""Advantages of REINFORCE++: whitened over the step's tokens."""
INTERPOLATED = [w * age / (age + 1) for w, age in zip(LOG_W, STEP.age, strict=True)]
"""log π_old/μ of A-3PO."""
REST = [rho - old for rho, old in zip(LOG_RHO, INTERPOLATED, strict=True)]
MEAN_R = [mean(LOG_R, t) for t in TOKENS]
MEAN_RHO = [mean(LOG_RHO, t) for t in TOKENS]
MEAN_W = [mean(LOG_W, t) for t in TOKENS]
PRODUCT_W = [sum(LOG_W[u] for u in row_of(t)) for t in TOKENS]
GRPO = ppo(LOG_RHO, 0.8, 1.2)
RECOMPUTED = ppo(LOG_R, 0.8, 1.2)
VERL = ppo(LOG_R, 0.8, 1.2, dual=3.0)
BYPASS = ppo(LOG_RHO, 0.8, 1.2, dual=3.0)
MINIRL = summed(times(reinforce(capped(LOG_RHO, math.inf)), not_too_far(0.8, 1.3)))


def gated(log: list[float], positive: float, negative: float) -> PerToken:
    def loss(t: int) -> float:
        tau = positive if A[t] > 0 else negative
        return -A[t] * 4 / tau / (1 + math.exp(-tau * (math.exp(log[t]) - 1)))

    return loss


def binary_tv(low: float, high: float) -> PerToken:
    """DPPO: the weighted policy gradient, 0 where a probability moved too far towards its advantage."""

    def loss(t: int) -> float:
        moved = math.exp(STEP.logprobs[t]) - math.exp(STEP.behavior[t])
        too_far = moved > high if A[t] > 0 else moved < -low
        return 0.0 if too_far else -math.exp(LOG_RHO[t]) * A[t]

    return loss


def unclipped(t: int) -> float:
    return -math.exp(LOG_RHO[t]) * A[t]


def near(limit: float) -> PerToken:
    """IPO: 0 for a token whose probability is more than ``limit`` from the sampler's, on either side."""
    return lambda t: float(abs(math.exp(STEP.logprobs[t]) - math.exp(STEP.behavior[t])) <= limit)


def binary_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def within_binary_kl(limit: float) -> PerToken:
    """KPop: 0 for a token whose yes or no has a KL above ``limit`` in either direction."""

    def keep(t: int) -> float:
        p, q = math.exp(STEP.start[t]), math.exp(STEP.behavior[t])
        return float(binary_kl(p, q) <= limit and binary_kl(q, p) <= limit)

    return keep


def within_second_moment(limit: float) -> PerToken:
    """M2PO, Algorithm 1: drop the largest (log ρ)² of active tokens while their mean is above the limit."""
    active = sorted((t for t in TOKENS if LOG_RHO[t] * A[t] > 0), key=lambda t: LOG_RHO[t] ** 2)
    while active and statistics.fmean(LOG_RHO[t] ** 2 for t in active) > limit:
        active.pop()
    return lambda t: float(t in active or LOG_RHO[t] * A[t] <= 0)


def gamma_weight(t: int) -> float:
    """VESPO: φ(W) of the product W of the trajectory's ratios, with φ(1) = 1."""
    k, rate = (2.0, 3.0) if A[t] >= 0 else (3.0, 2.0)
    w = math.exp(sum(LOG_RHO[u] for u in row_of(t)))
    return math.exp(rate) * w**k * math.exp(-rate * w)


EXPECTED = {
    "dppo": over_tokens(binary_tv(0.2, 0.2)),
    "prime-rl-dppo": over_tokens(plus(binary_tv(0.2, 0.2), lambda t: LOG_RHO[t] ** 2, 0.001)),
    "grpo": over_trajectories(GRPO),
    "grpo-kl": over_trajectories(plus(GRPO, k3_to_reference, 0.04)),
    "dapo": over_tokens(ppo(LOG_RHO, 0.8, 1.28)),
    "dr-grpo": summed(GRPO) / 8192,
    "rloo": summed(GRPO),
    "sapo": over_trajectories(gated(LOG_RHO, 1.0, 1.05)),
    "gspo": over_trajectories(ppo(MEAN_RHO, 1 - 3e-4, 1 + 4e-4)),
    "cispo": over_tokens(reinforce(capped(LOG_RHO, 5.0))),
    "reinforce++": over_tokens(ppo(LOG_RHO, 0.8, 1.2, advantages=WHITE)),
    "reinforce++-baseline": over_tokens(
        plus(ppo(LOG_RHO, 0.8, 1.2, advantages=WHITE), k2_to_reference, 0.01)
    ),
    "minirl": MINIRL,
    "deepseek-kl": over_trajectories(plus(GRPO, times(k3_to_reference, capped(LOG_RHO, 10.0)), 0.04)),
    "verl": over_tokens(VERL),
    "gdpo": over_tokens(ppo(LOG_R, 0.8, 1.2, dual=3.0, advantages=WHITE)),
    "gigpo": over_tokens(plus(VERL, k3_to_reference, 0.01)),
    "ppo": over_tokens(ppo(LOG_R, 0.8, 1.2, dual=3.0, advantages=WHITE)),
    "verl-gspo": over_trajectories(ppo(MEAN_R, 1 - 3e-4, 1 + 4e-4)),
    "verl-decoupled": over_tokens(times(VERL, capped(LOG_W, 2.0))),
    "verl-bypass": over_tokens(times(BYPASS, inside(LOG_RHO, 0.5, 2.0))),
    "verl-bypass-kl": over_tokens(times(BYPASS, within_kl(0.1))),
    "nemo-rl": over_tokens(plus(times(RECOMPUTED, capped(LOG_W, math.inf)), k2_to_reference, 0.01)),
    "skyrl": over_tokens(plus(RECOMPUTED, k3_to_reference, 0.001)),
    "areal": over_tokens(times(times(RECOMPUTED, capped(LOG_W, math.inf)), inside(LOG_W, 0.0, 5.0))),
    "areal-a3po": over_tokens(
        times(times(ppo(REST, 0.8, 1.2), capped(INTERPOLATED, math.inf)), inside(INTERPOLATED, 0.0, 5.0))
    ),
    "slime": over_trajectories(times(ppo(LOG_R, 0.8, 1.28), capped(LOG_W, 2.0))),
    "trl": over_tokens(times(times(RECOMPUTED, capped(PRODUCT_W, math.inf)), inside(PRODUCT_W, 0.0, 3.0))),
    "trl-truncate": over_tokens(times(RECOMPUTED, capped(PRODUCT_W, 3.0))),
    "original-grpo": over_tokens(times(ppo(LOG_RHO, 0.8, 1.3), not_too_far(0.2, 2.2))),
    "original-minirl": MINIRL,
    "prime-rl": over_tokens(times(unclipped, near(0.3))),
    "areal-kpop": over_tokens(times(times(RECOMPUTED, capped(LOG_W, math.inf)), within_binary_kl(0.1))),
    "vespo": over_tokens(reinforce(gamma_weight)),
    "m2po": over_tokens(times(unclipped, within_second_moment(0.04))),
}


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.name)
def test_training_computes_the_golden_value(case: Golden) -> None:
    loss, result = step_loss(batch_of(case.example, case.settings), case.settings)
    rel, abs = (RELATIVE, None) if case.name in RECIPES else (None, TOLERANCE)
    assert loss.item() == pytest.approx(case.expected, rel=rel, abs=abs)
    assert case.kept in (None, tuple((~(result.masked | result.clipped)).int().tolist()))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipes_golden_value_is_its_formula(name: str) -> None:
    assert RECIPES[name].golden == pytest.approx(EXPECTED[name], rel=RELATIVE)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_starts_a_run(name: str) -> None:
    configs = CONFIGS[name]
    require_trainable(configs)
    check_loss(configs)
    assert configs[RunConfig].recipe == name
    assert configs.given == {"recipe", *RECIPES[name].flags}


def test_recipes_that_differ_in_flags_differ_in_value() -> None:
    values = sorted(
        recipe.golden or 0 for name, recipe in RECIPES.items() if name not in ("original-minirl", "gdpo")
    )
    assert min(later - earlier for earlier, later in pairwise(values)) > 3 * TOLERANCE


def test_the_page_shows_the_table() -> None:
    assert table() in (ROOT / "docs/losses.md").read_text(encoding="utf-8")


def cosine(flags: LossSettings, theirs: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Of the gradients with respect to every token's logprob, ours and another formula's."""
    batch = batch_of(STEP, flags)
    loss, _ = step_loss(batch, flags)
    (ours,) = torch.autograd.grad(loss, batch.logprobs)
    logprobs = batch.logprobs.detach().requires_grad_()
    (other,) = torch.autograd.grad(theirs(logprobs), logprobs)
    torch.testing.assert_close(ours, other)
    return float(torch.nn.functional.cosine_similarity(ours, other, dim=0))


def test_gspo_by_its_name_has_verls_gradient() -> None:
    """verl: the surrogate on s, clip_ratio_low 3e-4 and clip_ratio_high 4e-4, a mean per sequence."""
    start, advantages = torch.tensor(STEP.start), torch.tensor(A)

    def theirs(logprobs: torch.Tensor) -> torch.Tensor:
        losses = []
        for row in ROWS:
            s = torch.exp((logprobs - start)[row].mean())  # its gradient is 1/|row| for each token
            losses.append(
                torch.maximum(-s * advantages[row[0]], -s.clamp(1 - 3e-4, 1 + 4e-4) * advantages[row[0]])
            )
        return torch.stack(losses).mean()

    assert cosine(LossSettings(loss_calculater="GSPO", old_logprobs="recompute"), theirs) > 1 - 1e-6
    assert cosine(LossSettings.of(CONFIGS["verl-gspo"][LossConfig]), theirs) > 1 - 1e-6


def test_cispo_by_its_name_has_the_papers_gradient() -> None:
    """MiniMax-M1: REINFORCE with the weight detached and capped above, a mean over the tokens of all."""
    behavior, advantages = torch.tensor(STEP.behavior), torch.tensor(A)

    def theirs(logprobs: torch.Tensor) -> torch.Tensor:
        weight = torch.exp(logprobs.detach() - behavior).clamp(max=5.0)
        return -(weight * advantages * logprobs).mean()

    assert cosine(LossSettings(loss_calculater="CISPO"), theirs) > 1 - 1e-6


def test_ipo_by_its_name_has_prime_rls_gradient() -> None:
    """prime-rl: the ratio to the sampler times A where |πθ − μ| is at most 0.3; IcePop bounds the ratio."""
    behavior, advantages = torch.tensor(STEP.behavior), torch.tensor(A)

    def ipo(logprobs: torch.Tensor) -> torch.Tensor:
        is_kept = (logprobs.detach().exp() - behavior.exp()).abs() <= 0.3
        return -(torch.exp(logprobs - behavior) * advantages)[is_kept].sum() / len(A)

    def icepop(logprobs: torch.Tensor) -> torch.Tensor:
        ratio = torch.exp(logprobs - behavior)
        return -(ratio * advantages)[(ratio >= 0.2) & (ratio <= 5.0)].sum() / len(A)

    assert cosine(LossSettings(loss_calculater="IPO"), ipo) > 1 - 1e-6
    bounded = LossSettings(loss_calculater="IPO", epsilon=1.0, importance_correction="token_mask:0.2:5")
    assert cosine(bounded, icepop) > 1 - 1e-6


def test_vespo_by_its_name_has_the_authors_gradient() -> None:
    """FloyedShen/VESPO: REINFORCE times exp(λ + k·log W − λ·W), W the product of the sequence's ratios."""
    behavior, advantages = torch.tensor(STEP.behavior), torch.tensor(A)

    def theirs(logprobs: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for row in ROWS:
            log_w = (logprobs - behavior)[row].sum().detach()
            k, rate = (2.0, 3.0) if A[row[0]] >= 0 else (3.0, 2.0)
            phi = torch.exp(rate + k * log_w - rate * log_w.exp())
            total = total - (phi * advantages[row] * logprobs[row]).sum()
        return total / len(A)

    assert cosine(LossSettings(loss_calculater="VESPO"), theirs) > 1 - 1e-6


def test_m2po_by_its_name_has_the_papers_gradient() -> None:
    """Algorithm 1: of the tokens that moved towards A, the largest second moments go, one after the other."""
    behavior, advantages = torch.tensor(STEP.behavior), torch.tensor(A)

    def theirs(logprobs: torch.Tensor) -> torch.Tensor:
        keep = torch.tensor([within_second_moment(0.04)(t) for t in TOKENS])
        assert 0 < int(keep.sum()) < len(A)
        return -(keep * torch.exp(logprobs - behavior) * advantages).sum() / len(A)

    assert cosine(LossSettings(loss_calculater="M2PO"), theirs) > 1 - 1e-6


def test_mis_po_has_the_papers_gradient() -> None:
    """Step 3.5 Flash: REINFORCE without a weight, of tokens and trajectories whose ratio is within bounds."""
    weight, advantages = torch.tensor(LOG_W).exp(), torch.tensor(A)

    def theirs(logprobs: torch.Tensor) -> torch.Tensor:
        kept = [t for row in ROWS if 0.4 <= weight[row].prod() ** (1 / len(row)) <= 1.1 for t in row]
        kept = [t for t in kept if 0.5 <= weight[t] <= 2]
        return -(advantages * logprobs)[kept].sum() / len(A)

    flags = LossSettings(
        loss_calculater="CISPO", epsilon=0.0, epsilon_higher=0.0, old_logprobs="recompute",
        importance_correction="token_mask:0.5:2,seq_mask:0.4:1.1",
    )  # fmt: skip
    assert cosine(flags, theirs) > 1 - 1e-6


def test_kpop_has_areals_gradient() -> None:
    """AReaL: the decoupled loss without tokens whose Bernoulli KL is above φ in either direction."""
    start, behavior, advantages = torch.tensor(STEP.start), torch.tensor(STEP.behavior), torch.tensor(A)
    p, q = torch.distributions.Bernoulli(start.exp()), torch.distributions.Bernoulli(behavior.exp())
    divergences = [torch.distributions.kl_divergence(*pair) for pair in ((p, q), (q, p))]

    def theirs(logprobs: torch.Tensor) -> torch.Tensor:
        is_kept = torch.maximum(*divergences) <= 0.1
        assert 0 < int(is_kept.sum()) < len(A)
        ratio = torch.exp(logprobs - start)
        clipped = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
        return (clipped * torch.exp(start - behavior))[is_kept].sum() / len(A)

    assert cosine(LossSettings.of(CONFIGS["areal-kpop"][LossConfig]), theirs) > 1 - 1e-6
