"""Make folders in memory, and remove those that a killed test session has left."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

MEMORY = Path("/dev/shm")
_PREFIX = "agentrl-tests-"
_NEEDED_BYTES = 6 * 2**30
_SETTLED_SECONDS = 600.0


@contextmanager
def memory_folder(otherwise: Path) -> Iterator[Path]:
    """Yield a folder in memory, which is removed at the end; ``otherwise`` where memory is short."""
    if not MEMORY.is_dir() or min(_free(), psutil.virtual_memory().available) < _NEEDED_BYTES:
        yield otherwise
        return
    for left in MEMORY.glob(f"{_PREFIX}*"):
        _remove_if_unused(left)
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, dir=MEMORY) as name,
        (Path(name) / "used").open("w") as used,
    ):
        fcntl.flock(used, fcntl.LOCK_EX)
        yield Path(name)


def _free() -> int:
    return shutil.disk_usage(MEMORY).free


def _remove_if_unused(folder: Path) -> None:
    """Stop the server of a session that was killed, and remove its folder: nobody holds its lock."""
    from agentrl.local.mongod import EmbeddedMongo

    with suppress(OSError), (folder / "used").open() as used:
        if time.time() - folder.stat().st_mtime > _SETTLED_SECONDS:
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
            EmbeddedMongo(folder / "mongo").down()
            shutil.rmtree(folder)
