from __future__ import annotations

import random
import shutil
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_policy import write_tiny_policy
from torch.optim.lr_scheduler import LRScheduler

from agentrl.config.schema import ModelConfig, OptimConfig
from agentrl.errors import ConfigError, ModelError, PublishError
from agentrl.train import checkpoint
from agentrl.train.checkpoint import CheckpointState
from agentrl.train.model import Policy, architecture, load_policy
from agentrl.train.optim import build_optimizer, build_scheduler

Usage = namedtuple("Usage", "total used free")


@dataclass
class Trained:
    policy: Policy
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler

    @classmethod
    def load(cls, folder: Path, weights: Path | None = None) -> Trained:
        policy = load_policy(ModelConfig(model_name_or_path=str(folder)), weights)
        config = OptimConfig(learning_rate=1e-2, lr_scheduler_type="linear")
        optimizer = build_optimizer(policy.model, config)
        return cls(policy, optimizer, build_scheduler(optimizer, config, 10))

    def step(self) -> float:
        ids = torch.randint(0, 250, (1, 12))
        loss = self.policy.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_tiny_policy(tmp_path / "base")


def state(base: Path, step: int = 1, run_name: str = "run") -> CheckpointState:
    return CheckpointState(
        run_name=run_name, step=step, policy_version=step, is_published=True,
        train_steps=tuple(f"1/{i + 1}" for i in range(step)), architecture=architecture(base),
    )  # fmt: skip


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, base: Path) -> None:
    torch.manual_seed(1)
    trained = Trained.load(base)
    trained.step()
    folder = checkpoint.save(tmp_path, state(base), trained, limit=2)
    expected = [trained.step(), trained.step(), random.random(), np.random.rand()]
    found = checkpoint.find(tmp_path, "auto", run_name="run", base=base)
    assert found is not None
    assert found.folder == folder
    assert found.state == state(base)
    again = Trained.load(base, found.model)
    checkpoint.restore(found, again)
    assert [again.step(), again.step(), random.random(), np.random.rand()] == expected


def test_the_model_part_is_a_hugging_face_folder(tmp_path: Path, base: Path) -> None:
    folder = checkpoint.save(tmp_path, state(base), Trained.load(base), limit=2)
    assert load_policy(ModelConfig(model_name_or_path=str(folder / "model"))).tokenizer.chat_template


def test_only_the_newest_are_kept_and_auto_takes_the_newest_whole_one(tmp_path: Path, base: Path) -> None:
    trained = Trained.load(base)
    for step in (1, 2, 10):
        checkpoint.save(tmp_path, state(base, step), trained, limit=2)
    (tmp_path / ".tmp-checkpoint-000011-1").mkdir()
    (tmp_path / "checkpoint-000012").mkdir()
    assert sorted(path.parent.name for path in tmp_path.glob("*/state.json")) == [
        "checkpoint-000002", "checkpoint-000010",
    ]  # fmt: skip
    found = checkpoint.find(tmp_path, "auto", run_name="run", base=base)
    assert found is not None
    assert found.state.step == 10


def test_choices_other_than_auto(tmp_path: Path, base: Path) -> None:
    folder = checkpoint.save(tmp_path, state(base), Trained.load(base), limit=2)
    named = checkpoint.find(tmp_path / "other", str(folder), run_name="run", base=base)
    assert named is not None
    assert checkpoint.find(tmp_path, "none", run_name="run", base=base) is None
    assert checkpoint.find(tmp_path / "other", "auto", run_name="run", base=base) is None
    with pytest.raises(ConfigError, match="is no checkpoint"):
        checkpoint.find(tmp_path, str(base), run_name="run", base=base)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, base: Path) -> None:
    checkpoint.save(tmp_path, state(base, run_name="other"), Trained.load(base), limit=2)
    with pytest.raises(ConfigError, match="of run 'other', and this run is 'run'"):
        checkpoint.find(tmp_path, "auto", run_name="run", base=base)


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path, base: Path) -> None:
    checkpoint.save(tmp_path, state(base), Trained.load(base), limit=2)
    wider = write_tiny_policy(tmp_path / "wider", hidden_size=64)
    with pytest.raises(ModelError, match="hidden_size 32 against 64"):
        checkpoint.find(tmp_path, "auto", run_name="run", base=wider)


def test_a_full_disk_leaves_the_checkpoints_that_are_there(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained.load(base)
    checkpoint.save(tmp_path, state(base, 1), trained, limit=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100, 90, 10))
    with pytest.raises(PublishError, match="is full"):
        checkpoint.save(tmp_path, state(base, 2), trained, limit=1)
    monkeypatch.undo()
    found = checkpoint.find(tmp_path, "auto", run_name="run", base=base)
    assert found is not None
    assert found.state.step == 1


def test_a_damaged_checkpoint_is_named(tmp_path: Path, base: Path) -> None:
    trained = Trained.load(base)
    folder = checkpoint.save(tmp_path, state(base), trained, limit=2)
    found = checkpoint.find(tmp_path, "auto", run_name="run", base=base)
    assert found is not None
    (folder / "trainer.pt").write_bytes(b"junk")
    with pytest.raises(ModelError, match=r"trainer\.pt cannot be restored"):
        checkpoint.restore(found, trained)
    (folder / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"state\.json cannot be read"):
        checkpoint.find(tmp_path, "auto", run_name="run", base=base)
