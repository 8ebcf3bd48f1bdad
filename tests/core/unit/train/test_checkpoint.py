"""Checkpoints: what they restore, which one a run resumes from, and which ones stay."""

from __future__ import annotations

import random
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tiny_policy import write_tiny_policy
from training_data import group, training_configs

from agentrl.config.schema import AdapterConfig, ModelConfig, OptimConfig
from agentrl.distributed.mesh import single_process
from agentrl.documents.status import StepStatus
from agentrl.documents.training import CheckpointState, TrainStep
from agentrl.errors import ConfigError, LeaseLostError, ModelError, PublishError
from agentrl.model.load import load_policy
from agentrl.train import checkpoint
from agentrl.train.build import build_trainer
from agentrl.train.controller import Controller, lead
from agentrl.train.lease import ThreadFence
from agentrl.weights.folder import architecture, stored_dtype
from agentrl.weights.snapshot import write_config

Usage = namedtuple("Usage", "total used free")


DATA = [*group("a"), *group("b")]
RANKS = pytest.mark.parametrize("rank", [0, 4])
"""Of LoRA."""


def load(base: Path, weights: Path | None = None, rank: int = 0) -> Controller:
    """A trainer of the model in ``base``, or of a checkpoint's ``weights``."""
    recipe = training_configs(
        ModelConfig(model_name_or_path=str(base)),
        OptimConfig(learning_rate=1e-2, lr_scheduler_type="cosine"),
        AdapterConfig(lora_rank=rank),
    )
    return lead(single_process(), lambda: build_trainer(recipe, weights=weights, total_steps=6))


def step(trained: Controller) -> list[float]:
    metrics = trained.train(DATA, None, {}).metrics
    return [metrics[name] for name in ("loss", "lr", "grad_norm")]


def weights(trained: Controller) -> list[torch.Tensor]:
    """What is trained."""
    return [value for value in trained.policy.model.parameters() if value.requires_grad]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_tiny_policy(tmp_path / "base")


def save(
    root: Path, saved: CheckpointState, trained: Controller, *, limit: int = 2, lost_at: str | None = None
) -> Path:
    """Save; with ``lost_at``, the lease is lost when that call of its fence is made."""
    fence = Mock(spec=ThreadFence)
    fence.discard.side_effect = lambda names: names
    if lost_at is not None:
        getattr(fence, lost_at).side_effect = LeaseLostError("replaced")
    return checkpoint.begin(root, saved, trained).finish(limit=limit, fence=fence)


def state(base: Path, step: int = 1, run_name: str = "run", attempt: int = 1) -> CheckpointState:
    return CheckpointState(
        attempt=attempt, run_name=run_name, step=step, policy_version=step,
        train_steps=tuple(f"1/{i + 1}" for i in range(step)), architecture=architecture(base),
    )  # fmt: skip


def committed(count: int, reverted: int = 0) -> list[TrainStep]:
    return [
        TrainStep(
            id=f"1/{number}", step=number, policy_version=number - 1, data=(), owner="me",
            status=StepStatus.COMMITTED if number <= count else StepStatus.REVERTED,
        )
        for number in range(1, count + reverted + 1)
    ]  # fmt: skip


def find(
    root: Path, base: Path, choice: str = "auto", *, steps: list[TrainStep] | None = None, **options: Any
) -> Any:
    known = committed(10) if steps is None else steps
    return checkpoint.find(root, choice, known, run_name="run", base=base, **options)


def save_steps(root: Path, base: Path, *steps: int) -> Controller:
    """Save a checkpoint of each of the steps."""
    trained = load(base)
    for step in steps:
        save(root, state(base, step), trained)
    return trained


def test_a_checkpoint_of_reverted_steps_is_not_resumed_from(tmp_path: Path, base: Path) -> None:
    save_steps(tmp_path, base, 2, 4)
    steps = committed(2, reverted=2)
    assert find(tmp_path, base, steps=steps).state.step == 2
    with pytest.raises(ConfigError, match="contains 2 reverted steps, such as 1/3"):
        find(tmp_path, base, str(tmp_path / "checkpoint-000004"), steps=steps)
    with pytest.raises(ConfigError, match="contains 4 steps that are not in database run"):
        find(tmp_path, base, steps=[])


def test_checkpoints_of_reverted_steps_are_renamed(tmp_path: Path, base: Path) -> None:
    trained = save_steps(tmp_path, base, 2, 4)
    standing = state(base, 2).train_steps
    assert checkpoint.rename_reverted(tmp_path, standing, 1) == [tmp_path / "undone-checkpoint-000004"]
    save(tmp_path, state(base, 3), trained, limit=1)
    assert names(tmp_path) == ["checkpoint-000003", "undone-checkpoint-000004"]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("*checkpoint-*"))


@pytest.mark.parametrize("call", ["check", "discard"])
def test_a_replaced_trainer_deletes_no_checkpoint(tmp_path: Path, base: Path, call: str) -> None:
    trained = load(base)
    save(tmp_path, state(base, 1), trained, limit=1)
    with pytest.raises(LeaseLostError):
        save(tmp_path, state(base, 2), trained, limit=1, lost_at=call)
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000002"][: 1 + (call == "discard")]
    assert not list(tmp_path.glob(".tmp-*"))


