from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentrl.weights import folder as model_folder
from agentrl.weights.folder import checksums, complete_folder, link_files, verify

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
