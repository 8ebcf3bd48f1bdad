"""Model folders on disk: written whole or not at all, pruned, and cleaned of what a killed writer left."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

from agentrl.documents.policy import FileChecksum
from agentrl.errors import PublishError
from agentrl.weights.manifest import MANIFEST, write_manifest

logger = logging.getLogger(__name__)

TEMPORARY = ".tmp-"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_HEADROOM_BYTES = 16 << 20
_READABLE = 0o644
"""Engines may run as another user; safetensors writes for its owner alone."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SavableModel(Protocol):
    """The part of transformers' PreTrainedModel that writing needs."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Write config and safetensors into the folder."""

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Names and tensors; tied tensors once."""


def version_folder(root: Path, version: int) -> Path:
    """Where a version lies: ``root/v000007``."""
    return root / f"v{version:06d}"


def weight_bytes(model: SavableModel) -> int:
    """Bytes of the model's parameters, tied ones once."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in model.named_parameters())


def write_version(
    model: SavableModel, base: Path, root: Path, version: int, chat_template: str | None = None
) -> tuple[Path, tuple[FileChecksum, ...]]:
    """Write the weights as ``root/v00000N``: safetensors, config, tokenizer, manifest; replaces a leftover.

    The folder appears under its name only when every file of it is on disk. Raises PublishError, with
    nothing left behind, when it cannot be written.
    """
    target = version_folder(root, version)
    with atomic_folder(target, weight_bytes(model)) as temporary:
        save_model_files(model, base, temporary, chat_template)
        files = write_manifest(temporary, version=version)
    return target.resolve(), files


def save_model_files(model: SavableModel, base: Path, folder: Path, chat_template: str | None = None) -> None:
    """Save weights and config into ``folder``, and copy the rest of the Hugging Face folder from ``base``.

    ``chat_template``, where given, takes the place of the base's.
    """
    model.save_pretrained(str(folder))
    for path in base.iterdir():
        if _accompanies_weights(path) and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    for path in folder.iterdir():
        path.chmod(_READABLE)


def rename_version(root: Path, version: int, to: int) -> Path:
    """Make the folder of ``version`` that of version ``to``, whose own is replaced; returns where it lies."""
    folder, target = version_folder(root, version), version_folder(root, to)
    write_manifest(folder, version=to)
    _flush_folder(folder)
    _replace(folder, target)
    return target.resolve()


def remove_version(root: Path, version: int) -> None:
    """Delete the folder of a version."""
    shutil.rmtree(version_folder(root, version), ignore_errors=True)


@contextlib.contextmanager
def atomic_folder(target: Path, needed_bytes: int) -> Iterator[Path]:
    """A temporary folder beside ``target`` that is flushed to disk and renamed to it when the block ends.

    Raises PublishError, and removes the temporary folder, when the disk has fewer than ``needed_bytes``
    free or a write fails.
    """
    temporary = target.parent / f"{TEMPORARY}{target.name}-{os.getpid()}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        free = shutil.disk_usage(target.parent).free
        if free < needed_bytes + _HEADROOM_BYTES:
            raise _disk_full(target, needed_bytes)
        temporary.mkdir()
        yield temporary
        _flush_folder(temporary)
        _replace(temporary, target)
    except OSError as error:
        if error.errno in _FULL:
            raise _disk_full(target, needed_bytes) from error
        raise PublishError(
            f"{target} could not be written: {error.strerror or error}", cure="check the folder's permissions"
        ) from error
    except Exception as error:
        if type(error).__name__ == "SafetensorError":
            raise _safetensors_failed(target, needed_bytes, error) from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(root: Path) -> list[str]:
    """Remove the temporary folders of killed writers in ``root``; returns their names."""
    if not root.is_dir():
        return []
    leftovers = sorted(path for path in root.iterdir() if path.name.startswith(TEMPORARY))
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
        logger.info("removed %s, left by a process that was killed", path)
    return [path.name for path in leftovers]


def prune_versions(root: Path, *, keep: int, in_use: Collection[int]) -> list[int]:
    """Delete all but the newest ``keep`` (at least two) version folders and those ``in_use``."""
    if not root.is_dir():
        return []
    found = sorted(int(path.name[1:]) for path in root.glob("v[0-9]*") if path.name[1:].isdigit())
    newest = set(found[-max(keep, 2) :])
    doomed = [version for version in found if version not in newest and version not in in_use]
    for version in doomed:
        remove_version(root, version)
    return doomed


def _accompanies_weights(path: Path) -> bool:
    name = path.name
    hidden = name.startswith(".") or name == MANIFEST
    return path.is_file() and not hidden and not name.endswith(_WEIGHT_SUFFIXES)


def _flush_folder(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(temporary: Path, target: Path) -> None:
    if target.exists():
        discarded = target.parent / f"{TEMPORARY}old-{target.name}-{os.getpid()}"
        target.rename(discarded)
        temporary.rename(target)
        shutil.rmtree(discarded, ignore_errors=True)
    else:
        temporary.rename(target)
    _flush(target.parent)


def _disk_full(target: Path, needed_bytes: int) -> PublishError:
    free = shutil.disk_usage(target.parent).free
    return PublishError(
        f"the disk of {target.parent} is full: {target.name} needs {needed_bytes:,} bytes, {free:,} are free",
        cure="free space, lower --published_versions_kept or --save_total_limit, or move --output_dir",
    )


def _safetensors_failed(target: Path, needed_bytes: int, error: Exception) -> PublishError:
    text = str(error).lower()
    if any(sign in text for sign in ("os error 28", "os error 27", "os error 122", "no space")):
        return _disk_full(target, needed_bytes)
    return PublishError(f"{target} could not be written: {error}", cure="check the folder and its disk")
