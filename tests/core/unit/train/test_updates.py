"""Several updates on one step's data: splitting, frozen logprobs, clipping as in PPO, what is reported."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import model_logprobs, plain_logprobs
from tiny_policy import write_tiny_policy
from tiny_trainer import DATA, have_same_weights, tiny_trainer

from agentrl.documents.model_call import pack_floats
from agentrl.documents.training import DBRecordData
from agentrl.errors import ModelError
from agentrl.losses.loss import TokenBatch, TokenLosses
from agentrl.losses.settings import LossSettings
from agentrl.train import step as step_loss_module
from agentrl.train import step as step_module
from agentrl.train.step import PolicyTrainer, split_updates


def sampled(policy: PolicyTrainer) -> list[DBRecordData]:
    """DATA whose behavior logprobs are the policy's own."""
    made = []
    for item in DATA:
        (forest,) = policy.pack([item])
        own = model_logprobs(policy.policy.model, forest).detach()
        made.append(replace(item, behavior_logprobs=pack_floats(own.tolist())))
    return made


def test_groups_stay_together_and_tokens_are_balanced() -> None:
    parts = split_updates(DATA, 2)
    assert [[item.task for item in part] for part in parts] == [["b"] * 4, ["a", "a", "c", "c"]]
    assert split_updates(DATA, 1) == [DATA]
    assert [len(part) for part in split_updates(DATA, 9)] == [4, 2, 2]


