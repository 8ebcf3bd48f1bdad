"""Training goes through to its end, and on after kills, lost leases, full disks and bad losses."""

from __future__ import annotations

import asyncio
import importlib
import shutil
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from fake_store import FakeStore
from otlp_collector import traced
from training_data import group

from agentrl.base.atomic_folder import remove_leftovers
from agentrl.base.device_lease import DeviceLease
from agentrl.data.stream import DataStream, StepData
from agentrl.documents.model_call import pack_halves, unpack_halves
from agentrl.documents.status import DataStatus, StepStatus, TrainerEnd, VersionStatus
from agentrl.documents.training import TokenStatistics, TrainStep
from agentrl.errors import ConfigError, LeaseLostError, PublishError, StoreUnavailableError, TrainingError
from agentrl.observe.metric_definitions import DEFINITIONS
from agentrl.train import checkpoint, controller, loop, publishing
from agentrl.train.controller import Controller
from agentrl.train.lease import HeldTrainerLease
from agentrl.train.loop import Trainer
from agentrl.train.step import PolicyTrainer, StepResult, TokenValues
from agentrl.weights.folder import verify
from agentrl.weights.snapshot import Snapshot, Written

Usage = namedtuple("Usage", "total used free")
Start = Callable[..., Any]


class StopAt:
    """A tracker that asks the trainer to stop when it hears of a step."""

    def __init__(self, step: int, stop: asyncio.Event) -> None:
        self.step, self.stop = step, stop

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step == self.step:
            self.stop.set()

    def close(self) -> None:
        """Nothing is open."""


class Killed(BaseException):
    """The trainer's process has ended here: nothing is tidied up."""


