"""Folders on disk: written whole or not at all, and cleaned of what a killed writer left."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from agentrl.documents.run import ProcessIdentity
from agentrl.errors import PublishError
from agentrl.processes import has_ended, identify
from agentrl.weights.manifest import MANIFEST

logger = logging.getLogger(__name__)

TEMPORARY = ".tmp-"
ABANDONED_SECONDS = 3600.0
"""A temporary folder whose writer cannot be observed is removed when nothing changed in it for this long."""
_WRITER = re.compile(r"-(\d+)\.(\d+)\.([0-9a-f]{8})\.[0-9a-f]{8}$")
"""Pid, start time, machine and a random part, at the end of a temporary name."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_HEADROOM_BYTES = 16 << 20
_READABLE = 0o644
"""Engines may run as another user; safetensors writes for its owner alone."""
_TORCH_WRITER = ("inline_container.cc", "PytorchStreamWriter")
"""What a RuntimeError of ``torch.save`` names where the operating system refused a write, which it hides."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SavableModel(Protocol):
    """The part of transformers' PreTrainedModel that writing needs."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Write config and safetensors into the folder."""

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Names and tensors; tied tensors once."""


def weight_bytes(model: SavableModel) -> int:
    """Bytes of the model's parameters, tied ones once."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in model.named_parameters())


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


@contextlib.contextmanager
def atomic_folder(target: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield an empty folder beside ``target`` that takes its place, flushed to disk, at the end of the block.

    Raises PublishError, and removes the temporary folder, when the disk has fewer than ``needed_bytes``
    free or a write fails.
    """
    with explaining_errors(target, needed_bytes):
        temporary = begin_folder(target, needed_bytes)
        try:
            yield temporary
            finish_folder(temporary, target)
        finally:
            discard_folder(temporary)


@contextlib.contextmanager
def explaining_errors(target: Path, needed_bytes: int) -> Iterator[None]:
    """Raise PublishError for what the disk refuses within the block, which writes ``target``."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise _disk_full(target, needed_bytes) from error
        raise PublishError(
            f"{target} could not be written: {error.strerror or error}", hint="check the folder's permissions"
        ) from error
    except Exception as error:
        if type(error).__name__ == "SafetensorError":
            raise _safetensors_failed(target, needed_bytes, error) from error
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _TORCH_WRITER):
            raise _torch_failed(target, error) from error
        raise


def begin_folder(target: Path, needed_bytes: int) -> Path:
    """Make an empty temporary folder beside ``target``; its name says which process writes it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < needed_bytes + _HEADROOM_BYTES:
        raise _disk_full(target, needed_bytes)
    temporary = target.parent / _temporary_name(target.name)
    temporary.mkdir()
    return temporary


def finish_folder(temporary: Path, target: Path) -> None:
    """Flush ``temporary`` to disk and rename it to ``target``; an earlier ``target`` is deleted."""
    for path in (*temporary.rglob("*"), temporary):
        _flush(path)
    _replace(temporary, target)


def discard_folder(temporary: Path) -> None:
    """Delete a temporary folder, if it is there."""
    shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(root: Path) -> list[str]:
    """Remove the temporary folders of killed writers in ``root``; returns their names.

    Call it before this process writes. A folder stays while its writer lives, or may live where it cannot be
    observed from here; then the folder is removed after ``ABANDONED_SECONDS`` without a change.
    """
    if not root.is_dir():
        return []
    temporary = sorted(path for path in root.iterdir() if path.name.startswith(TEMPORARY))
    leftovers = [path for path in temporary if _is_abandoned(path)]
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
        logger.info("removed %s, left by a process that was killed", path)
    return [path.name for path in leftovers]


def _is_abandoned(folder: Path) -> bool:
    here, writer = identify(os.getpid()), _WRITER.search(folder.name)
    if here is not None and writer is not None and writer[3] == _machine(here):
        pid, started = int(writer[1]), int(writer[2])
        is_own = (pid, started) == (here.pid, here.started)
        return is_own or has_ended(ProcessIdentity(
            boot_id=here.boot_id, pid_namespace=here.pid_namespace, pid=pid, started=started
        ))  # fmt: skip
    try:
        changed = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    except FileNotFoundError:
        return False
    return time.time() - changed > ABANDONED_SECONDS


def _temporary_name(name: str) -> str:
    process = identify(os.getpid())
    token = secrets.token_hex(4)
    if process is None:
        return f"{TEMPORARY}{name}-{os.getpid()}.{token}"
    return f"{TEMPORARY}{name}-{process.pid}.{process.started}.{_machine(process)}.{token}"


def _machine(process: ProcessIdentity) -> str:
    """A short name of the kernel and the pid namespace of a process."""
    text = f"{process.boot_id} {process.pid_namespace}"
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _accompanies_weights(path: Path) -> bool:
    name = path.name
    hidden = name.startswith(".") or name == MANIFEST
    return path.is_file() and not hidden and not name.endswith(_WEIGHT_SUFFIXES)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(temporary: Path, target: Path) -> None:
    if target.exists():
        discarded = target.parent / _temporary_name(f"old-{target.name}")
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
        hint="free space, lower --published_versions_kept or --save_total_limit, or move --output_dir",
    )


def _torch_failed(target: Path, error: RuntimeError) -> PublishError:
    return PublishError(
        f"{target} could not be written, most likely for want of space: {error}",
        hint="free space, lower --published_versions_kept or --save_total_limit, or move --output_dir",
    )


def _safetensors_failed(target: Path, needed_bytes: int, error: Exception) -> PublishError:
    text = str(error).lower()
    if any(sign in text for sign in ("os error 28", "os error 27", "os error 122", "no space")):
        return _disk_full(target, needed_bytes)
    return PublishError(f"{target} could not be written: {error}", hint="check the folder and its disk")
