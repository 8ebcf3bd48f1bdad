"""A model's folder: its manifest, files with two names, what is hashed, and how a write ends."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from agentrl.documents.run import FileChecksum
from agentrl.errors import PublishError
from agentrl.weights import folder as model_folder
from agentrl.weights.folder import (
    atomic_model_folder,
    checksums,
    complete_folder,
    known_checksums,
    link_files,
    read_files,
    verify,
    write_manifest,
)


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"w" * 3_000_000)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "listed").mkdir()
    return tmp_path


def test_every_regular_file_is_listed_with_size_and_sha256(listed: Path) -> None:
    files = checksums(listed)
    assert [(file.name, file.bytes) for file in files] == [
        ("config.json", 2),
        ("model.safetensors", 3_000_000),
    ]
    assert files[1].sha256 == hashlib.sha256(b"w" * 3_000_000).hexdigest()


def test_the_manifest_names_version_and_files_and_not_itself(listed: Path) -> None:
    files = write_manifest(listed, version=7)
    content = json.loads((listed / "manifest.json").read_text())
    assert content["version"] == 7
    assert [file["name"] for file in content["files"]] == ["config.json", "model.safetensors"]
    assert checksums(listed) == files


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.unlink(), "expected the file, found No such file"),
        (lambda path: path.write_bytes(b"w"), "expected 3000000 bytes, found 1 bytes"),
        (lambda path: path.write_bytes(b"v" * 3_000_000), "expected sha256 [0-9a-f]{64}, found sha256"),
    ],
)
def test_damage_is_named(listed: Path, damage: object, says: str) -> None:
    files = write_manifest(listed, version=1)
    verify(listed, files)
    damage(listed / "model.safetensors")  # type: ignore[operator]
    with pytest.raises(PublishError, match=rf"model\.safetensors differs from what was published: {says}"):
        verify(listed, files)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PublishError, match="nowhere cannot be read"):
        checksums(tmp_path / "nowhere")


WEIGHTS = bytes(range(256)) * 64


def link(base: Path, model: Path, version: Path, template: str | None = None) -> None:
    link_files(model, version)
    complete_folder(base, version, template)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """The base model, the model of a checkpoint, and an empty folder for a version of the same weights."""
    base, model, version = (tmp_path / name for name in ("base", "model", "version"))
    for folder in (base, model, version):
        folder.mkdir()
    for folder in (base, model):
        (folder / "config.json").write_text(folder.name)
        (folder / "chat_template.jinja").write_text(folder.name)
    (base / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(WEIGHTS)
    (model / "manifest.json").write_text("{}")
    return base, model, version


def test_what_is_written_already_is_stored_once(
    folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_folder, "_reflink", lambda *_: False)
    base, model, version = folders
    before = checksums(model)
    link(base, model, version, "ours")
    for name in ("model.safetensors", "config.json"):
        assert (version / name).samefile(model / name)
    assert (version / "chat_template.jinja").read_text() == "ours"
    assert sorted(path.name for path in version.iterdir()) == [
        "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    verify(model, before)


def test_deleting_one_folder_keeps_the_other_intact(folders: tuple[Path, Path, Path]) -> None:
    base, model, version = folders
    link(base, model, version)
    (model / "model.safetensors").unlink()
    assert (version / "model.safetensors").read_bytes() == WEIGHTS


def test_a_file_system_without_links_gets_copies(
    folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(model_folder, "_reflink", lambda *_: False)
    base, model, version = folders
    link(base, model, version)
    assert (version / "model.safetensors").read_bytes() == WEIGHTS
    assert not (version / "model.safetensors").samefile(model / "model.safetensors")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_folder, "_SMALL_BYTES", 0)
    folder = tmp_path / "model"
    folder.mkdir()
    for name in (
        "config.json", "generation_config.json", "tokenizer.json", "merges.txt", "chat_template.jinja",
        "modeling_x.py", "model.safetensors", "consolidated.safetensors", "README.md", "LICENSE.txt",
    ):  # fmt: skip
        (folder / name).write_bytes(name.encode())
    return folder


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read, in order of their names."""
    names: list[str] = []
    real = model_folder._checksum

    def count(path: Path) -> FileChecksum:
        names.append(path.name)
        return real(path)

    monkeypatch.setattr(model_folder, "_checksum", count)
    return names


