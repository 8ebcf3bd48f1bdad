from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from fake_store import FakeStore, engine
from tiny_policy import write_tiny_policy

from agentrl.base.atomic_folder import begin_folder
from agentrl.config.schema import ModelConfig
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import VersionStatus
from agentrl.errors import PublishError
from agentrl.model.load import Policy, load_policy
from agentrl.weights import publish as publishing
from agentrl.weights.folder import TensorChecksum, checksums, complete_folder, verify
from agentrl.weights.publish import PublishTarget, newer_versions, publish, publish_base
from agentrl.weights.snapshot import Written, write_alone


@pytest.fixture
def store() -> Any:
    return FakeStore()


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return load_policy(ModelConfig(model_name_or_path=str(write_tiny_policy(tmp_path / "base"))))


async def publish_step(store: Any, policy: Policy, root: Path, step: int) -> PolicyVersion:
    if 0 not in store.versions:
        await publish_base(store, policy.base)
    store.attempt = 1
    temporary = begin_folder(root / "step")
    write_alone(policy.published, temporary)
    complete_folder(policy.base, temporary)
    written = Written(checksums(temporary), {"step": TensorChecksum("U8", (), str(step))})
    target = PublishTarget(root=str(root), attempt=1, keep=2)
    return await publish(store, temporary, written, target, step=step, train_step_id=f"1/{step}")


async def test_the_base_model_is_version_0_in_place(store: Any, policy: Policy) -> None:
    first = await publish_base(store, policy.base)
    assert (first.id, first.location) == (0, str(policy.base))
    verify(first.location, first.files)
    assert await publish_base(store, policy.base) == first


async def test_a_published_folder_verifies_and_loads(tmp_path: Path, store: Any, policy: Policy) -> None:
    document = await publish_step(store, policy, tmp_path / "weights", 1)
    assert store.versions[1] == document
    assert Path(document.location) == tmp_path / "weights" / "v000001"
    verify(document.location, document.files)
    assert load_policy(ModelConfig(model_name_or_path=document.location)).tokenizer.chat_template


@pytest.mark.parametrize("user", ["a live engine", "an evaluation"])
async def test_weights_in_use_stay(user: str, tmp_path: Path, store: Any, policy: Policy) -> None:
    if user == "an evaluation":
        store.needed_versions = {1}
    else:
        store.engines = [engine(policy_version=1)]
    for version in (1, 2, 3, 4):
        await publish_step(store, policy, tmp_path / "weights", version)
    kept = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert kept == ["v000001", "v000003", "v000004"]


async def test_no_document_without_a_folder(
    tmp_path: Path, store: Any, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(publishing, "finish_folder", fails)
    with pytest.raises(PublishError, match="could not be written"):
        await publish_step(store, policy, tmp_path / "weights", 1)
    assert store.versions[1].status is VersionStatus.RESERVED
    assert list((tmp_path / "weights").iterdir()) == []


async def test_followers_receive_only_the_newest_version(tmp_path: Path, store: Any, policy: Policy) -> None:
    await publish_base(store, policy.base)
    following = newer_versions(store, after=0, poll_seconds=1.0)
    for version in (1, 2):
        await publish_step(store, policy, tmp_path, version)
    assert (await anext(following)).id == 2
    await publish_step(store, policy, tmp_path, 3)
    assert (await anext(following)).id == 3
