"""A run with adapters: its checkpoint resumes exactly, its published folder is a plain model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiny_models import model_logprobs
from training_data import group, training_configs

from agentrl.config.schema import AdapterConfig, ModelConfig, OptimConfig, TrainConfig
from agentrl.distributed.mesh import single_process
from agentrl.documents.training import Checkpoint, CheckpointState
from agentrl.errors import ModelError
from agentrl.model.load import load_policy
from agentrl.train import checkpoint
from agentrl.train.build import build_trainer
from agentrl.train.controller import Controller, lead
from agentrl.train.lease import ThreadFence
from agentrl.train.publishing import Publisher
from agentrl.weights.folder import architecture, complete_folder
from agentrl.weights.snapshot import write_alone

COMPARED = ("loss", "lr", "grad_norm")
DATA = [*group("a"), *group("b")]


def controller(base: Path, weights: Path | None = None, rank: int = 4) -> Controller:
    recipe = training_configs(
        ModelConfig(model_name_or_path=str(base)),
        OptimConfig(learning_rate=1e-2, lr_scheduler_type="cosine"),
        AdapterConfig(lora_rank=rank),
    )
    return lead(single_process(), lambda: build_trainer(recipe, weights=weights, total_steps=6))


def parameters(trained: Controller) -> list[torch.Tensor]:
    return [value for _, value in trained.policy.adapter.named_parameters()]


def test_training_goes_on_from_the_adapter_of_a_checkpoint(base: Path, tmp_path: Path) -> None:
    trained = controller(base)
    trained.train(DATA, None, {})
    state = CheckpointState(
        run_name="run", step=1, policy_version=0, train_steps=("1/1",), architecture=architecture(base)
    )
    folder = checkpoint.begin(tmp_path, state, trained).finish(limit=2, fence=Mock(spec=ThreadFence))
    assert not (folder / "model" / "model.safetensors").exists()
    again = controller(base, folder / "model")
    checkpoint.restore(Checkpoint(folder, state), again.trainer)
    first, second = trained.train(DATA, None, {}).metrics, again.train(DATA, None, {}).metrics
    assert [first[name] for name in COMPARED] == [second[name] for name in COMPARED]
    assert all(map(torch.equal, parameters(trained), parameters(again)))
    with pytest.raises(ModelError, match="holds an adapter"):
        controller(base, folder / "model", rank=0)


def test_what_is_published_is_a_plain_model_with_the_same_logprobs(base: Path, tmp_path: Path) -> None:
    trained = controller(base)
    for _ in range(3):
        trained.train(DATA, None, {})
    published = tmp_path / "published"
    published.mkdir()
    write_alone(trained.policy.published, published)
    complete_folder(base, published)
    plain = load_policy(ModelConfig(model_name_or_path=str(published)))
    (forest,) = trained.trainer.pack(DATA)
    with torch.no_grad():
        ours, theirs = (model_logprobs(model, forest) for model in (trained.policy.model, plain.model))
        started = model_logprobs(load_policy(ModelConfig(model_name_or_path=str(base))).model, forest)
    assert (ours - theirs).abs().max() < 1e-5
    assert (ours - started).abs().max() > 1e-2


def test_an_adapter_that_rounding_drops_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    parts: Any = dict.fromkeys(("store", "controller", "progress", "lease", "turns", "folders"))
    publisher = Publisher(config=TrainConfig(), max_staleness=1, stop=asyncio.Event(), **parts)
    warned = []
    for share in (None, 0.33, 0.5, 0.95, 0.8):
        caplog.clear()
        publisher._report_rounding(share, Mock(adapter=Mock(), own_dtype=torch.bfloat16))
        warned.append(len(caplog.records))
        assert publisher.metrics.get("published_adapter_share") == share
    assert warned == [0, 1, 0, 0, 1]
    assert "0.80 of what the adapter has learned: rounding to bfloat16" in caplog.text
