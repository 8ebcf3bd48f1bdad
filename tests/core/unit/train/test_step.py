"""One optimizer step: however it is split, its loss, gradients and metrics are the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny_models import chains, packed, plain_logprobs, tiny_model, tree
from transformers import PreTrainedModel

from agentrl.data.forest import TokenForest, forest_from_sequences
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.errors import ForestError
from agentrl.losses.compute import Denominators
from agentrl.losses.loss import LOSSES
from agentrl.losses.settings import LossSettings
from agentrl.model.logprobs import ForwardOptions
from agentrl.train.step import count_step, forward_backward

PER_TRAJECTORY = [name for name in LOSSES.names() if not LOSSES.get(name).compares]
"""Losses of a trajectory by itself; ``test_preference_exactness.py`` has those that compare some."""

DATA = [*chains(0, 4), tree(1), *chains(2, 2)]


def run(
    model: PreTrainedModel, forests: list[TokenForest], settings: LossSettings, **more: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    model.zero_grad()
    report = forward_backward(ParallelModel(model), forests, settings, **more)
    return report, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], limit: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        error = (gradient - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-12)
        assert error < limit, f"{name}: {error}"


@pytest.mark.exactness
@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("loss", PER_TRAJECTORY)
def test_micro_batches_change_neither_loss_nor_gradient(loss: str, token_level: bool) -> None:
    # The model is made here and has sampled none of the tokens: ratios of whole trajectories leave no weight.
    flat = {"loss_args": '{"k_pos": 0.05, "k_neg": 0.05}'} if loss == "VESPO" else {}
    settings = LossSettings(
        loss_calculater=loss, token_level_loss=token_level, importance_weight_cap_ratio=math.inf, **flat
    )  # fmt: skip
    model = tiny_model("llama", tied=True)
    whole, expected = run(model, [packed(DATA)], settings)
    assert abs(whole["loss"]) > 5e-4
    for parts in ([[0, 1, 2, 3], [4, 5, 6]], [[6, 0], [4], [1, 5, 2], [3]], [[i] for i in range(7)]):
        report, gradients = run(model, [packed([DATA[i] for i in part]) for part in parts], settings)
        assert report.keys() == whole.keys()
        for name, value in whole.items():
            assert report[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
        assert_gradients(gradients, expected, 1e-5)


@pytest.mark.exactness
def test_the_step_is_the_loss_of_the_plain_model() -> None:
    model = tiny_model("qwen3")
    forest = packed(DATA)
    settings = LossSettings(loss_calculater="CISPO", epsilon=0.2, epsilon_higher=0.1)
    options = ForwardOptions(chunk_size=5)
    report, gradients = run(model, [packed(DATA[:3]), packed(DATA[3:])], settings, options=options)
    model.set_attn_implementation("sdpa")
    logprobs = plain_logprobs(model, forest)
    ratio = torch.exp(logprobs.detach() - torch.from_numpy(forest.behavior_logprob)).clamp(0.8, 1.3)
    loss = -(ratio * torch.from_numpy(forest.advantage) * logprobs).mean()
    model.zero_grad()
    loss.backward()
    assert report["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert_gradients(gradients, {name: p.grad for name, p in model.named_parameters()}, 1e-5)


def test_cross_entropy_is_the_mean_over_masked_tokens() -> None:
    model = tiny_model("llama")
    ids, mask = [[1, 2, 3, 4], [5, 6, 7]], [[False, False, True, True], [False, True, False]]
    report, _ = run(model, [forest_from_sequences(ids, mask)], LossSettings(loss_calculater="CrossEntropy"))
    model.set_attn_implementation("sdpa")
    labels = torch.tensor([[-100, -100, 3, 4], [-100, 6, -100, -100]])
    padded = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]])
    with torch.no_grad():
        expected = model(input_ids=padded, labels=labels, use_cache=False).loss
    assert report["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert report["kl_k1"] == 0.0
    assert report["effective_sample_size"] == pytest.approx(1.0)


def test_recomputed_old_logprobs_make_the_ratio_that_is_clipped_one() -> None:
    """``ratio_mean`` and ``ratio_max`` stay those of πθ/μ: they are the alarm for stale logprobs."""
    model = tiny_model("llama")
    expected, _ = run(model, [packed(DATA)], LossSettings())
    report, _ = run(model, [packed(DATA)], LossSettings(old_logprobs="recompute"))
    assert (report["clip_ratio_max"], report["clipped_fraction"]) == (1.0, 0.0)
    assert expected["clip_ratio_max"] == expected["ratio_max"] == report["ratio_max"] > 1.0
    assert expected["ratio_mean"] == report["ratio_mean"] != 1.0
    report, _ = run(model, [packed(DATA)], LossSettings(old_logprobs="loglinear"))
    assert report["clip_ratio_max"] != 1.0


@pytest.mark.parametrize(
    ("old", "flag", "value"),
    [
        ("recompute", "strict_in_bound", True),
        ("recompute", "importance_weight_cap_ratio", 2.0),
        ("recompute", "importance_correction", "token_mask:0.5:2"),
        ("behavior", "importance_correction", "icepop:0.5:2"),
        ("behavior", "importance_correction", "token_mask:0.5:2"),
        ("behavior", "importance_correction", "seq_mask:0.9:1.1"),
        ("behavior", "importance_correction", "seq_kl:0.01"),
    ],
)
def test_off_policy_control_masks_tokens_in_a_step_of_one_update(old: str, flag: str, value: Any) -> None:
    model = tiny_model("llama")
    plain, _ = run(model, [packed(DATA)], LossSettings(old_logprobs=old))
    report, gradients = run(model, [packed(DATA)], LossSettings(old_logprobs=old, **{flag: value}))
    assert plain["masked_fraction"] == 0.0
    assert report["masked_fraction"] > 0.0
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


def test_a_capped_weight_is_reported() -> None:
    model = tiny_model("llama")
    settings = LossSettings(old_logprobs="recompute", importance_correction="tis:1.01")
    report, _ = run(model, [packed(DATA)], settings)
    assert 0.0 < report["capped_fraction"] < 1.0
    assert (report["masked_fraction"], report["clipped_fraction"]) == (0.0, 0.0)


def test_a_step_without_trainable_tokens_is_refused_and_an_empty_forest_is_skipped() -> None:
    model = tiny_model("llama")
    empty = forest_from_sequences([[1, 2]], [[False, False]])
    with pytest.raises(ForestError, match="without a trainable token"):
        run(model, [empty], LossSettings())
    report, _ = run(model, [empty, packed(DATA)], LossSettings())
    assert report["tokens"] == 2 + packed(DATA).tokens
    assert count_step([empty]) == Denominators(0, 0)
