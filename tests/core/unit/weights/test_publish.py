"""Versions are published and followed, and the folders that nobody needs are deleted."""

from __future__ import annotations

import errno
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_store import FakeStore, engine
from safetensors.torch import load_file
from tiny_models import tiny_model
from tiny_policy import write_tiny_policy

from agentrl.base.atomic_folder import begin_folder
from agentrl.config.schema import ModelConfig
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import VersionStatus
from agentrl.errors import PublishError
from agentrl.model.load import Policy, load_policy
from agentrl.weights import publish as publishing
from agentrl.weights.folder import TensorChecksum, checksums, complete_folder, verify
from agentrl.weights.publish import (
    PublishTarget,
    free_name,
    kept_versions,
    newer_versions,
    place_version,
    publish,
    publish_base,
    surplus_folders,
    version_folders,
    version_name,
    with_bases,
)
from agentrl.weights.snapshot import PublishedModel, Written, model_parts, write_alone


@pytest.fixture
def store() -> Any:
    return FakeStore()


@pytest.fixture
def trained(tmp_path: Path) -> Policy:
    return load_policy(ModelConfig(model_name_or_path=str(write_tiny_policy(tmp_path / "base"))))


async def publish_step(
    store: Any, trained: Policy, root: Path, step: int, *, keeps_sampled: bool = False
) -> PolicyVersion:
    if 0 not in store.versions:
        await publish_base(store, trained.base)
    store.attempt = 1
    temporary = begin_folder(root / "step")
    write_alone(trained.published, temporary)
    complete_folder(trained.base, temporary)
    written = Written(checksums(temporary), {"step": TensorChecksum("U8", (), str(step))})
    target = PublishTarget(root=str(root), attempt=1, keep=2, keeps_sampled=keeps_sampled)
    return await publish(store, temporary, written, target, step=step, train_step_id=f"1/{step}")


async def test_the_base_model_is_version_0_in_place(store: Any, trained: Policy) -> None:
    first = await publish_base(store, trained.base)
    assert (first.id, first.location) == (0, str(trained.base))
    verify(first.location, first.files)
    assert await publish_base(store, trained.base) == first


async def test_a_published_folder_verifies_and_loads(tmp_path: Path, store: Any, trained: Policy) -> None:
    document = await publish_step(store, trained, tmp_path / "weights", 1)
    assert store.versions[1] == document
    assert Path(document.location) == tmp_path / "weights" / "v000001"
    verify(document.location, document.files)
    assert load_policy(ModelConfig(model_name_or_path=document.location)).tokenizer.chat_template


@pytest.mark.parametrize("user", ["a live engine", "an evaluation"])
async def test_weights_in_use_stay(user: str, tmp_path: Path, store: Any, trained: Policy) -> None:
    if user == "an evaluation":
        store.needed_versions = {1}
    else:
        store.engines = [engine(policy_version=1)]
    for version in (1, 2, 3, 4):
        await publish_step(store, trained, tmp_path / "weights", version)
    kept = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert kept == ["v000001", "v000003", "v000004"]


async def test_versions_of_unfinished_groups_stay_on_request(
    tmp_path: Path, store: Any, trained: Policy
) -> None:
    for step, oldest in enumerate((None, None, 1, 1, 2, None), 1):
        store.oldest_version = oldest
        await publish_step(store, trained, tmp_path / "weights", step, keeps_sampled=True)
        kept = sorted(int(path.name[1:]) for path in (tmp_path / "weights").iterdir())
        assert kept == list(range(min(oldest or step, max(step - 1, 1)), step + 1))


async def test_no_document_without_a_folder(
    tmp_path: Path, store: Any, trained: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(publishing, "finish_folder", fails)
    with pytest.raises(PublishError, match="could not be written"):
        await publish_step(store, trained, tmp_path / "weights", 1)
    assert store.versions[1].status is VersionStatus.RESERVED
    assert list((tmp_path / "weights").iterdir()) == []


async def test_followers_receive_only_the_newest_version(tmp_path: Path, store: Any, trained: Policy) -> None:
    await publish_base(store, trained.base)
    following = newer_versions(store, after=0, poll_seconds=1.0)
    for version in (1, 2):
        await publish_step(store, trained, tmp_path, version)
    assert (await anext(following)).id == 2
    await publish_step(store, trained, tmp_path, 3)
    assert (await anext(following)).id == 3


async def test_a_version_is_weights_config_tokenizer_and_manifest(tmp_path: Path, base: Path) -> None:
    target = tmp_path / "weights" / version_name(7)
    temporary, model = begin_folder(target), tiny_model("qwen3")
    written = write_alone(PublishedModel(model, partial(model_parts, model), None), temporary)
    complete_folder(base, temporary)
    written = Written(checksums(temporary, written.files), written.tensors)
    await place_version(temporary, str(target), 7, written)
    assert sorted(path.name for path in target.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "manifest.json", "model.safetensors",
        "tokenizer.json",
    ]  # fmt: skip
    assert "qwen3" in (target / "config.json").read_text()
    verify(target, written.files)
    listed = json.loads((target / "manifest.json").read_text())["tensors"]
    found = load_file(target / "model.safetensors")
    assert listed == {name: TensorChecksum.of(value).to_json() for name, value in found.items()}
    assert [path.name for path in target.parent.iterdir()] == ["v000007"]


def test_a_folder_that_another_trainer_may_write_is_never_taken() -> None:
    assert free_name((), 3, 2, is_contested=False) == "v000003"
    assert free_name((), 3, 2, is_contested=True) == "v000003-2"
    assert free_name(["v000003"], 3, 2, is_contested=False) == "v000003-2"


def policy(number: int, name: str | None = None, **fields: object) -> PolicyVersion:
    location = f"/elsewhere/{name or f'v{number:06d}'}"
    plain = PolicyVersion(id=number, step=number, location=location, files=(), train_step=None)
    return PolicyVersion.from_document(plain.to_document() | fields)


def test_pruning_keeps_the_newest_versions_and_those_in_use() -> None:
    folders = {f"v{number:06d}": number for number in range(1, 8)}
    kept = kept_versions(folders.values(), {2}, keep=3)
    assert kept == {2, 5, 6, 7}
    known = [policy(number) for number in range(1, 8)]
    assert surplus_folders(folders, known, kept, 7) == (["v000001", "v000003", "v000004"], [1, 3, 4])
    assert kept_versions((1, 2, 3), (), keep=1) == {2, 3}


def test_the_chain_of_a_kept_delta_stays() -> None:
    bases = {2: 1, 3: 2, 4: None, 5: 4, 6: 5, 7: 6}
    known = [policy(number, base=bases.get(number)) for number in range(1, 8)]
    assert with_bases({7}, known) == {4, 5, 6, 7}
    assert with_bases({3, 7}, known) == set(range(1, 8))
    assert with_bases({4, 9}, known) == {4, 9}


def test_folders_without_a_document_are_deleted_unless_they_are_being_published() -> None:
    names = ("v000001", "v000002", "v000002-3", "v000003", "v000004", "v000001-best", "notes")
    folders = version_folders(names)
    assert sorted(folders) == ["v000001", "v000002", "v000002-3", "v000003", "v000004"]
    known = [
        policy(1, pruned_at=policy(0).published_at), policy(2, "v000002-3"),
        policy(3, status=VersionStatus.RESERVED.value),
    ]  # fmt: skip
    deleted, pruned = surplus_folders(folders, known, kept={2, 3, 4}, newest=3)
    assert (sorted(deleted), pruned) == (["v000001", "v000002"], [])
