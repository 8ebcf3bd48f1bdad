from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from safetensors.torch import load_file
from tiny_models import tiny_model

from agentrl.base.atomic_folder import begin_folder
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import VersionStatus
from agentrl.weights.folder import TensorChecksum, checksums, complete_folder, verify
from agentrl.weights.publish import (
    free_name,
    kept_versions,
    place_version,
    surplus_folders,
    version_folders,
    version_name,
    with_bases,
)
from agentrl.weights.snapshot import PublishedModel, Written, model_parts, write_alone


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


def test_a_chat_template_of_the_run_replaces_the_models(tmp_path: Path, base: Path) -> None:
    (tmp_path / "version").mkdir()
    complete_folder(base, tmp_path / "version", "ours")
    assert (tmp_path / "version" / "chat_template.jinja").read_text() == "ours"


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
