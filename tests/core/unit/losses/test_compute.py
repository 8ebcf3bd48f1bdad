"""Corrections, bounds on staleness, the reduction over a step, and what a step reports."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from token_batches import random_batch, step_loss, three_tokens, token_metrics
from torch import Tensor

from agentrl.config.training import Correction, parse_corrections
from agentrl.errors import ConfigError
from agentrl.losses.compute import (
    Denominators,
    TokenMetrics,
    divergence,
    old_logprobs,
    out_of_bound,
    reduce_losses,
    token_losses,
    weigh,
)
from agentrl.losses.loss import LOSSES, TokenBatch, TrajectoryMeans, k3, largest_within
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
        "seq_mask:2:1", "token_mask:nan:1", "seq_icepop:3", "kpop:0.1:0.2", "tis,tis", "tis:-1",
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
    assert weights("seq_icepop", w) == ([2.0, 2.0, 2.0], [False, False, False])
    assert weights("seq_icepop:0:1.5", w) == ([2.0, 2.0, 2.0], [True, True, True])
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


def test_kpop_drops_by_the_probability_and_weighs_by_the_ratio() -> None:
    """A rare token may become several times as likely, a frequent one may not change by a tenth."""
    behavior = (0.001, 0.5, 0.9, 1.0, 0.0001)
    now = (0.01, 0.6, 0.99, 0.9999, 0.5)
    logs = [tuple(math.log(p) for p in each) for each in (now, behavior)]
    batch = three_tokens(logs[0], (1.0,) * 5, old=logs[0], behavior=logs[1])
    settings = LossSettings(importance_correction="kpop", old_logprobs="recompute")
    result = weigh(batch, settings)
    assert result.masked.tolist() == [False, False, True, False, True]
    torch.testing.assert_close(result.weight, torch.tensor(now) / torch.tensor(behavior))
    bypassed = replace(batch, old_logprobs=batch.behavior_logprobs)
    result = weigh(bypassed, replace(settings, old_logprobs="behavior"))
    assert result.masked.tolist() == [False, False, True, False, True]
    assert result.weight.tolist() == [1.0] * 5
    with pytest.raises(ConfigError, match="counts the ratio twice"):
        LossSettings(importance_correction="kpop,seq_tis", old_logprobs="recompute")
    sampled = -3 * torch.rand(400, generator=torch.Generator().manual_seed(0)) - 1e-3
    for size in (0.0, 1e-7, 1e-5, 1e-3):
        policy = tuple((sampled * (1 - size)).tolist())
        near = three_tokens(policy, (1.0,) * 400, old=policy, behavior=tuple(sampled.tolist()))
        assert not weigh(near, settings).masked.any()


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

    for text in ("seq_mask", "seq_kl:0.1", "seq_tis:1.2", "seq_icepop:0:1.2"):
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
    if (values_of := settings.loss.bounds_mean_of) is not None:
        limit = largest_within([values_of(part, settings) for part in micro])
        micro = [replace(part, mean_limit=limit) for part in micro]
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


@pytest.mark.parametrize("sign", [1, -1])
def test_k3_keeps_its_digits_where_expm1_minus_x_of_float32_has_none(sign: int) -> None:
    sizes = [sign * 10.0**power for power in range(-10, 1)]
    found = k3(torch.tensor(sizes, dtype=torch.float64))
    exact = [sum(Fraction(x) ** n / math.factorial(n) for n in range(2, 30)) for x in sizes]
    assert found.tolist() == pytest.approx([float(value) for value in exact], rel=1e-5, abs=0)
    logprobs = torch.tensor(sizes, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(k3(logprobs).sum(), logprobs)
    assert slope.tolist() == pytest.approx([math.expm1(x) for x in sizes], rel=1e-5, abs=0)
    assert torch.equal(k3(np.array(sizes)), found)
