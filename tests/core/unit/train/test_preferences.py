"""DPO and KTO: golden values, which trajectories they train, and whole steps with their reference model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import model_logprobs
from tiny_trainer import DATA, tiny_trainer
from token_batches import step_loss
from training_data import group

from agentrl.documents.training import DBRecordData
from agentrl.losses.built_in.dpo import best_and_worst
from agentrl.losses.loss import ComparedTrajectories, TokenBatch
from agentrl.losses.settings import LossSettings
from agentrl.train.step import PolicyTrainer


def margins(policy: PolicyTrainer, data: list[DBRecordData]) -> list[float]:
    """Σ log πθ of each trajectory."""
    with torch.no_grad():
        forests = [forest for item in data for forest in policy.pack([item])]
        return [float(model_logprobs(policy.policy.model, forest).sum()) for forest in forests]


def batch(h: list[float], score: list[float], group: list[int]) -> TokenBatch:
    """Trajectories of two tokens each, with Σ log πθ/π_ref of ``h``."""
    rows = torch.arange(len(h)).repeat_interleave(2)
    zeros = torch.zeros(len(rows))
    compared = ComparedTrajectories(
        number=torch.arange(len(h)), score=torch.tensor(score), group=torch.tensor(group),
        log_ratio=torch.tensor(h),
    )  # fmt: skip
    return TokenBatch(
        logprobs=(torch.tensor(h) / 2)[rows].requires_grad_(), old_logprobs=zeros, behavior_logprobs=zeros,
        advantages=zeros, row=rows, version=rows, age=rows, mask=torch.ones_like(rows, dtype=torch.bool),
        trajectories=len(h), reference_logprobs=zeros, compared=compared,
    )  # fmt: skip


def value(given: TokenBatch, **flags: object) -> tuple[float, list[float]]:
    """Loss and its derivative by the Σ log πθ of each trajectory (of its first token)."""
    loss, _ = step_loss(given, LossSettings(**flags))
    (gradient,) = torch.autograd.grad(loss, given.logprobs)
    assert torch.equal(gradient[::2], gradient[1::2])
    return float(loss.detach()), gradient[::2].tolist()


def test_golden_values_of_dpo() -> None:
    """β 0.5: margins 0.5·(1 − (−1)) = 1 and 0.5·(0 − 2) = −1; the worst comes first in the second group."""
    loss, slopes = value(
        batch([1.0, -1.0, 2.0, 0.0], [1.0, 0.0, 0.2, 0.7], [0, 0, 1, 1]), loss_calculater="DPO",
        preference_beta=0.5,
    )  # fmt: skip
    assert loss == pytest.approx((0.3132617 + 1.3132617) / 2)
    near, far = 0.5 * 0.2689414 / 2, 0.5 * 0.7310586 / 2  # β·σ(−margin), a mean over two groups
    assert slopes == pytest.approx([-near, near, far, -far])


def test_golden_values_of_kto() -> None:
    """z = (3 − 1 + 1)/3 = 1; β·(h − z) = 1, and −β·(h − z) = 1 and 0."""
    loss, slopes = value(
        batch([3.0, -1.0, 1.0], [1.0, 0.0, 0.5], [0, 1, 2]), loss_calculater="KTO", preference_beta=0.5,
        kto_undesirable_weight=2.0,
    )  # fmt: skip
    assert loss == pytest.approx((0.2689414 + 2 * 0.2689414 + 2 * 0.5) / 3)
    middle = 0.2689414 * 0.7310586
    assert slopes == pytest.approx([-0.5 * middle / 3, 2 * 0.5 * middle / 3, 2 * 0.5 * 0.25 / 3])


def test_dpo_trains_the_best_and_the_worst_of_a_group() -> None:
    scores = [0.3, 0.9, 0.1, 0.9]
    items = [replace(item, score=score) for item, score in zip(group("b", size=4), scores, strict=True)]
    agreed = [replace(item, score=0.5) for item in group("a")]
    alone = group("c")[:1]
    assert [item.score for item in best_and_worst([*agreed, *items, *alone])] == [0.9, 0.1]
    assert best_and_worst(items)[0].id == items[1].id


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("loss", ["DPO", "KTO"])
def test_steps_raise_what_scored_well_over_what_scored_badly(base: Path, loss: str, rank: int) -> None:
    """The reference is where training started; micro-batches of a trajectory each compute the same step."""
    flags = {"lora_rank": rank, "learning_rate": 0.01, "loss_calculater": loss}
    ours, split = tiny_trainer(base, **flags), tiny_trainer(base, max_tokens=10, **flags)
    pairs = best_and_worst(DATA)
    before = margins(ours, pairs)
    first, alike = ours.train(DATA).metrics, split.train(DATA).metrics
    at_start = math.log(2) if loss == "DPO" else 0.5
    assert first["loss"] == pytest.approx(at_start, abs=1e-4)
    assert first["trajectories"] == (6 if loss == "DPO" else 8)
    assert (alike["loss"], alike["grad_norm"]) == pytest.approx((first["loss"], first["grad_norm"]), rel=1e-4)
    last = [ours.train(DATA).metrics for _ in range(5)][-1]
    assert last["loss"] < first["loss"]
    assert last["kl_reference"] > 0.0
    moved = [after - start for after, start in zip(margins(ours, pairs), before, strict=True)]
    assert all(good > bad for bad, good in zip(moved[::2], moved[1::2], strict=True))


def test_a_step_without_a_pair_changes_nothing(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = tiny_trainer(base, loss_calculater="DPO")
    before = margins(ours, DATA)
    result = ours.train([replace(item, score=1.0) for item in DATA])
    assert (result.is_finite, result.metrics["loss"]) == (True, 0.0)
    assert margins(ours, DATA) == before
    assert "DPO chooses none" in caplog.text


def test_mini_batches_compare_their_own_groups(base: Path) -> None:
    twice, by_hand = (tiny_trainer(base, mini_batches=n, loss_calculater="DPO") for n in (2, 1))
    twice.train(DATA)
    for part in ([*group("a"), *group("c")], group("b", size=4)):
        by_hand.train(part)
    assert margins(twice, DATA) == pytest.approx(margins(by_hand, DATA), abs=1e-4)