def test_the_files_that_loading_reads_are_hashed(model: Path) -> None:
    assert sorted(read_files(model)) == [
        "chat_template.jinja", "config.json", "generation_config.json", "merges.txt", "model.safetensors",
        "modeling_x.py", "tokenizer.json",
    ]  # fmt: skip
    assert known_checksums(model) == checksums(model)


def _overwrite(file: Path) -> None:
    """Write other bytes of the same length in place, and give the file its old time of modification."""
    status = file.stat()
    file.write_bytes(file.read_bytes().upper())
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def _replace(file: Path) -> None:
    """Rename another file to it, as ``rsync -t`` does."""
    other = file.with_name("other")
    shutil.copy2(file, other)
    _overwrite(other)
    other.replace(file)


def _restore(file: Path) -> None:
    """Write the same bytes again."""
    file.write_bytes(file.read_bytes())


@pytest.mark.parametrize("change", [_overwrite, _replace, _restore, Path.unlink])
def test_only_what_changed_is_read_again(model: Path, hashed: list[str], change: object) -> None:
    known_checksums(model)
    hashed.clear()
    assert known_checksums(model.parent / "model" / ".." / "model") == known_checksums(model)
    assert not hashed
    assert callable(change)
    change(model / "model.safetensors")
    found = known_checksums(model)
    assert hashed == ([] if change is Path.unlink else ["model.safetensors"])
    assert found == checksums(model)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"files": []}', '{"files": {"config.json": {}}}'])
def test_a_damaged_cache_is_made_again(model: Path, hashed: list[str], content: str) -> None:
    known_checksums(model)
    [cache] = Path(".agentrl/checksums").iterdir()
    cache.write_text(content)
    assert known_checksums(model) == checksums(model)
    hashed.clear()
    known_checksums(model)
    assert not hashed


Usage = namedtuple("Usage", "total used free")


class Model:
    """Saves like transformers: a config and one safetensors file."""

    def __init__(self, fails_with: Exception | None = None) -> None:
        self.weights = {"w": torch.ones(4, 4)}
        self.fails_with = fails_with

    def save_pretrained(self, save_directory: str) -> Any:
        (Path(save_directory) / "config.json").write_text('{"trained": true}')
        if self.fails_with:
            raise self.fails_with
        save_file(self.weights, str(Path(save_directory) / "model.safetensors"))


def write(model: Model, base: Path, target: Path) -> None:
    """Write a model folder as sft does."""
    with atomic_model_folder(target, 64) as temporary:
        model.save_pretrained(str(temporary))
        complete_folder(base, temporary)


def test_an_earlier_folder_is_replaced(tmp_path: Path, base: Path) -> None:
    target = tmp_path / "models" / "m"
    target.mkdir(parents=True)
    (target / "stray").write_text("x")
    write(Model(), base, target)
    assert not (target / "stray").exists()
    assert [path.name for path in target.parent.iterdir()] == ["m"]


def test_a_full_disk_is_detected_before_writing(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100, 90, 10))
    with pytest.raises(PublishError, match=r"weights is full: v000001 needs 64 bytes, 10 are free"):
        write(Model(), base, tmp_path / "weights" / "v000001")
    assert list((tmp_path / "weights").iterdir()) == []


class SafetensorError(Exception):
    """Stands for that of safetensors, which is known by its name."""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "full"), "is full"),
        (OSError(errno.EDQUOT, "full"), "is full"),
        (OSError(errno.EFBIG, "full"), "is full"),
        # torch.save replaces the system's error by its own if there is space again when it closes the file.
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
         "because the disk is full"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "is full"),
        (OSError(errno.EACCES, "Permission denied"), "could not be written: Permission denied"),
    ],
    ids=["disk", "quota", "file", "torch", "safetensors", "permission"],
)  # fmt: skip
def test_an_error_while_writing_is_named_and_leaves_nothing(
    tmp_path: Path, base: Path, error: Exception, says: str
) -> None:
    with pytest.raises(PublishError, match=says):
        write(Model(error), base, tmp_path / "weights" / "v000001")
    assert list((tmp_path / "weights").iterdir()) == []
