"""A real trainer on a store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from fake_store import FakeStore
from rich.console import Console
from tiny_policy import write_tiny_policy
from training_data import group, training_configs

from agentrl.base.device_lease import DeviceLease
from agentrl.base.folder_owner import Owner
from agentrl.config.schema import CriticConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from agentrl.data.stream import DataStream, Freshness, StreamSettings
from agentrl.distributed.mesh import leave_processes, single_process
from agentrl.observe.progress import StepView
from agentrl.observe.trackers import open_trackers
from agentrl.train import checkpoint
from agentrl.train.build import build_trainer
from agentrl.train.controller import lead
from agentrl.train.folders import RunFolders
from agentrl.train.lease import HeldTrainerLease
from agentrl.train.loop import Trainer
from agentrl.train.publishing import DeviceTurns, Publisher
from agentrl.train.start import roll_back

FRESH = Freshness(max_staleness=9)
OWNER = Owner(run="run", id="1f", server="memory")


@pytest.fixture(autouse=True)
def process_group_ends_with_its_test() -> Iterator[None]:
    """Leave the group that a mesh of this process alone has made: tests of other folders make their own."""
    yield
    if dist.is_initialized():
        leave_processes()


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny policy, which no test changes."""
    return write_tiny_policy(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture
async def store() -> FakeStore:
    """Six groups that version 0 sampled."""
    store = FakeStore()
    for name in "abcdef":
        store.add(*group(name))
    return store


@pytest.fixture
def start(starter: Callable[..., Any], tmp_path: Path, store: FakeStore) -> Callable[..., Any]:
    """Start a trainer of ``store``; ``changes`` are those of its flags."""
    return starter(store, tmp_path / "output")


@pytest.fixture(scope="session")
def starter(base: Path) -> Callable[..., Any]:
    """Return what starts trainers of a store, which write below a folder."""
    return partial(_starter, base)


def _starter(base: Path, store: FakeStore, output: Path) -> Callable[..., Any]:
    async def begin(
        choice: str = "auto", max_staleness: int = 0, freshness: Freshness = FRESH,
        device: DeviceLease | None = None, critic: CriticConfig | None = None, **changes: Any
    ) -> Trainer:  # fmt: skip
        config = TrainConfig(**{"groups_per_step": 2, "save_steps": 1, "publish": "full", **changes})
        lease = HeldTrainerLease(store, await store.trainer_lease.acquire("me", "h", 1, 60.0), 60.0)
        steps = await store.steps.find()
        found = checkpoint.find(output, choice, steps, run_name="run", base=base)
        recipe = training_configs(
            ModelConfig(model_name_or_path=str(base)),
            OptimConfig(learning_rate=1e-2),
            config,
            critic or CriticConfig(),
        )
        weights = found.model if found else None
        controller = lead(single_process(), lambda: build_trainer(recipe, weights=weights, total_steps=None))
        if found:
            checkpoint.restore(found, controller.trainer)
        progress = await roll_back(store, lease, base, found, steps, replays=choice == "auto")
        checkpoint.rename_reverted(output, progress.train_steps, lease.attempt)
        settings = StreamSettings(
            groups_per_step=config.groups_per_step, num_epochs=1, freshness=freshness, wait_seconds=30.0,
        )  # fmt: skip
        folders = RunFolders(owner=OWNER, output=output, versions=str(output / "weights"))
        await folders.claim()
        publisher = Publisher(
            store=store, config=config, controller=controller, progress=progress, lease=lease,
            turns=DeviceTurns(lease=device, controller=controller), folders=folders,
            max_staleness=max_staleness, stop=asyncio.Event(), saved_step=progress.step,
            saved=found.folder if found else None,
        )  # fmt: skip
        return Trainer(
            publisher, DataStream(store, settings, progress.replay), StepView(Console(file=StringIO())),
            open_trackers("none", RunConfig(), output),
        )  # fmt: skip

    return begin
