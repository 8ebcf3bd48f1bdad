from __future__ import annotations

import errno
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from agentrl.errors import PublishError
from agentrl.weights.folder import prune_versions, remove_leftovers, version_folder, write_version
from agentrl.weights.manifest import verify

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

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.weights.items())


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    names = "config.json tokenizer.json chat_template.jinja model.safetensors old.gguf .x"
    for name in names.split():
        (folder / name).write_text(f"base {name}")
    return folder


def test_a_version_is_weights_config_tokenizer_and_manifest(tmp_path: Path, base: Path) -> None:
    folder, files = write_version(Model(), base, tmp_path / "weights", 7)
    assert folder == tmp_path / "weights" / "v000007"
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja", "config.json", "manifest.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert (folder / "config.json").read_text() == '{"trained": true}'
    verify(folder, files)
    assert [path.name for path in folder.parent.iterdir()] == ["v000007"]


def test_a_chat_template_of_the_run_replaces_the_models(tmp_path: Path, base: Path) -> None:
    folder, _ = write_version(Model(), base, tmp_path / "weights", 1, chat_template="ours")
    assert (folder / "chat_template.jinja").read_text() == "ours"


def test_a_folder_left_without_its_document_is_replaced(tmp_path: Path, base: Path) -> None:
    leftover = version_folder(tmp_path / "weights", 3)
    leftover.mkdir(parents=True)
    (leftover / "stray").write_text("x")
    folder, _ = write_version(Model(), base, tmp_path / "weights", 3)
    assert not (folder / "stray").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["v000003"]


def test_a_full_disk_is_seen_before_writing(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100, 90, 10))
    with pytest.raises(PublishError, match=r"weights is full: v000001 needs 64 bytes, 10 are free"):
        write_version(Model(), base, tmp_path / "weights", 1)
    assert list((tmp_path / "weights").iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_fills_up_while_writing_leaves_nothing(tmp_path: Path, base: Path, code: int) -> None:
    with pytest.raises(PublishError, match="is full"):
        write_version(Model(OSError(code, "full")), base, tmp_path / "weights", 1)
    assert list((tmp_path / "weights").iterdir()) == []


def test_safetensors_own_error_is_told_as_a_full_disk(tmp_path: Path, base: Path) -> None:
    class SafetensorError(Exception):
        pass

    failing = Model(SafetensorError("I/O error: No space left on device (os error 28)"))
    with pytest.raises(PublishError, match="is full"):
        write_version(failing, base, tmp_path / "weights", 1)


def test_another_write_error_is_named(tmp_path: Path, base: Path) -> None:
    with pytest.raises(PublishError, match="could not be written: Permission denied"):
        write_version(Model(OSError(errno.EACCES, "Permission denied")), base, tmp_path / "weights", 1)


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-v000002-123" / "inner").mkdir(parents=True)
    (tmp_path / "v000001").mkdir()
    assert remove_leftovers(tmp_path) == [".tmp-v000002-123"]
    assert [path.name for path in tmp_path.iterdir()] == ["v000001"]
    assert remove_leftovers(tmp_path / "nowhere") == []


def test_pruning_spares_the_newest_and_those_in_use(tmp_path: Path) -> None:
    for version in range(1, 8):
        version_folder(tmp_path, version).mkdir()
    assert prune_versions(tmp_path, keep=3, in_use={2}) == [1, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000002", "v000005", "v000006", "v000007"]


def test_pruning_always_spares_two(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        version_folder(tmp_path, version).mkdir()
    assert prune_versions(tmp_path, keep=1, in_use=()) == [1]
