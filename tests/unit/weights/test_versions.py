from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_models import tiny_model

from agentrl.atomic_folder import begin_folder
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import VersionStatus
from agentrl.weights.model_folder import checksums, complete_folder, verify
from agentrl.weights.publish import (
    free_folder,
    kept_versions,
    place_version,
    surplus_folders,
    version_folder,
    version_folders,
)
from agentrl.weights.sharded_writer import Written, write_alone
from agentrl.weights.snapshot import PublishedModel, model_parts
from agentrl.weights.tensor_checksums import TensorChecksum


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    names = (
        "config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", "old.gguf", ".x",
    )  # fmt: skip
    for name in names:
        (folder / name).write_text(f"base {name}")
    return folder


def test_a_version_is_weights_config_tokenizer_and_manifest(tmp_path: Path, base: Path) -> None:
    target = version_folder(tmp_path / "weights", 7)
    temporary, model = begin_folder(target), tiny_model("qwen3")
    written = write_alone(PublishedModel(model, partial(model_parts, model), None), temporary)
    complete_folder(base, temporary)
    written = Written(checksums(temporary, written.files), written.tensors)
    assert place_version(temporary, target, 7, written) == str(tmp_path / "weights" / "v000007")
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


def test_a_chat_template_of_the_run_replaces_the_models(tmp_path: Path, base: Path) -> None:
    (tmp_path / "version").mkdir()
    complete_folder(base, tmp_path / "version", "ours")
    assert (tmp_path / "version" / "chat_template.jinja").read_text() == "ours"


def test_a_folder_that_another_trainer_may_write_is_never_taken(tmp_path: Path) -> None:
    assert free_folder(tmp_path, 3, 2, is_contested=False) == tmp_path / "v000003"
    assert free_folder(tmp_path, 3, 2, is_contested=True) == tmp_path / "v000003-2"
    (tmp_path / "v000003").mkdir()
    assert free_folder(tmp_path, 3, 2, is_contested=False) == tmp_path / "v000003-2"


def policy(number: int, name: str | None = None, **fields: object) -> PolicyVersion:
    location = f"/elsewhere/{name or f'v{number:06d}'}"
    document = PolicyVersion(
        id=number, step=number, location=location, files=(), train_step=None
    ).to_document()
    return PolicyVersion.from_document(document | fields)


def test_pruning_keeps_the_newest_versions_and_those_in_use() -> None:
    folders = {f"v{number:06d}": number for number in range(1, 8)}
    kept = kept_versions(folders.values(), {2}, keep=3)
    assert kept == {2, 5, 6, 7}
    known = [policy(number) for number in range(1, 8)]
    assert surplus_folders(folders, known, kept, 7) == (["v000001", "v000003", "v000004"], [1, 3, 4])


def test_pruning_always_keeps_two_versions() -> None:
    assert kept_versions((1, 2, 3), (), keep=1) == {2, 3}


def test_folders_without_a_document_are_deleted_unless_they_are_being_published(tmp_path: Path) -> None:
    for name in ("v000001", "v000002", "v000002-3", "v000003", "v000004", "v000001-best", "notes"):
        (tmp_path / name).mkdir()
    folders = version_folders(tmp_path)
    assert sorted(folders) == ["v000001", "v000002", "v000002-3", "v000003", "v000004"]
    known = [
        policy(1, pruned_at=policy(0).published_at), policy(2, "v000002-3"),
        policy(3, status=VersionStatus.RESERVED.value),
    ]  # fmt: skip
    deleted, pruned = surplus_folders(folders, known, kept={2, 3, 4}, newest=3)
    assert (sorted(deleted), pruned) == (["v000001", "v000002"], [])