def test_two_passes_are_two_updates_with_the_old_logprobs_kept(base: Path) -> None:
    """Epochs and mini-batches equal the same updates made by hand, and the second pass clips."""
    twice, by_hand = tiny_trainer(base, num_epochs_per_batch=2, mini_batches=2), tiny_trainer(base)
    data = sampled(by_hand)
    result = twice.train(data)
    reports = [by_hand.train(part).metrics for part in split_updates(data, 2) * 2]
    assert result.metrics["updates"] == 4
    assert result.metrics["trainable_tokens"] == 32
    assert result.metrics["loss"] == pytest.approx(np.mean([report["loss"] for report in reports]))
    assert have_same_weights(twice, by_hand)
    assert reports[0]["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    moved = tiny_trainer(base, num_epochs_per_batch=3, learning_rate=0.05).train(data).metrics
    assert moved["ratio_max"] > 1.3
    assert moved["clipped_fraction"] > 0.1


@pytest.mark.parametrize("method", ["recompute", "loglinear"])
def test_recomputed_logprobs_are_those_of_the_start_of_the_step(base: Path, method: str) -> None:
    data = [replace(item, behavior_logprobs=pack_floats([-3.0] * 4)) for item in DATA]
    many = tiny_trainer(base, num_epochs_per_batch=3, learning_rate=0.05, old_logprobs=method)
    seen = []
    update = many._update

    def watch(forests: Any, *others: Any) -> Any:
        seen.append(forests[0].start_logprob)
        return update(forests, *others)

    object.__setattr__(many, "_update", watch)
    with torch.no_grad():
        expected = model_logprobs(many.policy.model, many.pack(data)[0]).numpy()
    metrics = many.train(data).metrics
    assert all(np.array_equal(start, expected) for start in seen)
    assert len(seen) == 3
    assert metrics["clip_ratio_max"] > 1.3
    once = tiny_trainer(base, old_logprobs=method).train(data).metrics
    if method == "recompute":
        assert once["clip_ratio_max"] == 1.0


def test_loglinear_starts_from_the_policy_of_the_steps_start_in_every_update(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = tiny_trainer(base, num_epochs_per_batch=3, learning_rate=0.05, old_logprobs="loglinear")
    data = [replace(item, behavior_logprobs=pack_floats([-3.0] * 4)) for item in DATA]
    versions = {span.version for item in data for span in item.spans}
    plain, batches = step_loss_module.token_losses, []

    def watch(batch: TokenBatch, settings: LossSettings) -> TokenLosses:
        batches.append(batch)
        return plain(batch, settings)

    monkeypatch.setattr(step_loss_module, "token_losses", watch)
    with torch.no_grad():
        start = model_logprobs(many.policy.model, many.pack(data)[0])
    many.train(data, dict.fromkeys(versions, 2))
    assert len(batches) == 3
    for batch in batches:  # age 2: two thirds of the way from the sampler to the start
        torch.testing.assert_close(batch.old_logprobs, -3.0 + 2 / 3 * (start + 3.0))
    assert float((batches[2].logprobs.detach() - start).abs().max()) > 0.1


def test_an_update_that_is_not_finite_ends_the_step_and_keeps_what_was_made(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, once = tiny_trainer(base, num_epochs_per_batch=3), tiny_trainer(base)
    once.train(DATA)
    plain, calls = step_module.forward_backward, []

    def breaks(*arguments: Any, **named: Any) -> dict[str, Any]:
        calls.append(1)
        return plain(*arguments, **named) | ({"loss": math.nan} if len(calls) == 2 else {})

    monkeypatch.setattr(step_module, "forward_backward", breaks)
    result = ours.train(DATA)
    assert (result.is_finite, result.metrics["updates"], len(calls)) == (True, 1, 2)
    assert have_same_weights(ours, once)


@pytest.mark.parametrize("rank", [0, 4])
def test_the_reference_is_where_training_started(base: Path, rank: int) -> None:
    """A frozen copy, or the adapted policy without its adapter: the same numbers, once for all epochs."""
    ours = tiny_trainer(base, lora_rank=rank, kl_coef=0.1, num_epochs_per_batch=2, learning_rate=0.05)
    plain = tiny_trainer(base)
    (forest,) = ours.pack(DATA)
    with torch.no_grad():
        expected = model_logprobs(plain.policy.model, forest).numpy()
    first = ours.train(DATA).metrics["kl_reference"]
    (attached,) = ours.frozen.attach(ours.model, [forest], ours.options)
    assert np.abs(attached.reference_logprob - expected).max() < 1e-5
    assert ours.train(DATA).metrics["kl_reference"] > first > 0.0
    assert (ours.frozen.reference.model is None) is (rank > 0)


def test_the_pull_keeps_the_policy_near(base: Path) -> None:
    drift = []
    for coefficient in (1e-9, 10.0):
        ours = tiny_trainer(base, kl_coef=coefficient, learning_rate=0.01)
        drift.append([ours.train(DATA).metrics["kl_reference"] for _ in range(6)][-1])
    assert drift[1] < 0.5 * drift[0]


def test_a_reference_with_another_vocabulary_is_refused(base: Path, tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    other = write_tiny_policy(tmp_path / "other")
    config = Qwen3Config.from_pretrained(other)
    config.vocab_size = 300
    Qwen3ForCausalLM(config).save_pretrained(other)
    with pytest.raises(ModelError, match="300 token ids, and the policy"):
        tiny_trainer(base, kl_coef=0.1, reference_model=str(other))
    with pytest.raises(ModelError, match="not a folder"):
        tiny_trainer(base, kl_coef=0.1, reference_model=str(tmp_path / "none"))


def test_start_and_reference_logprobs_have_the_temperature_of_their_call(base: Path) -> None:
    ours = tiny_trainer(base, kl_coef=0.1, num_epochs_per_batch=2, old_logprobs="recompute")
    cold = [
        replace(item, spans=(replace(item.spans[0], temperature=temperature),))
        for item, temperature in zip(DATA, (0.5, 1.0, 1.5), strict=False)
    ]
    (forest,) = ours.frozen.attach(ours.model, ours.pack(cold), ours.options)
    ours.policy.model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = plain_logprobs(ours.policy.model, forest).numpy()
    assert sorted(set(forest.temperature.tolist())) == [0.5, 1.0, 1.5]
    for found in (forest.start_logprob, forest.reference_logprob):
        assert np.abs(found - expected).max() < 1e-5


@pytest.mark.exactness
@pytest.mark.parametrize("mini_batches", [1, 3])
@pytest.mark.parametrize("loss", ["GRPO", "GSPO", "CISPO", "MINIRL", "SAPO", "IPO", "M2PO", "VESPO"])
def test_trajectories_without_an_advantage_are_not_computed_and_train_as_if_they_were(
    base: Path, monkeypatch: pytest.MonkeyPatch, loss: str, mini_batches: int
) -> None:
    """Weights, moments, denominators and counters are those of a step that computes every trajectory."""
    flags: dict[str, Any] = {
        "loss_calculater": loss, "weight_decay": 0.1, "mini_batches": mini_batches, "max_tokens": 10,
        "prefix_merging": "off", "num_epochs_per_batch": 2,
    }  # fmt: skip
    one, other = tiny_trainer(base, **flags), tiny_trainer(base, **flags)
    data = sampled(one)
    agreed = [replace(item, spans=(replace(item.spans[0], advantage=0.0),)) for item in data]
    mixed = [flat if item.task == "b" else item for item, flat in zip(data, agreed, strict=True)]
    for step, fraction in ((data, 1.0), (mixed, 0.5), (agreed, 0.0)):
        found = one.train(step)
        with monkeypatch.context() as patch:
            patch.setattr(LossSettings, "needs_advantage", False)
            expected = other.train(step)
        assert have_same_weights(one, other)  # each trajectory is a micro-batch: the others round as before
        assert found.metrics.get("computed_fraction", 1.0) == fraction
        assert "computed_fraction" not in expected.metrics
        for name in ("loss", "grad_norm", "lr", "trainable_tokens", "trajectories", "updates"):
            assert found.metrics.get(name) == pytest.approx(expected.metrics.get(name), abs=1e-6), name
        computed = fraction * found.metrics["trainable_tokens"]
        assert sum(found.metrics.get("staleness_histogram", {}).values()) == computed  # once, of two passes
    assert found.metrics["grad_norm"] == 0.0
    assert "kl_k3" not in found.metrics
    assert found.metrics["micro_batches"] == 1


@pytest.mark.parametrize("flags", [{"kl_coef": 0.1}, {"entropy_coef": 0.1}, {"loss_calculater": "DPPO"}])
def test_a_loss_that_reads_more_than_the_advantage_computes_every_trajectory(
    base: Path, flags: dict[str, Any]
) -> None:
    data = [replace(item, spans=(replace(item.spans[0], advantage=0.0),)) for item in DATA]
    assert "computed_fraction" not in tiny_trainer(base, **flags).train(data).metrics
