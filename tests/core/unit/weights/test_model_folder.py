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
from agentrl.weights.folder import atomic_model_folder, complete_folder

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
