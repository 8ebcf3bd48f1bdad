"""Versions are published beside training, one at a time: whole, as deltas, or in memory (--weight_sync)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_store import FakeStore, engine
from safetensors.torch import load_file
from tiny_models import model_logprobs
from tiny_trainer import DATA, tiny_trainer
from training_data import group
from waiting import until

from agentrl.base.atomic_folder import TEMPORARY
from agentrl.base.device_lease import DeviceLease
from agentrl.config.schema import ModelConfig, TrainConfig
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import StepStatus, VersionStatus
from agentrl.errors import LeaseLostError, PublishError, StoreUnavailableError
from agentrl.model.load import load_policy
from agentrl.train import controller, publishing
from agentrl.train.loop import Trainer
from agentrl.train.publishing import Publisher, StepFiles
from agentrl.weights import live
from agentrl.weights.folder import MANIFEST, TensorChecksum, complete_folder, verify, weights_digest
from agentrl.weights.live import open_memory_file
from agentrl.weights.local_copy import apply
from agentrl.weights.snapshot import Snapshot, Written, write_alone

Start = Callable[..., Any]


class SlowDisk:
    """Holds back what is written of the steps until ``release``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_free = threading.Event()
        self.writing = 0
        write = controller.write_share

        def wait(folder: Path, snapshot: Snapshot) -> Written:
            self.writing += 1
            assert self.is_free.wait(60)
            return write(folder, snapshot)

        monkeypatch.setattr(controller, "write_share", wait)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.is_free.set()


def committed(store: FakeStore) -> int:
    return sum(step.status is StepStatus.COMMITTED for step in store.train_steps.values())


async def test_training_goes_on_while_a_version_is_written(
    store: FakeStore, start: Start, disk: SlowDisk
) -> None:
    """At most ``--max_staleness`` steps ahead; the steps in between are not published."""
    for name in "ghijkl":
        store.add(*group(name))
    trainer = await start(max_staleness=3, save_steps=99)
    running = asyncio.create_task(trainer.run())
    await until(lambda: committed(store) == 4)
    await asyncio.sleep(0.1)
    assert (committed(store), disk.writing, sorted(store.versions)) == (4, 1, [0])
    disk.is_free.set()
    await running
    steps = [version.step for version in store.versions.values()]
    assert steps[:3] == [0, 1, 4]
    assert steps[-1] == 6
    last = store.versions[max(store.versions)]
    verify(last.location, last.files)
    published = list(load_file(Path(last.location) / "model.safetensors").values())
    trained = [part.make() for part in trainer.controller.policy.published.parts()]
    assert sum(map(torch.Tensor.numel, published)) == sum(map(torch.Tensor.numel, trained))


async def test_newer_weights_are_published_while_training_waits_for_data(
    store: FakeStore, start: Start, disk: SlowDisk, tmp_path: Path
) -> None:
    """Their copy takes the device, and gives it back to the engine."""
    engine, device = (DeviceLease(["d"], name, folder=tmp_path / "locks") for name in ("engine", "trainer"))
    await device.acquire(urgent=True)
    store.unfinished_groups = 1
    trainer = await start(save_steps=99, max_staleness=9, device=device)
    running = asyncio.create_task(trainer.run())
    await until(lambda: committed(store) == 3)
    await asyncio.wait_for(engine.acquire(), 5)
    disk.is_free.set()
    await engine.until_wanted()
    assert [version.step for version in store.versions.values()] == [0, 1]
    engine.release()
    await until(lambda: trainer.progress.published_step == 3)
    assert [version.step for version in store.versions.values()] == [0, 1, 3]
    await asyncio.wait_for(engine.acquire(), 5)
    engine.release()
    trainer.stop.set()
    await running


