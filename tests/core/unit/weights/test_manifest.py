from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from agentrl.errors import PublishError
from agentrl.weights.folder import checksums, verify, write_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"w" * 3_000_000)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "folder").mkdir()
    return tmp_path


def test_every_regular_file_is_listed_with_size_and_sha256(folder: Path) -> None:
    files = checksums(folder)
    assert [(file.name, file.bytes) for file in files] == [
        ("config.json", 2),
        ("model.safetensors", 3_000_000),
    ]
    assert files[1].sha256 == hashlib.sha256(b"w" * 3_000_000).hexdigest()


def test_the_manifest_names_version_and_files_and_not_itself(folder: Path) -> None:
    files = write_manifest(folder, version=7)
    content = json.loads((folder / "manifest.json").read_text())
    assert content["version"] == 7
    assert [file["name"] for file in content["files"]] == ["config.json", "model.safetensors"]
    assert checksums(folder) == files


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.unlink(), "expected the file, found No such file"),
        (lambda path: path.write_bytes(b"w"), "expected 3000000 bytes, found 1 bytes"),
        (lambda path: path.write_bytes(b"v" * 3_000_000), "expected sha256 [0-9a-f]{64}, found sha256"),
    ],
)
def test_damage_is_named(folder: Path, damage: object, says: str) -> None:
    files = write_manifest(folder, version=1)
    verify(folder, files)
    damage(folder / "model.safetensors")  # type: ignore[operator]
    with pytest.raises(PublishError, match=rf"model\.safetensors differs from what was published: {says}"):
        verify(folder, files)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PublishError, match="nowhere cannot be read"):
        checksums(tmp_path / "nowhere")
