"""Make folders and files that appear complete or not at all, and scratch folders that end with a process."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from agentrl.base.processes import has_ended, identify, owned_name, owner_of
from agentrl.base.untrusted_folder import discard, remove_folder

logger = logging.getLogger(__name__)

TEMPORARY = ".tmp-"
"""Prefix of the names of temporary folders."""
SCRATCH = "agentrl-"
"""Prefix of the names of scratch folders."""
ABANDONED_SECONDS = 3600.0
"""Age of the last change after which a temporary folder is removed when its writer cannot be observed."""


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield an empty temporary folder; at the end of the block flush it to disk and rename it to ``target``.

    If the block raises, the temporary folder is deleted and ``target`` stays as it was. Raises OSError.
    """
    temporary = begin_folder(target)
    try:
        yield temporary
        finish_folder(temporary, target)
    finally:
        discard_folder(temporary)


def begin_folder(target: Path) -> Path:
    """Create an empty temporary folder beside ``target``; its name identifies the process that writes it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / _temporary_name(target.name)
    temporary.mkdir()
    return temporary


def finish_folder(temporary: Path, target: Path) -> None:
    """Flush ``temporary`` to disk and rename it to ``target``; delete an earlier ``target``."""
    for path in (*temporary.rglob("*"), temporary):
        _flush(path)
    _replace(temporary, target)


def discard_folder(temporary: Path) -> None:
    """Delete a temporary folder, if it exists."""
    discard(temporary)


def delete_folder(folder: Path) -> None:
    """Delete a folder that others read: they find it whole or not at all. Raises OSError.

    A deletion that is killed leaves a temporary folder, which ``remove_leftovers`` removes.
    """
    discarded = folder.parent / _temporary_name(f"old-{folder.name}")
    folder.rename(discarded)
    remove_folder(discarded)


def replace_file(path: Path, content: bytes) -> None:
    """Write ``path``, so that a reader finds the old content or all of the new one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def remove_leftovers(root: Path) -> list[str]:
    """Remove the temporary folders that killed processes left in ``root``; return their names.

    Call it before this process writes there. The folder of a running process stays. If the process cannot be
    observed from here, the folder is removed once nothing in it has changed for ``ABANDONED_SECONDS``.
    """
    if not root.is_dir():
        return []
    temporary = sorted(path for path in root.iterdir() if path.name.startswith(TEMPORARY))
    leftovers = [path for path in temporary if _is_abandoned(path)]
    for path in leftovers:
        discard(path)
        logger.info("removed %s, left by a process that was killed", path)
    return [path.name for path in leftovers]


def scratch_folder(kind: str) -> Path:
    """Make an empty folder that only this user enters, below the temporary folder. Raises OSError.

    The first scratch folder of a process removes those of this user whose process on this machine has ended;
    those of other machines and containers stay. That may take a while: call it in a thread.
    """
    root = Path(tempfile.gettempdir())
    _remove_scratch_of_ended(root)
    folder = root / owned_name(f"{SCRATCH}{kind}")
    folder.mkdir(mode=0o700)
    return folder


@cache
def _remove_scratch_of_ended(root: Path) -> None:
    for folder in sorted(root.glob(f"{SCRATCH}*")):
        owner = owner_of(folder.name)
        if owner is None or not has_ended(owner):
            continue
        with contextlib.suppress(FileNotFoundError):  # another process, or a thread of this one, removed it
            if folder.lstat().st_uid == os.getuid():
                discard(folder)
                logger.info("removed %s, left by a process that was killed", folder)


def _is_abandoned(folder: Path) -> bool:
    owner = owner_of(folder.name)
    if owner is not None:
        # Take this process's own for abandoned: it has not begun to write there again.
        return owner == identify(os.getpid()) or has_ended(owner)
    try:
        changed = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
        with tempfile.TemporaryFile(dir=folder.parent) as fresh:  # a file server has a clock of its own
            return os.fstat(fresh.fileno()).st_mtime - changed > ABANDONED_SECONDS
    except OSError:
        return False


def _temporary_name(name: str) -> str:
    return f"{TEMPORARY}{owned_name(name)}"


def _replace(temporary: Path, target: Path) -> None:
    if target.exists():
        discarded = target.parent / _temporary_name(f"old-{target.name}")
        # Move it away: renaming replaces no folder that holds files.
        target.rename(discarded)
        temporary.rename(target)
        discard_folder(discarded)
    else:
        temporary.rename(target)
    # Flush the parent: the new name is an entry of it.
    _flush(target.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
