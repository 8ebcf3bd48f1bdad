from __future__ import annotations

import asyncio
import shutil
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from fake_store import FakeStore
from rich.console import Console
from tiny_policy import write_tiny_policy
from training_data import group

from agentrl.batching.stream import DataStream, StreamSettings
from agentrl.config.schema import LossConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from agentrl.documents.status import DataStatus, StepStatus, VersionStatus
from agentrl.errors import ConfigError, PublishError, TrainingError
from agentrl.observe.live import StepView
from agentrl.observe.trackers import open_trackers
from agentrl.train import checkpoint, resume
from agentrl.train.build import Recipe, build_computer
from agentrl.train.compute import StepComputer, StepResult
from agentrl.train.loop import Trainer
from agentrl.train.rewards import reward_metrics, trajectory_means

if TYPE_CHECKING:
    from agentrl.store.client import Store

Usage = namedtuple("Usage", "total used free")
Start = Callable[..., Any]


@pytest.fixture
async def store() -> FakeStore:
    store = FakeStore()
    for name in "abcdef":
        store.add(*group(name))
    return store


@pytest.fixture
def start(tmp_path: Path, store: FakeStore) -> Start:
    base, output = write_tiny_policy(tmp_path / "base"), tmp_path / "output"

    async def begin(choice: str = "auto", **changes: Any) -> Trainer:
        config = TrainConfig(**{"groups_per_step": 2, "save_steps": 1, **changes})
        found = checkpoint.find(output, choice, run_name="run", base=base)
        recipe = Recipe(
            model=ModelConfig(model_name_or_path=str(base)), loss=LossConfig(),
            optim=OptimConfig(learning_rate=1e-2), train=config, seed=0,
        )  # fmt: skip
        computer = build_computer(recipe, weights=found.model if found else None, total_steps=None)
        if found:
            checkpoint.restore(found, computer)
        progress = await resume.begin(cast("Store", store), base, found)
        settings = StreamSettings(
            groups_per_step=2, num_generations=2, num_epochs=1, max_staleness=9, wait_seconds=30.0
        )
        return Trainer(
            store=cast("Store", store), run_name="run", config=config, computer=computer,
            stream=DataStream(cast("Store", store), settings), progress=progress, output=output, owner="me",
            stop=asyncio.Event(), view=StepView(Console(file=StringIO())),
            tracker=open_trackers("none", RunConfig(), output), saved_step=progress.step,
        )  # fmt: skip

    return begin


class StopAt:
    """A tracker that asks the trainer to stop when it hears of a step."""

    def __init__(self, step: int, stop: asyncio.Event) -> None:
        self.step, self.stop = step, stop

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step == self.step:
            self.stop.set()

    def close(self) -> None:
        """Nothing is open."""


def committed(store: FakeStore) -> list[TrainStepKey]:
    steps = (step for step in store.train_steps.values() if step.status is StepStatus.COMMITTED)
    return [(step.step, step.policy_version, step.data) for step in steps]


TrainStepKey = tuple[int, int, tuple[str, ...]]


def losses(store: FakeStore) -> list[float]:
    steps = store.train_steps.values()
    return [step.metrics["loss"] for step in steps if step.status is StepStatus.COMMITTED]


async def test_everything_is_trained_published_and_saved(
    store: FakeStore, start: Start, tmp_path: Path
) -> None:
    await (await start()).run()
    assert [(step, version) for step, version, _ in committed(store)] == [(1, 0), (2, 1), (3, 2)]
    assert store.with_status(DataStatus.TRAINED) == list(store.data)
    assert sorted(store.versions) == [0, 1, 2, 3]
    assert store.versions[3].train_step == "1/3"
    found = checkpoint.find(tmp_path / "output", "auto", run_name="run", base=tmp_path / "base")
    assert found is not None
    assert found.state.train_steps == ("1/1", "1/2", "1/3")
    assert (found.state.step, found.state.policy_version) == (3, 3)


async def test_every_metric_is_reported(store: FakeStore, start: Start) -> None:
    await (await start(max_steps=1)).run()
    [step] = store.train_steps.values()
    assert set(step.metrics) >= {
        "loss", "grad_norm", "lr", "kl_k1", "kl_k3", "entropy", "ratio_mean", "ratio_max", "clipped_fraction",
        "masked_fraction", "effective_sample_size", "staleness_mean", "staleness_max", "tokens",
        "trainable_tokens", "trajectories", "groups", "tokens_per_second", "seconds_data",
        "seconds_forward_backward", "seconds_optimizer", "seconds_publish", "groups_open", "groups_ready",
        "staleness_histogram", "version_fractions",
    }  # fmt: skip