def test_two_trainers_never_write_one_checkpoint(tmp_path: Path, base: Path) -> None:
    trained = load(base)
    successor = replace(state(base, 2, attempt=3), train_steps=("1/1", "3/2"))
    save(tmp_path, state(base, 1), trained)
    save(tmp_path, successor, trained)
    save(tmp_path, state(base, 2), trained, limit=1)
    assert names(tmp_path) == ["checkpoint-000002", "checkpoint-000002-3"]
    steps = [*committed(1, reverted=1), replace(committed(2)[1], id="3/2")]
    assert find(tmp_path, base, steps=steps).folder.name == "checkpoint-000002-3"
    assert checkpoint.rename_reverted(tmp_path, ("1/1", "1/2"), 1) == []
    undone = checkpoint.rename_reverted(tmp_path, successor.train_steps, 3)
    assert undone == [tmp_path / "undone-checkpoint-000002"]


def test_a_checkpoint_that_is_being_deleted_is_not_resumed_from(tmp_path: Path, base: Path) -> None:
    save_steps(tmp_path, base, 1, 2)
    found = find(tmp_path, base, discarded=["checkpoint-000002"])
    assert found.state.step == 1


@RANKS
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, base: Path, rank: int) -> None:
    trained = load(base, rank=rank)
    step(trained)
    folder = save(tmp_path, state(base), trained)
    assert (folder / "model" / "model.safetensors").exists() is (rank == 0)
    numbers = [random.random(), np.random.rand(), torch.rand(1)]
    expected = [step(trained), step(trained)]
    found = find(tmp_path, base)
    assert (found.folder, found.state) == (folder, state(base))
    again = load(base, found.model, rank)
    checkpoint.restore(found, again.trainer)
    assert [random.random(), np.random.rand(), torch.rand(1)] == numbers
    assert [step(again), step(again)] == expected
    assert all(map(torch.equal, weights(again), weights(trained)))


def test_an_adapter_is_not_resumed_from_without_one(tmp_path: Path, base: Path) -> None:
    folder = save(tmp_path, state(base), load(base, rank=4))
    with pytest.raises(ModelError, match="holds an adapter"):
        load(base, folder / "model")


def test_weights_that_publication_rounds_are_restored_exactly(tmp_path: Path, base: Path) -> None:
    write_config(base, None, "bfloat16")
    trained = load(base)
    step(trained)
    folder = save(tmp_path, state(base), trained)
    assert stored_dtype(folder / "model") == "bfloat16"
    found = find(tmp_path, base)
    again = load(base, found.model)
    rounded = [value.bfloat16().float() for value in weights(trained)]
    assert all(map(torch.equal, weights(again), rounded))
    checkpoint.restore(found, again.trainer)
    assert all(map(torch.equal, weights(again), weights(trained)))
    assert step(again) == step(trained)


def test_a_checkpoint_of_a_model_folder_in_the_trained_dtype_is_restored(tmp_path: Path, base: Path) -> None:
    trained = load(base)
    step(trained)
    folder = save(tmp_path, state(base), trained)
    write_config(base, None, "bfloat16")
    found = find(tmp_path, base)
    assert found.folder == folder
    again = load(base, found.model)
    checkpoint.restore(found, again.trainer)
    assert all(map(torch.equal, weights(again), weights(trained)))


def test_the_model_part_is_a_hugging_face_folder(tmp_path: Path, base: Path) -> None:
    folder = save(tmp_path, state(base), load(base))
    assert load_policy(ModelConfig(model_name_or_path=str(folder / "model"))).tokenizer.chat_template


def test_only_the_newest_are_kept_and_auto_takes_the_newest_whole_one(tmp_path: Path, base: Path) -> None:
    save_steps(tmp_path, base, 1, 2, 10)
    (tmp_path / ".tmp-checkpoint-000011-1").mkdir()
    (tmp_path / "checkpoint-000012").mkdir()
    whole = sorted(path.parent.name for path in tmp_path.glob("*/state.json"))
    assert whole == ["checkpoint-000002", "checkpoint-000010"]
    assert find(tmp_path, base).state.step == 10


def test_choices_other_than_auto(tmp_path: Path, base: Path) -> None:
    folder = save(tmp_path, state(base), load(base))
    assert find(tmp_path / "other", base, str(folder)).folder == folder
    assert find(tmp_path, base, "none") is None
    assert find(tmp_path / "other", base) is None
    with pytest.raises(ConfigError, match="is not a checkpoint"):
        find(tmp_path, base, str(base))


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, base: Path) -> None:
    save(tmp_path, state(base, run_name="other"), load(base))
    with pytest.raises(ConfigError, match="of run 'other', and this run is 'run'"):
        find(tmp_path, base)


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path, base: Path) -> None:
    save(tmp_path, state(base), load(base))
    wider = write_tiny_policy(tmp_path / "wider", hidden_size=64)
    with pytest.raises(ModelError, match="hidden_size 32, not 64"):
        find(tmp_path, wider)


def test_a_full_disk_leaves_the_checkpoints_that_are_there(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = load(base)
    save(tmp_path, state(base, 1), trained, limit=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100, 90, 10))
    with pytest.raises(PublishError, match="is full"):
        save(tmp_path, state(base, 2), trained, limit=1)
    monkeypatch.undo()
    assert find(tmp_path, base).state.step == 1


def test_a_damaged_checkpoint_is_named(tmp_path: Path, base: Path) -> None:
    trained = load(base)
    folder = save(tmp_path, state(base), trained)
    found = find(tmp_path, base)
    for name in ("trainer.pt", "optimizer/.metadata"):
        (folder / name).write_bytes(b"junk")
        with pytest.raises(ModelError, match="checkpoint-000001 cannot be restored"):
            checkpoint.restore(found, trained.trainer)
    (folder / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"state\.json cannot be read"):
        find(tmp_path, base)
