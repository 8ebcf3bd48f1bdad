"""Versions are published beside training, one at a time, whole or as deltas."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_store import FakeStore, engine
from safetensors.torch import load_file
from training_data import group
from waiting import until

from agentrl.documents.status import StepStatus, VersionStatus
from agentrl.errors import LeaseLostError, PublishError
from agentrl.train import controller, publishing
from agentrl.train.loop import Trainer
from agentrl.weights.folder import MANIFEST, TensorChecksum, verify, weights_digest
from agentrl.weights.local_copy import apply
from agentrl.weights.snapshot import Snapshot, Written

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
    store: FakeStore, start: Start, disk: SlowDisk
) -> None:
    store.unfinished_groups = 1
    trainer = await start(save_steps=99, max_staleness=9)
    running = asyncio.create_task(trainer.run())
    await until(lambda: committed(store) == 3)
    disk.is_free.set()
    await until(lambda: trainer.progress.published_step == 3)
    assert [version.step for version in store.versions.values()] == [0, 1, 3]
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
    assert not list((trainer.saver.folders.output / "weights").glob(".tmp-*"))


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
    assert list((trainer.saver.folders.output / "weights").glob("v*")) == []


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
    saved = load_file(trainer.saver.folders.output / "checkpoint-000006" / "model" / "model.safetensors")
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
    shutil.rmtree(trainer.saver.folders.output / "checkpoint-000003")
    assert store.versions[3].encoding == "delta"
    trainer = await start(publish="delta", max_steps=3)
    assert store.versions[3].status is VersionStatus.WITHDRAWN
    await trainer.run()
    again = store.versions[3]
    assert (again.status, again.encoding, again.base) == (VersionStatus.PUBLISHED, "full", None)
    assert (sorted(store.versions), Path(again.location).name) == ([0, 1, 2, 3], "v000003-2")
    verify(again.location, again.files)
