"""Equal files of a checkpoint and a published version take their space on disk once."""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import logging
import os
from pathlib import Path

from agentrl.weights.manifest import MANIFEST

logger = logging.getLogger(__name__)

_FICLONE = 0x40049409
"""ioctl of Linux: share the blocks of two files until one of them is written (btrfs, XFS)."""


def share_files(folder: Path, source: Path) -> int:
    """Replace files of ``folder`` that equal those of ``source`` by reflinks or hard links.

    Returns the bytes saved. Where the file system has neither, the files stay as they are. Both folders must
    be complete: a file with two names must never be written in place.
    """
    if not source.is_dir():
        return 0
    shared = 0
    for path in sorted(folder.iterdir()):
        other = source / path.name
        if path.name != MANIFEST and _are_equal(path, other) and _share(path, other):
            shared += path.stat().st_size
    return shared


def _are_equal(path: Path, other: Path) -> bool:
    if not (path.is_file() and other.is_file()) or path.samefile(other):
        return False
    return path.stat().st_size == other.stat().st_size and filecmp.cmp(path, other, shallow=False)


def _share(path: Path, other: Path) -> bool:
    """Replace ``path`` by ``other``'s bytes; False where the file system cannot."""
    link = path.with_name(f".link-{path.name}")
    try:
        if not _reflink(other, link):
            os.link(other, link)
        link.chmod(path.stat().st_mode & 0o777)
        link.replace(path)
    except OSError as error:
        logger.debug("%s stays a copy of %s: %s", path, other, error.strerror)
        with contextlib.suppress(OSError):
            link.unlink()
        return False
    return True


def _reflink(source: Path, target: Path) -> bool:
    with source.open("rb") as reader, target.open("xb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
        except OSError:
            target.unlink()
            return False
    return True