class Kill:
    """Ends the trainer where a function is called for the ``at``-th time."""

    def __init__(self, at: int) -> None:
        self.left = at

    def instead_of(self, patch: pytest.MonkeyPatch, module: str, name: str) -> None:
        owner: Any = importlib.import_module(module)
        *outer, name = name.split(".")
        for part in outer:
            owner = getattr(owner, part)
        whole = getattr(owner, name)

        def dies(*arguments: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise Killed
            if self.left == 0:
                patch.setattr(shutil, "rmtree", lambda *_, **__: None)
                raise Killed
            return whole(*arguments, **named)

        patch.setattr(owner, name, dies)


def outcome(store: FakeStore) -> dict[str, Any]:
    """What is left of a run, whoever and however many trained it."""
    return {
        "steps": committed(store),
        "losses": losses(store),
        "trained": store.with_status(DataStatus.TRAINED),
        "versions": [(v.id, v.step, v.status, v.files) for v in store.versions.values()],
    }


@pytest.fixture(scope="module")
def untouched(starter: Start, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run leaves that nothing disturbs."""
    store = FakeStore()
    for name in "abcdef":
        store.add(*group(name))

    async def train() -> None:
        await (await starter(store, tmp_path_factory.mktemp("untouched"))()).run()

    asyncio.run(train())
    return outcome(store)


def committed(store: FakeStore) -> list[TrainStepKey]:
    steps = (step for step in store.train_steps.values() if step.status is StepStatus.COMMITTED)
    return [(step.step, step.policy_version, step.data) for step in steps]


TrainStepKey = tuple[int, int, tuple[str, ...]]


def losses(store: FakeStore) -> list[float]:
    steps = store.train_steps.values()
    return [step.metrics["loss"] for step in steps if step.status is StepStatus.COMMITTED]


async def test_everything_is_trained_published_and_saved(
    store: FakeStore, start: Start, tmp_path: Path, base: Path
) -> None:
    await (await start()).run()
    assert [(step, version) for step, version, _ in committed(store)] == [(1, 0), (2, 1), (3, 2)]
    assert store.with_status(DataStatus.TRAINED) == list(store.data)
    assert sorted(store.versions) == [0, 1, 2, 3]
    assert store.versions[3].train_step == "1/3"
    steps = list(store.train_steps.values())
    found = checkpoint.find(tmp_path / "output", "auto", steps, run_name="run", base=base)
    assert found is not None
    assert found.state.train_steps == ("1/1", "1/2", "1/3")
    assert (found.state.step, found.state.policy_version) == (3, 2)


async def test_the_trainer_has_the_device_from_its_data_to_the_copy_of_its_weights(
    store: FakeStore, start: Start, untouched: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, device = (DeviceLease(["d"], name, folder=tmp_path / "locks") for name in ("engine", "trainer"))
    await device.acquire(urgent=True)
    events: list[str] = []
    sampled = asyncio.Event()
    train, write, take = PolicyTrainer.train, Controller.write_version, DataStream.take

    def noted_train(*arguments: Any) -> StepResult:
        events.append("train")
        return train(*arguments)

    def noted_write(*arguments: Any) -> Any:
        events.append("copy")
        return write(*arguments)

    async def take_samples(stream: DataStream, step: int) -> StepData | None:
        await sampled.wait()
        sampled.clear()
        return await take(stream, step)

    async def lend() -> None:
        while True:
            await engine.acquire()
            events.append("sample")
            sampled.set()
            await engine.until_wanted()
            engine.release()

    monkeypatch.setattr(PolicyTrainer, "train", noted_train)
    monkeypatch.setattr(Controller, "write_version", noted_write)
    monkeypatch.setattr(DataStream, "take", take_samples)
    lending = asyncio.create_task(lend())
    await (await start(device=device)).run()
    lending.cancel()
    assert outcome(store) == untouched
    assert events == ["sample", *["train", "copy", "sample"] * 3]
    assert all(step.metrics["seconds_device"] > 0 for step in store.train_steps.values())


async def test_every_metric_is_reported(store: FakeStore, start: Start) -> None:
    await (await start(max_steps=1)).run()
    [step] = store.train_steps.values()
    assert set(step.metrics) >= {
        "loss", "grad_norm", "lr", "kl_k1", "kl_k3", "entropy", "ratio_mean", "ratio_max", "clipped_fraction",
        "masked_fraction", "effective_sample_size", "staleness_mean", "staleness_max", "tokens",
        "trainable_tokens", "trajectories", "groups", "tokens_per_second", "seconds_data",
        "seconds_forward_backward", "seconds_optimizer", "seconds_publish", "groups_open", "groups_ready",
        "staleness_histogram", "version_fractions", "stale_trajectories",
    }  # fmt: skip
    assert set(step.metrics) <= set(DEFINITIONS)


async def resumed_after_step_2(store: FakeStore, start: Start, **changes: Any) -> Trainer:
    """A trainer that goes on from a checkpoint of step 2 where step 3 had been trained and published."""
    trainer = await start(save_steps=2, max_steps=3)
    await trainer.run()
    shutil.rmtree(trainer.publisher.folders.output / "checkpoint-000003")
    return cast("Trainer", await start(**{"max_steps": 3, **changes}))


async def test_a_replayed_step_with_equal_weights_is_the_version_that_it_was(
    store: FakeStore, start: Start
) -> None:
    trainer = await resumed_after_step_2(store, start)
    assert (trainer.progress.step, trainer.progress.version, trainer.progress.is_published) == (2, 2, True)
    assert store.versions[3].status is VersionStatus.WITHDRAWN
    await trainer.run()
    assert sorted(store.versions) == [0, 1, 2, 3]
    assert {version.status for version in store.versions.values()} == {VersionStatus.PUBLISHED}
    assert store.versions[3].train_step == "2/3"
    verify(store.versions[3].location, store.versions[3].files)
    assert sorted(path.name for path in (trainer.publisher.folders.output / "weights").glob("v*")) == [
        "v000001", "v000002", "v000003",
    ]  # fmt: skip


async def test_versions_go_on_upwards_where_a_replay_ends_elsewhere(store: FakeStore, start: Start) -> None:
    trainer = await resumed_after_step_2(store, start)
    trainer.controller.trainer.optimizer.param_groups[0]["lr"] *= 2
    await trainer.run()
    assert sorted(store.versions) == [0, 1, 2, 3, 4]
    assert store.versions[3].status is VersionStatus.WITHDRAWN
    assert (store.versions[4].step, store.versions[4].train_step) == (3, "2/3")


async def test_a_reverted_step_trains_again_what_it_trained(store: FakeStore, start: Start) -> None:
    trainer = await resumed_after_step_2(store, start)
    [trained] = [step.data for step in store.train_steps.values() if step.step == 3]
    for name in "cdab":
        store.add(*group(f"0{name}"))
    store.places = {f"0{name}": (0, number) for number, name in enumerate("abcd")}
    await trainer.run()
    assert [step.data for step in store.train_steps.values() if step.step == 3] == [trained, trained]


async def test_starting_anew_chooses_anew(store: FakeStore, start: Start) -> None:
    await (await start(max_steps=1)).run()
    store.places = {name: (0, number) for number, name in enumerate("fedcba")}
    trainer = await start("none", max_steps=1)
    await trainer.run()
    assert store.train_steps["2/1"].data == ("f/0/1", "f/1/1", "e/0/1", "e/1/1")
    assert [path.name for path in sorted(trainer.publisher.folders.output.glob("*checkpoint-*"))] == [
        "checkpoint-000001-2", "undone-checkpoint-000001",
    ]  # fmt: skip


CRASHES: dict[str, Any] = {
    "planned": ("agentrl.data.stream", "step_window"),
    "computed": ("fake_store", "_Steps.commit"),
    "committed, not saved": ("agentrl.train.checkpoint", "begin"),
    "half a checkpoint": ("agentrl.train.checkpoint", "read_random_states"),
    "checkpoint written, not renamed": ("agentrl.base.atomic_folder", "_replace"),
    "saved, not published": ("agentrl.train.publishing", "publish"),
    "half a version": ("agentrl.train.controller", "write_beside"),
    "version reserved, not placed": ("agentrl.weights.publish", "write_manifest"),
    "version written, not published": ("fake_store", "_PolicyVersions.publish"),
    "published, not pruned": ("agentrl.weights.publish", "_prune"),
}


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("where", CRASHES)
async def test_a_trainer_that_dies_anywhere_ends_where_one_does_that_did_not(
    store: FakeStore, start: Start, untouched: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    where: str, step: int,
) -> None:  # fmt: skip
    trainer = await start("none")
    module, name = CRASHES[where]
    kill = Kill(at=step if where != "checkpoint written, not renamed" else 2 * step - 1)
    with monkeypatch.context() as patch:
        kill.instead_of(patch, module, name)
        with pytest.raises(Killed):
            await trainer.run()
    trainer = await start()
    remove_leftovers(trainer.publisher.folders.output)
    remove_leftovers(trainer.publisher.folders.output / "weights")
    await trainer.run()
    assert outcome(store) == untouched
    assert not list(trainer.publisher.folders.output.glob("**/.tmp-*"))


async def test_a_trainer_that_was_replaced_writes_nothing_more(store: FakeStore, start: Start) -> None:
    trainer = await start()
    store.attempt += 1
    with pytest.raises(LeaseLostError):
        await trainer.run()
    assert store.train_steps == {}
    assert trainer.lease.ended is None


async def test_a_trainer_that_waits_ends_when_it_is_replaced(store: FakeStore, start: Start) -> None:
    store.data.clear()
    store.unfinished_groups = 1
    trainer = await start()
    running = asyncio.create_task(trainer.run())
    await asyncio.sleep(0)
    store.attempt += 1
    trainer.lease.lost.set()
    with pytest.raises(LeaseLostError):
        await running


async def test_a_database_that_was_emptied_is_told(store: FakeStore, start: Start) -> None:
    await (await start(max_steps=1)).run()
    store.train_steps.clear()
    with pytest.raises(ConfigError, match="1 steps that are not in database run"):
        await start()


async def test_a_stop_saves_and_leaves(store: FakeStore, start: Start, tmp_path: Path) -> None:
    store.unfinished_groups = 1
    trainer = await start(save_steps=99)
    trainer.tracker = StopAt(3, trainer.stop)
    await trainer.run()
    assert (tmp_path / "output" / "checkpoint-000003" / "state.json").is_file()
    assert trainer.lease.ended is TrainerEnd.STOPPED


async def test_the_heartbeat_says_that_a_trainer_waits_only_where_it_has_no_data(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await start(max_steps=2)
    said: list[str] = []

    def note(lease: HeldTrainerLease, name: str, value: Any) -> None:
        object.__setattr__(lease, name, value)
        if name == "doing":
            said.append(value.shown)

    monkeypatch.setattr(HeldTrainerLease, "__setattr__", note)
    await trainer.run()
    assert said == [
        "waiting for the data of step 1", "training step 1", "publishing the weights of step 1",
        "waiting for the data of step 2", "training step 2", "publishing the weights of step 2",
        "saving step 2", "waiting until the engines serve the last version",
    ]  # fmt: skip


async def test_how_a_trainer_ended_is_known(store: FakeStore, start: Start) -> None:
    trainer = await start(max_steps=1)
    trainer.tracker = StopAt(1, trainer.stop)
    await trainer.run()
    assert trainer.lease.ended is TrainerEnd.FINISHED, "a stop at the last step"
    trainer = await start()
    await trainer.run()
    assert trainer.lease.ended is TrainerEnd.FINISHED, "the end of the data"


async def test_a_full_disk_does_not_end_training(
    store: FakeStore, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = await start(max_staleness=9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100, 90, 10))
    with pytest.raises(PublishError, match="is full"):
        await trainer.run()
    assert len(committed(store)) == 3
    assert sorted(store.versions) == [0]
    assert "is full" in caplog.text


class Disk:
    """The disk of a folder: full, or as it is."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = True
        self.pauses = 0
        usage = shutil.disk_usage

        def look(path: Path) -> Any:
            is_there = self.is_full and Path(path).is_relative_to(folder)
            return Usage(100, 90, 10) if is_there else usage(path)

        monkeypatch.setattr(shutil, "disk_usage", look)


async def test_training_pauses_at_the_staleness_bound_until_it_can_publish(
    store: FakeStore, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = await start(max_staleness=1, save_steps=99)
    disk = Disk(trainer.publisher.folders.output, monkeypatch)
    paused_at: list[int] = []

    async def make_space(*events: asyncio.Event, timeout: float) -> None:
        paused_at.append(len(committed(store)))
        disk.is_full = len(paused_at) < 3

    monkeypatch.setattr(publishing, "wait_for_any", make_space)
    await trainer.run()
    assert paused_at == [2, 2, 2]
    assert "training pauses at step 2, 2 steps ahead of version 0" in caplog.text
    assert f"the disk of {trainer.publisher.folders.output / 'weights'} is full" in caplog.text
    assert "10 are free" in caplog.text
    assert [(version.id, version.step) for version in store.versions.values()] == [(0, 0), (1, 2), (2, 3)]


async def test_training_that_cannot_publish_ends_with_what_it_has_kept(
    store: FakeStore, start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer = await start(max_staleness=1, publish_wait_seconds=0.01)
    trainer.publisher.folders = replace(trainer.publisher.folders, fallback=tmp_path / "fallback")
    await trainer.publisher.folders.claim()
    Disk(trainer.publisher.folders.output, monkeypatch)
    with pytest.raises(PublishError, match=r"training stops at step 2: the disk of .* is full") as stopped:
        await trainer.run()
    kept = tmp_path / "fallback" / "checkpoint-000002"
    assert f"Saved: {kept} (step 2), version 0 of step 0" in stopped.value.message
    assert (kept / "state.json").is_file()
    assert len(committed(store)) == 2


async def test_staleness_counts_optimizer_steps_whether_they_are_published_or_not(
    store: FakeStore, start: Start
) -> None:
    await (await start(publish_steps=99)).run()
    steps = [step.metrics for step in store.train_steps.values()]
    assert [step["staleness_mean"] for step in steps] == [0.0, 1.0, 2.0]
    assert [list(step["staleness_histogram"]) for step in steps] == [["0"], ["1"], ["2"]]
    assert steps[0]["staleness_histogram"]["0"] == steps[0]["trainable_tokens"]


@pytest.mark.parametrize("publish_steps", [1, 2])
async def test_a_checkpoint_and_the_version_of_its_step_share_their_files(
    start: Start, tmp_path: Path, publish_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint links what is written for the version."""
    written: list[Path] = []
    write = controller.write_share

    def count(folder: Path, snapshot: Snapshot) -> Written:
        written.append(folder)
        return write(folder, snapshot)

    monkeypatch.setattr(controller, "write_share", count)
    await (await start(save_steps=2, publish_steps=publish_steps, max_staleness=publish_steps - 1)).run()
    assert len(written) == {1: 3, 2: 2}[publish_steps], "once for each step"
    output = tmp_path / "output"
    for step in (2, 3):
        version = output / "weights" / f"v{step // publish_steps + (step % publish_steps):06d}"
        saved = output / f"checkpoint-{step:06d}" / "model"
        for name in ("model.safetensors", "tokenizer.json", "config.json"):
            assert (version / name).samefile(saved / name), (step, name)


async def test_every_nth_version_is_kept_for_ever(store: FakeStore, start: Start, tmp_path: Path) -> None:
    for name in "ghijklmn":
        store.add(*group(name))
    await (await start(keep_every=3, published_versions_kept=2)).run()
    kept = sorted(path.name for path in (tmp_path / "output" / "weights").glob("v*"))
    assert kept == ["v000003", "v000006", "v000007"]
    pruned = [version.id for version in store.versions.values() if version.pruned_at is not None]
    assert pruned == [1, 2, 4, 5]


async def test_weights_are_published_early_where_sampling_waits_for_them(
    store: FakeStore, start: Start
) -> None:
    await (await start(publish_steps=99, max_staleness=1)).run()
    assert [(version.id, version.step) for version in store.versions.values()] == [(0, 0), (1, 2), (2, 3)]


async def test_three_losses_that_are_not_finite_end_training(
    store: FakeStore, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad = StepResult({"loss": float("nan"), "grad_norm": 1.0}, is_finite=False)
    monkeypatch.setattr(PolicyTrainer, "train", lambda *_: bad)
    with pytest.raises(TrainingError, match="not finite 3 times in a row"):
        await (await start()).run()
    assert store.with_status(DataStatus.READY) == list(store.data)
    assert [step.data[0] for step in store.train_steps.values()] == ["a/0/1", "c/0/1", "a/0/1"]
    assert "a/0/1, a/1/1, b/0/1, b/1/1" in caplog.text


async def test_a_step_is_a_trace_with_its_phases_and_links(store: FakeStore, start: Start) -> None:
    asked: list[int] = []

    async def trace_ids(records: list[str], limit: int) -> list[str]:
        asked.append(len(records))
        return [f"{len(asked):032x}"]

    store.records = SimpleNamespace(trace_ids=trace_ids)  # type: ignore[attr-defined]
    trainer = await start(max_steps=2)
    with traced() as collector:
        await trainer.run()
    first, second = collector.named("train_step")
    assert (first.parent, first.trace == second.trace) == ("", False)
    assert (first.links, second.links) == ([f"{1:032x}"], [f"{2:032x}"])
    step = store.train_steps["1/1"]
    expected = {
        "agentrl.train_step": "1/1", "agentrl.step": 1, "agentrl.policy_version": 0, "agentrl.groups": 2,
        "agentrl.loss": step.metrics["loss"], "agentrl.trajectories": step.metrics["trajectories"],
    }  # fmt: skip
    assert expected.items() <= first.attributes.items()
    assert len(first.attributes["agentrl.records"]) == asked[0] == len(step.data)
    children = [span for span in collector.spans if span.parent == first.id]
    names = [span.name for span in sorted(children, key=lambda span: span.begin)]
    assert names == ["wait_for_data", "updates", "commit", "publish", "save"]
    (updates,) = (span for span in children if span.name == "updates")
    phases = [span for span in collector.spans if span.parent == updates.id]
    assert [span.name for span in phases] == ["pack", "forward", "backward", "optimizer"]
    assert all(first.begin <= span.begin and span.end <= first.end for span in children)


STEP = TrainStep(id="2/7", step=7, policy_version=6, data=("a/0/1",), owner="me")
ITEM = group("a")[0]
VALUES = [
    TokenValues(ITEM.id, ITEM.spans, np.array([0.5, -1.0, 0.0, 2e5], np.float32), np.ones(4, np.float32))
]


def failing(error: BaseException) -> Callable[[Sequence[TokenStatistics]], Any]:
    async def put(items: Sequence[TokenStatistics]) -> None:
        raise error

    return put


async def test_a_step_is_written_as_one_document_per_trajectory(store: Any) -> None:
    writes = loop.TokenWriter(store)
    writes.start(STEP, VALUES)
    await writes.close()
    (written,) = store.statistics.values()
    assert (written.id, written.record, written.step) == ("a/0/1@2/7", "a/0/1", 7)
    assert [(span.start, span.end) for span in written.spans] == [(6, 10)]
    assert unpack_halves(written.log_ratios).tolist() == [0.5, -1.0, 0.0, 65504.0]
    assert written.problem(10) is None
    assert written.problem(9) == "a span is outside 9 tokens"


def test_packed_halves_keep_missing_values_and_three_digits() -> None:
    values = np.array([1e-4, 0.0123456, 11.5, np.nan], np.float32)
    np.testing.assert_allclose(unpack_halves(pack_halves(values)), values, rtol=5e-4)


async def test_a_failed_write_is_a_warning(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    store.training.put_token_statistics = failing(StoreUnavailableError("the database is gone"))  # type: ignore[method-assign]
    writes = loop.TokenWriter(store)
    writes.start(STEP, VALUES)
    await writes.close()
    assert "step 7: its token statistics are not stored: the database is gone" in caplog.text


async def test_a_slow_write_is_never_waited_for_longer_than_the_end_of_the_run(
    store: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(items: Sequence[TokenStatistics]) -> None:
        await asyncio.Event().wait()

    store.training.put_token_statistics = hangs  # type: ignore[method-assign]
    monkeypatch.setattr(loop, "CLOSE_SECONDS", 0.01)
    writes = loop.TokenWriter(store)
    writes.start(STEP, VALUES)
    writes.start(STEP, VALUES)
    assert "still writing those of an earlier step" in caplog.text
    await writes.close()
    assert "the database is too slow" in caplog.text
    assert store.statistics == {}


async def test_a_run_stores_the_tokens_of_each_step_whose_write_succeeds(
    store: Any, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put = store.training.put_token_statistics

    async def fails_once(items: Sequence[TokenStatistics]) -> None:
        if items[0].step == 1:
            raise StoreUnavailableError("gone")
        await put(items)

    monkeypatch.setattr(store.training, "put_token_statistics", fails_once)
    await (await start(save_steps=9, publish_steps=9)).run()
    assert store.with_status(DataStatus.TRAINED) == list(store.data)
    steps = list(store.train_steps.values())
    assert [step.step for step in steps] == [1, 2, 3]
    assert store.statistics.keys() == {f"{data}@{step.id}" for step in steps[1:] for data in step.data}
    assert all(item.problem(10) is None for item in store.statistics.values())
    assert "step 1: its token statistics are not stored: gone" in caplog.text
