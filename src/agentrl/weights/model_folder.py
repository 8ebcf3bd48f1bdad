"""Write a model folder and its checksums, and verify them; report a full disk as a PublishError."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agentrl.atomic_folder import atomic_folder
from agentrl.documents.run import FileChecksum
from agentrl.errors import PublishError
from agentrl.weights.tensor_checksums import TensorChecksum

CHAT_TEMPLATE = "chat_template.jinja"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_HEADROOM_BYTES = 16 << 20
_READABLE = 0o644
"""Engines may run as another user, and safetensors writes files that only their owner can read."""
_TORCH_WRITER = ("inline_container.cc", "PytorchStreamWriter")
"""Parts of the RuntimeError that ``torch.save`` raises instead of the operating system's error."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_SIGNS = ("os error 28", "os error 27", "os error 122", "no space")
"""Parts of safetensors' error for a full disk."""
_FREE_SPACE = "free space, lower --published_versions_kept or --save_total_limit, or move --output_dir"
_FICLONE = 0x40049409
"""ioctl of Linux: share the blocks of two files until one of them is written (btrfs, XFS)."""
MANIFEST = "manifest.json"
_PARALLEL_FILES = 4


def complete_folder(base: Path, folder: Path, chat_template: str | None = None) -> None:
    """Copy the other Hugging Face files of ``base`` to the weights in ``folder``, and let everybody read all.

    ``chat_template`` replaces the template of ``base``, if given.
    """
    for path in base.iterdir():
        if _accompanies_weights(path) and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    if chat_template is not None:
        (folder / CHAT_TEMPLATE).write_text(chat_template, encoding="utf-8")
    for path in folder.iterdir():
        path.chmod(_READABLE)


@contextlib.contextmanager
def atomic_model_folder(target: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes ``target`` at the end of the block.

    Raises PublishError if the disk has fewer than ``needed_bytes`` free or a write fails; ``target`` then
    stays as it was.
    """
    with explain_write_errors(target, needed_bytes):
        require_space(target, needed_bytes)
        with atomic_folder(target) as temporary:
            yield temporary


def require_space(target: Path, needed_bytes: int) -> None:
    """Raise PublishError unless the disk of ``target`` has ``needed_bytes`` free, and 16 MiB more."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(target.parent).free < needed_bytes + _HEADROOM_BYTES:
        raise _disk_full(target, needed_bytes)


@contextlib.contextmanager
def explain_write_errors(target: Path, needed_bytes: int) -> Iterator[None]:
    """Convert write errors of the block, which writes ``target``, to PublishError."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise _disk_full(target, needed_bytes) from error
        raise PublishError(
            f"{target} could not be written: {error.strerror or error}", hint="check the folder's permissions"
        ) from error
    except Exception as error:
        text = str(error)
        if type(error).__name__ == "SafetensorError":
            if any(sign in text.lower() for sign in _FULL_SIGNS):
                raise _disk_full(target, needed_bytes) from error
            raise PublishError(
                f"{target} could not be written: {text}", hint="check the folder and its disk"
            ) from error
        if isinstance(error, RuntimeError) and any(sign in text for sign in _TORCH_WRITER):
            raise PublishError(
                f"{target} could not be written, most likely because the disk is full: {text}",
                hint=_FREE_SPACE,
            ) from error
        raise


def link_files(source: Path, folder: Path) -> None:
    """Give the files of ``source`` a second name in ``folder``; a copy where the file system has no links.

    A checkpoint and a published version of one step thus are written once and take their space once. Files
    that ``complete_folder`` writes itself are left out: one with two names must never be written in place.
    """
    for path in source.iterdir():
        if not path.is_file() or path.name in (MANIFEST, CHAT_TEMPLATE) or path.name.startswith("."):
            continue
        target = folder / path.name
        if _reflink(path, target):
            continue
        try:
            os.link(path, target)
        except OSError:
            shutil.copyfile(path, target)


def _accompanies_weights(path: Path) -> bool:
    name = path.name
    hidden = name.startswith(".") or name == MANIFEST
    return path.is_file() and not hidden and not name.endswith(WEIGHT_SUFFIXES)


def _reflink(source: Path, target: Path) -> bool:
    with source.open("rb") as reader, target.open("xb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
        except OSError:
            target.unlink()
            return False
    return True


def _disk_full(target: Path, needed_bytes: int) -> PublishError:
    free = shutil.disk_usage(target.parent).free
    return PublishError(
        f"the disk of {target.parent} is full: {target.name} needs {needed_bytes:,} bytes, {free:,} are free",
        hint=_FREE_SPACE,
    )


def checksums(folder: Path, known: Sequence[FileChecksum] = ()) -> tuple[FileChecksum, ...]:
    """Return SHA-256 and size of each regular file in ``folder``, ordered by name; hidden files are left out.

    Files of ``known`` are not read again. Several files are read at a time, in chunks: hashing releases the
    interpreter lock.
    """
    done = {file.name: file for file in known}
    try:
        paths = sorted(
            path
            for path in folder.iterdir()
            if path.is_file() and path.name != MANIFEST and not path.name.startswith(".")
        )
        with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            return tuple(pool.map(lambda path: done.get(path.name) or _checksum(path), paths))
    except OSError as error:
        raise PublishError(
            f"{error.filename or folder} cannot be read: {error.strerror}",
            hint="check that the folder exists and that this user may read it",
        ) from error


def write_manifest(
    folder: Path,
    *,
    version: int,
    files: Sequence[FileChecksum] | None = None,
    tensors: Mapping[str, TensorChecksum] | None = None,
) -> tuple[FileChecksum, ...]:
    """Write ``manifest.json`` and return the checksums of the files.

    It holds the version, each file's size and SHA-256, and the checksum of each tensor, if they are known.
    Pass ``files`` if the checksums are already known.
    """
    files = checksums(folder) if files is None else tuple(files)
    content: dict[str, Any] = {"version": version, "files": [file.to_document() for file in files]}
    if tensors:
        content["tensors"] = {name: found.to_json() for name, found in sorted(tensors.items())}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return files


def verify(folder: str | Path, files: Sequence[FileChecksum]) -> None:
    """Raise PublishError if a file of ``folder`` is missing or differs from its checksum."""
    folder = Path(folder)
    for expected in files:
        try:
            size = (folder / expected.name).stat().st_size
        except OSError as error:
            raise _mismatch(folder, expected.name, "the file", error.strerror or "no file") from error
        if size != expected.bytes:
            raise _mismatch(folder, expected.name, f"{expected.bytes} bytes", f"{size} bytes")
    with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
        for expected, actual in zip(
            files, pool.map(_checksum, (folder / file.name for file in files)), strict=True
        ):
            if actual.sha256 != expected.sha256:
                raise _mismatch(folder, expected.name, f"sha256 {expected.sha256}", f"sha256 {actual.sha256}")


def _checksum(path: Path) -> FileChecksum:
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileChecksum(name=path.name, bytes=file.tell(), sha256=digest.hexdigest())


def _mismatch(folder: Path, name: str, expected: str, actual: str) -> PublishError:
    return PublishError(
        f"{folder / name} differs from what was published: expected {expected}, found {actual}",
        hint="these weights are not loaded; the trainer's next version replaces them",
    )