async def test_a_version_that_could_not_be_written_in_the_background_is_published_later(
    store: FakeStore, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = await start(save_steps=99, max_staleness=9)
    write = controller.write_share

    def fail_once(folder: Path, snapshot: Snapshot) -> Written:
        monkeypatch.setattr(controller, "write_share", write)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(controller, "write_share", fail_once)
    await trainer.run()
    assert "is not published: the disk of" in caplog.text
    assert max(version.step for version in store.versions.values()) == 3
    assert sorted(store.versions) == list(range(len(store.versions)))
    assert not list((trainer.publisher.folders.output / "weights").glob(".tmp-*"))


async def test_a_trainer_that_was_replaced_while_it_wrote_publishes_nothing(
    store: FakeStore, start: Start, disk: SlowDisk
) -> None:
    trainer = await start(save_steps=99, max_staleness=0)
    running = asyncio.create_task(trainer.run())
    await until(lambda: disk.writing == 1)
    store.attempt += 1
    disk.is_free.set()
    with pytest.raises(LeaseLostError):
        await running
    assert sorted(store.versions) == [0]
    assert list((trainer.publisher.folders.output / "weights").glob("v*")) == []


async def test_after_an_error_no_version_is_begun_of_a_step_that_is_not_committed(
    store: FakeStore, start: Start, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = store.steps.commit

    async def fail(key: str, *arguments: Any, **named: Any) -> None:
        if key == "1/3":
            disk.is_free.set()
            raise StoreUnavailableError("gone")
        await commit(key, *arguments, **named)

    monkeypatch.setattr(store.steps, "commit", fail)
    trainer = await start(save_steps=99, max_staleness=9)
    with pytest.raises(StoreUnavailableError):
        await trainer.run()
    assert [version.step for version in store.versions.values()] == [0, 1]
    assert trainer.publisher.flight.step == 1


async def test_an_error_of_the_publisher_ends_the_wait_for_data(
    store: FakeStore, start: Start, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.unfinished_groups = 1
    trainer = await start(save_steps=99, max_staleness=9)
    running = asyncio.create_task(trainer.run())
    await until(lambda: committed(store) == 3)

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(type(trainer.controller), "write_version", fail)
    disk.is_free.set()
    with pytest.raises(RuntimeError, match="CUDA error"):
        await asyncio.wait_for(running, 20)


async def test_a_version_that_ends_late_in_a_turn_is_followed_by_newer_weights(
    store: FakeStore, start: Start, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step's offer is over by then, and no other comes while the trainer waits for data."""
    store.unfinished_groups = 1
    trainer = await start(save_steps=99, max_staleness=9)
    publisher = trainer.publisher
    offer = publisher.offer

    async def offer_late() -> None:
        await offer()
        if publisher.progress.step == 3:
            disk.is_free.set()
            await publisher.flight.task

    monkeypatch.setattr(publisher, "offer", offer_late)
    running = asyncio.create_task(trainer.run())
    await until(lambda: publisher.progress.published_step == 3)
    trainer.stop.set()
    await running


async def test_a_multiple_of_publish_steps_that_passed_meanwhile_is_made_up_for(
    store: FakeStore, start: Start, disk: SlowDisk
) -> None:
    for name in "ghij":
        store.add(*group(name))
    store.unfinished_groups = 1
    trainer = await start(save_steps=99, max_staleness=9, publish_steps=2)
    running = asyncio.create_task(trainer.run())
    await until(lambda: committed(store) == 5)
    disk.is_free.set()
    await until(lambda: trainer.progress.published_step >= 4)
    trainer.stop.set()
    await running


async def test_a_checkpoint_that_cannot_be_described_does_not_hold_up_the_version(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its version waits for the checkpoint to link the files: an hour, if nobody tells it."""
    trainer = await start(save_steps=1)

    def gone(folder: Path) -> Any:
        raise OSError("the folder of the base model is gone")

    monkeypatch.setattr(publishing, "architecture", gone)
    with pytest.raises(OSError, match="base model is gone"):
        await asyncio.wait_for(trainer.run(), 20)


async def test_what_fails_beside_the_error_of_training_does_not_hide_it(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(words: str) -> None:
        raise RuntimeError(words)

    publisher = (await start()).publisher
    publisher.flight = StepFiles(step=1, train_step=None, base=None)
    publisher.flight.task = asyncio.create_task(fail("the version"))
    publisher._saving = asyncio.create_task(fail("the checkpoint"))  # type: ignore[arg-type]
    await publisher.close()
    assert "RuntimeError: the version" in caplog.text
    assert "RuntimeError: the checkpoint" in caplog.text


async def test_a_disk_that_hangs_ends_training(
    start: Start, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await start(max_steps=1, save_steps=99)
    monkeypatch.setattr(publishing, "WRITE_SECONDS", 0.2)
    monkeypatch.setattr(publishing, "REPORT_SECONDS", 0.1)
    says = "stops at step 1: the version of step 1 is not written after 0.2 s"
    with pytest.raises(PublishError, match=says):
        await trainer.run()


def weights(trainer: Trainer, store: FakeStore, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Rebuild the newest version from the newest whole weights and the deltas since."""
    version = store.versions[max(store.versions)]
    chain = [version]
    while chain[0].base is not None:
        chain.insert(0, store.versions[chain[0].base])
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in Path(chain[0].location).iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    files = [Path(item.location) / file.name for item in chain[1:] for file in item.files]
    listed = json.loads((Path(version.location) / MANIFEST).read_text())["tensors"]
    expected = {name: TensorChecksum.from_json(value) for name, value in listed.items()}
    apply(files, copy, expected)
    assert version.digest == weights_digest(expected)
    return load_file(copy / "model.safetensors")


@pytest.mark.parametrize("saves", [1, 99])
async def test_deltas_lead_to_the_trained_weights(
    store: FakeStore, start: Start, tmp_path: Path, saves: int
) -> None:
    """Every third version is whole; a checkpoint holds whole weights in any case."""
    for name in "ghijkl":
        store.add(*group(name))
    trainer = await start(publish="delta", full_every=3, save_steps=saves, published_versions_kept=2)
    await trainer.run()
    kinds = [(version.encoding, version.base) for _, version in sorted(store.versions.items())]
    whole = ("full", None)
    assert kinds == [whole, whole, ("delta", 1), ("delta", 2), whole, ("delta", 4), ("delta", 5)]
    found = weights(trainer, store, tmp_path)
    trained = {part.name: part.make() for part in trainer.controller.policy.published.parts()}
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], trained[name]) for name in trained)
    saved = load_file(trainer.publisher.folders.output / "checkpoint-000006" / "model" / "model.safetensors")
    assert all(torch.equal(saved[name], trained[name]) for name in trained)


async def test_an_engine_that_lacks_a_delta_gets_whole_weights(store: FakeStore, start: Start) -> None:
    store.engines = [engine(needs_full=True)]
    await (await start(publish="delta", max_steps=3)).run()
    assert {version.encoding for version in store.versions.values()} == {"full"}


async def test_deltas_that_are_not_small_are_not_written_by_default(store: FakeStore, start: Start) -> None:
    """A tiny model in float32 at a high learning rate: almost every element changes."""
    await (await start(publish="auto")).run()
    encodings = [version.encoding for _, version in sorted(store.versions.items())]
    assert encodings == ["full", "full", "delta", "full"]


async def test_a_replayed_delta_is_reinstated_as_whole_weights(store: FakeStore, start: Start) -> None:
    trainer = await start(publish="delta", save_steps=2, max_steps=3)
    await trainer.run()
    shutil.rmtree(trainer.publisher.folders.output / "checkpoint-000003")
    assert store.versions[3].encoding == "delta"
    trainer = await start(publish="delta", max_steps=3)
    assert store.versions[3].status is VersionStatus.WITHDRAWN
    await trainer.run()
    again = store.versions[3]
    assert (again.status, again.encoding, again.base) == (VersionStatus.PUBLISHED, "full", None)
    assert (sorted(store.versions), Path(again.location).name) == ([0, 1, 2, 3], "v000003-2")
    verify(again.location, again.files)


def stored(store: FakeStore) -> list[tuple[int, int, bool]]:
    """(version, step, whether it is stored) of the versions after the base."""
    return [(item.id, item.step, item.is_stored) for item in store.versions.values() if item.id]


@pytest.mark.parametrize("kind", ["tensor", "distributed"])
async def test_every_nth_version_and_the_last_one_are_stored_too(
    store: FakeStore, start: Start, kind: str
) -> None:
    trainer = await start(weight_sync=kind, full_every=2, groups_per_step=1, max_steps=3, save_steps=2)
    await trainer.run()
    expected = [(1, 1, False), (2, 2, True), (3, 3, False), (4, 3, True)]
    assert stored(store) == expected
    assert all(item.live is not None for item in store.versions.values() if item.id)
    assert trainer.publisher.saved_step == 3
    trainer.controller.end()


async def test_the_memory_holds_what_the_files_do(store: FakeStore, start: Start) -> None:
    trainer = await start(weight_sync="tensor", full_every=1, max_steps=2)
    await trainer.run()
    for version in (store.versions[1], store.versions[2]):
        (share,) = version.live.shares
        held = open_memory_file(str(share.file), share.name).named()
        files = load_file(f"{version.location}/model.safetensors")
        assert held.keys() == files.keys()
        assert all(torch.equal(held[name], files[name]) for name in files)
    trainer.controller.end()
    with pytest.raises(PublishError, match="cannot be read"):
        open_memory_file(str(share.file), share.name)


@pytest.mark.parametrize("files", [{}, {"full_every": 1, "save_steps": 1}], ids=["live", "stored too"])
async def test_memory_that_is_short_is_an_overdue_version(
    store: FakeStore, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    files: dict[str, int],
) -> None:  # fmt: skip
    def full(name: str, tensors: Any) -> int:
        raise PublishError("weights do not fit into memory")

    monkeypatch.setattr(live, "write_memory_file", full)
    trainer = await start(
        weight_sync="tensor", max_steps=2, max_staleness=1, publish_wait_seconds=0.2, **files
    )
    with pytest.raises(PublishError, match="do not fit into memory"):
        await trainer.run()
    assert not stored(store)
    assert not any(name.startswith(TEMPORARY) for name in os.listdir(trainer.publisher.folders.versions))
    # The checkpoint needs the files alone.
    assert trainer.publisher.saved_step == 2
    assert "has no checkpoint" not in caplog.text
    trainer.controller.end()


@pytest.mark.parametrize(("kind", "waits"), [("distributed", True), ("tensor", False)])
async def test_the_trainer_ends_when_engines_have_taken_its_last_version_from_the_network(
    store: FakeStore, start: Start, monkeypatch: pytest.MonkeyPatch, kind: str, waits: bool
) -> None:
    trainer = await start(weight_sync=kind, full_every=9, max_steps=2)
    store.engines, seen = [engine(policy_version=1), engine()], []

    async def follow(*events: Any, timeout: float) -> None:
        seen.append(open_for_engines(store))
        store.engines[0] = engine(policy_version=max(store.versions))

    monkeypatch.setattr(publishing, "wait_for_any", follow)
    await trainer.run()
    assert seen == ([True] if waits else [])
    trainer.controller.end()


def open_for_engines(store: FakeStore) -> bool:
    """Whether the trainer still answers requests for its last version."""
    live = store.versions[max(store.versions)].live
    with socket.create_connection(("127.0.0.1", int(live.shares[0].port or 0)), 5.0):
        return True


async def test_an_engine_that_never_takes_the_last_version_ends_the_wait(
    store: FakeStore, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publishing, "LIVE_ENGINE_SECONDS", 0.05)
    trainer = await start(weight_sync="distributed", full_every=9, max_steps=1)
    store.engines = [engine(policy_version=0)]
    await trainer.run()
    assert "is not served by e after" in caplog.text
    trainer.controller.end()


def live_only(version: PolicyVersion) -> bool:
    return version.status is VersionStatus.PUBLISHED and not version.is_stored


async def test_a_resumed_trainer_publishes_again_what_died_with_the_last_one(
    store: FakeStore, start: Start
) -> None:
    first = await start(weight_sync="tensor", groups_per_step=1, max_steps=2, full_every=9)
    first.publisher.unstored = -9  # as if it were killed before the last version is stored
    await first.run()
    store.versions = {id: item for id, item in store.versions.items() if not (id and item.is_stored)}
    assert [item.id for item in store.versions.values() if live_only(item)] == [1, 2]
    second = await start(weight_sync="tensor", groups_per_step=1, max_steps=3, full_every=9)
    assert [item.status for item in store.versions.values() if item.id] == [VersionStatus.WITHDRAWN] * 2
    assert not second.progress.is_published
    await second.run()
    newest = max(store.versions)
    assert store.versions[newest].is_stored
    assert store.versions[newest].step == 3
    for trainer in (first, second):
        trainer.controller.end()


def test_what_is_published_is_a_plain_model_with_the_same_logprobs(base: Path, tmp_path: Path) -> None:
    trained = tiny_trainer(base, lora_rank=4, learning_rate=1e-2)
    for _ in range(3):
        trained.train(DATA)
    published = tmp_path / "published"
    published.mkdir()
    write_alone(trained.policy.published, published)
    complete_folder(base, published)
    plain = load_policy(ModelConfig(model_name_or_path=str(published)))
    (forest,) = trained.pack(DATA)
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
