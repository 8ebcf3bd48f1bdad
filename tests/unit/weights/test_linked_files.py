from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentrl.weights import model_folder
from agentrl.weights.manifest import checksums, verify
from agentrl.weights.model_folder import link_equal_files

WEIGHTS = bytes(range(256)) * 64


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The model of a checkpoint, and a version with the same weights and another configuration."""
    for name in ("model", "version"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(WEIGHTS)
        (tmp_path / name / "config.json").write_text(name)
        (tmp_path / name / "manifest.json").write_text("{}")
    return tmp_path / "model", tmp_path / "version"


def test_equal_files_are_stored_once(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folder, "_reflink", lambda *_: False)
    model, version = folders
    before = checksums(version)
    assert link_equal_files(version, model) == len(WEIGHTS)
    assert (version / "model.safetensors").samefile(model / "model.safetensors")
    for name in ("config.json", "manifest.json"):
        assert not (version / name).samefile(model / name)
    verify(version, before)
    assert link_equal_files(version, model) == 0
    assert sorted(path.name for path in version.iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
    ]


def test_deleting_one_folder_keeps_the_other_intact(folders: tuple[Path, Path]) -> None:
    model, version = folders
    link_equal_files(version, model)
    (model / "model.safetensors").unlink()
    assert (version / "model.safetensors").read_bytes() == WEIGHTS


def test_a_file_system_without_links_keeps_copies(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(model_folder, "_reflink", lambda *_: False)
    model, version = folders
    assert link_equal_files(version, model) == 0
    assert (version / "model.safetensors").read_bytes() == WEIGHTS
    assert not list(version.glob(".link-*"))


def test_a_missing_source_links_nothing(folders: tuple[Path, Path], tmp_path: Path) -> None:
    assert link_equal_files(folders[1], tmp_path / "gone") == 0
