from __future__ import annotations

import errno
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from agentrl.errors import PublishError
from agentrl.weights.model_folder import atomic_model_folder, complete_folder

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


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    names = "config.json tokenizer.json chat_template.jinja model.safetensors old.gguf .x"
    for name in names.split():
        (folder / name).write_text(f"base {name}")
    return folder


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


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_fills_up_while_writing_leaves_nothing(tmp_path: Path, base: Path, code: int) -> None:
    with pytest.raises(PublishError, match="is full"):
        write(Model(OSError(code, "full")), base, tmp_path / "weights" / "v000001")
    assert list((tmp_path / "weights").iterdir()) == []


def test_the_error_of_torch_save_becomes_a_publish_error(tmp_path: Path, base: Path) -> None:
    """torch.save replaces the system's error by its own if there is space again when it closes the file."""
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    with pytest.raises(PublishError, match="because the disk is full"):
        write(Model(error), base, tmp_path / "weights" / "v000001")
    assert list((tmp_path / "weights").iterdir()) == []


def test_the_error_of_safetensors_is_reported_as_a_full_disk(tmp_path: Path, base: Path) -> None:
    class SafetensorError(Exception):
        pass

    failing = Model(SafetensorError("I/O error: No space left on device (os error 28)"))
    with pytest.raises(PublishError, match="is full"):
        write(failing, base, tmp_path / "weights" / "v000001")


def test_another_write_error_is_named(tmp_path: Path, base: Path) -> None:
    with pytest.raises(PublishError, match="could not be written: Permission denied"):
        write(Model(OSError(errno.EACCES, "Permission denied")), base, tmp_path / "m")
