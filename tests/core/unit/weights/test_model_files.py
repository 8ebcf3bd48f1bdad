"""Which files of a model a run is bound to, and that each is hashed once for every state of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from agentrl.documents.run import FileChecksum
from agentrl.weights import folder as model_folder
from agentrl.weights.folder import checksums, known_checksums, read_files


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_folder, "_SMALL_BYTES", 0)
    folder = tmp_path / "base"
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


def test_the_files_that_loading_reads_are_hashed(base: Path) -> None:
    assert sorted(read_files(base)) == [
        "chat_template.jinja", "config.json", "generation_config.json", "merges.txt", "model.safetensors",
        "modeling_x.py", "tokenizer.json",
    ]  # fmt: skip
    assert known_checksums(base) == checksums(base)


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
def test_only_what_changed_is_read_again(base: Path, hashed: list[str], change: object) -> None:
    known_checksums(base)
    hashed.clear()
    assert known_checksums(base.parent / "base" / ".." / "base") == known_checksums(base)
    assert not hashed
    assert callable(change)
    change(base / "model.safetensors")
    found = known_checksums(base)
    assert hashed == ([] if change is Path.unlink else ["model.safetensors"])
    assert found == checksums(base)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"files": []}', '{"files": {"config.json": {}}}'])
def test_a_damaged_cache_is_made_again(base: Path, hashed: list[str], content: str) -> None:
    known_checksums(base)
    [cache] = Path(".agentrl/checksums").iterdir()
    cache.write_text(content)
    assert known_checksums(base) == checksums(base)
    hashed.clear()
    known_checksums(base)
    assert not hashed
