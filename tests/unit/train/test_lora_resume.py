"""A run with adapters: its checkpoint resumes exactly, its published folder is a plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_policy import write_tiny_policy
from training_data import group

from agentrl.config.schema import AdapterConfig, LossConfig, ModelConfig, OptimConfig, TrainConfig
from agentrl.errors import ModelError
from agentrl.model.load import architecture, load_policy
from agentrl.train import checkpoint
from agentrl.train.build import Recipe, build_computer
from agentrl.train.checkpoint import CheckpointState
from agentrl.train.compute import PolicyTrainer
from agentrl.train.step import forest_logprobs
from agentrl.weights.model_folder import save_model_files

COMPARED = ("loss", "lr", "grad_norm")
DATA = [*group("a"), *group("b")]


def computer(base: Path, weights: Path | None = None, rank: int = 4) -> PolicyTrainer:
    recipe = Recipe(
        model=ModelConfig(model_name_or_path=str(base)), loss=LossConfig(), train=TrainConfig(), seed=0,
        optim=OptimConfig(learning_rate=1e-2, lr_scheduler_type="cosine"),
        adapter=AdapterConfig(lora_rank=rank),
    )  # fmt: skip
    return build_computer(recipe, weights=weights, total_steps=6)


def parameters(trained: PolicyTrainer) -> list[torch.Tensor]:
    return [value for _, value in trained.policy.kept.named_parameters()]


def test_training_goes_on_from_the_adapter_of_a_checkpoint(tmp_path: Path) -> None:
    base = write_tiny_policy(tmp_path / "base")
    trained = computer(base)
    trained.train(DATA)
    state = CheckpointState(
        run_name="run", step=1, policy_version=0, train_steps=("1/1",), architecture=architecture(base)
    )
    folder = checkpoint.save(tmp_path, state, trained, limit=2)
    assert not (folder / "model" / "model.safetensors").exists()
    again = computer(base, folder / "model")
    checkpoint.restore(checkpoint.Checkpoint(folder, state), again)
    first, second = trained.train(DATA).metrics, again.train(DATA).metrics
    assert [first[name] for name in COMPARED] == [second[name] for name in COMPARED]
    assert all(map(torch.equal, parameters(trained), parameters(again)))
    with pytest.raises(ModelError, match="holds an adapter"):
        computer(base, folder / "model", rank=0)


def test_what_is_published_is_a_plain_model_with_the_same_logprobs(tmp_path: Path) -> None:
    base = write_tiny_policy(tmp_path / "base")
    trained = computer(base)
    for _ in range(3):
        trained.train(DATA)
    published = tmp_path / "published"
    published.mkdir()
    save_model_files(trained.policy.published, base, published)
    plain = load_policy(ModelConfig(model_name_or_path=str(published)))
    (forest,) = trained._pack(DATA)
    with torch.no_grad():
        ours, theirs = (forest_logprobs(model, forest)[0] for model in (trained.policy.model, plain.model))
        started = forest_logprobs(load_policy(ModelConfig(model_name_or_path=str(base))).model, forest)[0]
    assert (ours - theirs).abs().max() < 1e-5
    assert (ours - started).abs().max() > 1e-2