async def test_a_resumed_run_trains_what_an_undisturbed_one_does(
    store: FakeStore, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await start("none", save_steps=9)).run()
    undisturbed, expected = losses(store), committed(store)
    shutil.rmtree(tmp := (await start("none")).output)
    assert not tmp.exists()
    store.train_steps.clear()
    store.versions.clear()
    store.data = {id: replace(item, status=DataStatus.READY) for id, item in store.data.items()}

    trainer = await start("none")
    train = StepComputer.train

    def dies_in_step_2(self: StepComputer, data: Any, version: int) -> StepResult:
        result = train(self, data, version)
        if version == 1:
            raise RuntimeError("killed")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(StepComputer, "train", dies_in_step_2)
        with pytest.raises(RuntimeError, match="killed"):
            await trainer.run()
    assert len(store.with_status(DataStatus.PLANNED)) == 4

    await (await start()).run()
    assert losses(store) == undisturbed
    assert committed(store) == expected
    assert [step.id for step in store.train_steps.values()] == ["1/1", "1/2", "2/2", "2/3"]


async def test_versions_go_on_upwards_after_a_resume(store: FakeStore, start: Start) -> None:
    await (await start(save_steps=2, max_steps=3)).run()
    shutil.rmtree((await start("none")).output / "checkpoint-000003")
    for step in store.train_steps.values():
        store.train_steps[step.id] = replace(step, status=StepStatus.COMMITTED)
    trainer = await start(max_steps=3)
    assert (trainer.progress.step, trainer.progress.is_published) == (2, False)
    await trainer.run()
    assert sorted(store.versions) == [0, 1, 2, 3, 4, 5]
    assert store.versions[3].status is VersionStatus.WITHDRAWN
    assert [(store.versions[id].step, store.versions[id].train_step) for id in (4, 5)] == [
        (2, "1/2"),
        (3, "2/3"),
    ]


async def test_a_database_that_was_emptied_is_told(store: FakeStore, start: Start) -> None:
    await (await start(max_steps=1)).run()
    store.train_steps.clear()
    with pytest.raises(ConfigError, match="1 steps that database run does not know"):
        await start()


async def test_a_stop_saves_and_leaves(store: FakeStore, start: Start, tmp_path: Path) -> None:
    store.unfinished_groups = 1
    trainer = await start(save_steps=99)
    trainer.tracker = StopAt(3, trainer.stop)
    await trainer.run()
    assert (tmp_path / "output" / "checkpoint-000003" / "state.json").is_file()


async def test_a_full_disk_does_not_end_training(
    store: FakeStore, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = await start()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100, 90, 10))
    with pytest.raises(PublishError, match="is full"):
        await trainer.run()
    assert len(committed(store)) == 3
    assert sorted(store.versions) == [0]
    assert "is full" in caplog.text


async def test_three_losses_that_are_not_finite_end_training(
    store: FakeStore, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad = StepResult({"loss": float("nan"), "grad_norm": 1.0}, is_finite=False)
    monkeypatch.setattr(StepComputer, "train", lambda *_: bad)
    with pytest.raises(TrainingError, match="not finite 3 times in a row"):
        await (await start()).run()
    assert store.with_status(DataStatus.READY) == list(store.data)
    assert [step.data[0] for step in store.train_steps.values()] == ["a/0/1", "c/0/1", "a/0/1"]
    assert "a/0/1, a/1/1, b/0/1, b/1/1" in caplog.text


def summary(mean: float, scored: int, minute: int) -> dict[str, Any]:
    moment = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minute)
    return {"mean_score": mean, "pass_rate": mean, "scored": scored, "finalised_at": moment}


async def test_the_reward_is_that_of_all_trajectories_since_the_last_step(store: FakeStore) -> None:
    store.summaries = [summary(1.0, 6, 1), summary(0.0, 2, 2), summary(0.5, 4, 3)]
    first = await reward_metrics(cast("Store", store), "train", [], None)
    assert first["reward"] == pytest.approx(8 / 12)
    assert first["reward_until"] == store.summaries[2]["finalised_at"]
    second = await reward_metrics(cast("Store", store), "train", [], store.summaries[0]["finalised_at"])
    assert second["reward"] == pytest.approx(2 / 6)
    third = await reward_metrics(cast("Store", store), "train", [], first["reward_until"])
    assert third == {"reward_until": first["reward_until"]}


def test_groups_without_a_score_have_no_reward() -> None:
    failed = {"mean_score": None, "pass_rate": None, "scored": 0}
    assert trajectory_means([failed]) == {}
    assert trajectory_means([failed, summary(0.5, 2, 0)]) == {"reward": 0.5, "pass_rate": 0.5}
