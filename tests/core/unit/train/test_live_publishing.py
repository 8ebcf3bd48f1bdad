"""--weight_sync tensor and distributed: which versions are stored, and what a resumed trainer withdraws."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_store import FakeStore, engine
from safetensors.torch import load_file

from agentrl.base.atomic_folder import TEMPORARY
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import VersionStatus
from agentrl.errors import PublishError
from agentrl.train import publishing
from agentrl.weights.live import open_memory_file

Start = Callable[..., Any]


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
    store: FakeStore, start: Start, monkeypatch: pytest.MonkeyPatch, files: dict[str, int]
) -> None:
    from agentrl.weights import live

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
