"""A trainer that another one has replaced publishes, saves and deletes nothing: on a real server and disk."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentrl.base.atomic_folder import begin_folder
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import VersionStatus
from agentrl.errors import LeaseLostError
from agentrl.store.client import Store
from agentrl.train.lease import HeldTrainerLease
from agentrl.weights import publish as publishing
from agentrl.weights import storage
from agentrl.weights.folder import TensorChecksum, checksums, complete_folder, verify
from agentrl.weights.publish import PublishTarget, publish, publish_base
from agentrl.weights.snapshot import Written

pytestmark = pytest.mark.integration


@dataclass
class Run:
    """A store and an output folder that trainers share."""

    store: Store
    base: Path
    output: Path
    leases: list[HeldTrainerLease] = field(default_factory=list)
    written: Callable[[], Awaitable[None]] | None = None
    """Called once, when the next version is written and not published yet."""

    async def take_over(self) -> int:
        """Become the trainer; the previous one does not know yet."""
        await self.store.database["TrainerLease"].update_one({}, {"$set": {"owner": None}})
        attempt = await self.store.trainer_lease.acquire("t", "h", os.getpid(), 60.0)
        self.leases.append(HeldTrainerLease(self.store, attempt, 60.0))
        return attempt

    async def publish(self, attempt: int, step: int) -> PolicyVersion:
        """Publish random bytes."""
        temporary = begin_folder(self.output / "weights" / "step")
        (temporary / "model.safetensors").write_bytes(random.randbytes(64))
        complete_folder(self.base, temporary)
        files = checksums(temporary)
        if self.written is not None:
            call, self.written = self.written, None
            await call()
        return await publish(
            self.store, temporary, Written(files, {"w": TensorChecksum("U8", (64,), files[-1].sha256)}),
            PublishTarget(root=str(self.output / "weights"), attempt=attempt, keep=2),
            step=step, train_step_id=None,
        )  # fmt: skip

    def folders(self) -> list[str]:
        return sorted(path.name for path in (self.output / "weights").iterdir())


@pytest.fixture
async def run(store: Store, tmp_path: Path) -> Run:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    await publish_base(store, base)
    run = Run(store, base, tmp_path / "output")
    await run.take_over()
    return run


MOMENTS = ("written", "place_version", "delete")


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_version_of_a_replaced_trainer_is_not_published_and_replaces_none(
    run: Run, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The successor publishes while the first trainer is in the middle of ``moment``."""
    for step in (1, 2):
        await run.publish(1, step)
    owner = storage if moment == "delete" else publishing
    whole = getattr(owner, moment, None)
    successors: list[PolicyVersion] = []

    async def succeed() -> None:
        attempt = await run.take_over()
        await run.store.policy_versions.withdraw_after(2, attempt=attempt)
        successors.extend([await run.publish(attempt, step) for step in (3, 4)])

    async def interrupted(*arguments: Any) -> None:
        assert whole is not None
        monkeypatch.setattr(owner, moment, whole)
        await succeed()
        await whole(*arguments)

    if moment == "written":
        run.written = succeed
    else:
        monkeypatch.setattr(owner, moment, interrupted)
    if moment == "delete":
        await run.publish(1, 3)
    else:
        with pytest.raises(LeaseLostError):
            await run.publish(1, 3)
    for version in successors:
        verify(version.location, version.files)
    newest = await run.store.policy_versions.published(2)
    assert [(version.id, version.location) for version in reversed(newest)] == [
        (version.id, version.location) for version in successors
    ]  # fmt: skip
    await run.publish(2, 5)
    assert run.folders() == sorted(
        Path(version.location).name for version in await run.store.policy_versions.published(2)
    )  # fmt: skip


async def test_a_number_that_a_killed_trainer_reserved_is_published_by_its_successor(run: Run) -> None:
    location = str(run.output / "weights" / "v000001")
    left = PolicyVersion(id=1, step=1, location=location, files=(), train_step=None, attempt=1)
    await run.store.policy_versions.reserve(left, attempt=1)
    latest = await run.store.policy_versions.latest()
    assert latest is not None
    assert latest.id == 0
    version = await run.publish(await run.take_over(), 1)
    assert (version.id, Path(version.location).name) == (1, "v000001-2")
    stored = await run.store.policy_versions.get(1)
    assert stored is not None
    assert (stored.status, stored.location) == (VersionStatus.PUBLISHED, version.location)
