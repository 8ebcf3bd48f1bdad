"""Folders for a session's files, which the next start on this machine removes if their process was killed."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from agentrl.atomic_folder import owned_name, owner_of
from agentrl.processes import has_ended

logger = logging.getLogger(__name__)

_PREFIX = "agentrl-"


def scratch_folder(kind: str) -> Path:
    """Make an empty folder that only this user enters, below the temporary folder. Raises OSError.

    Its name says which process made it. The first folder that a process makes removes those of this user
    whose process on this machine has ended; those of other machines and containers stay. That may take a
    while: call it in a thread.
    """
    root = Path(tempfile.gettempdir())
    _remove_ownerless(root)
    folder = root / owned_name(f"{_PREFIX}{kind}")
    folder.mkdir(mode=0o700)
    return folder


@cache
def _remove_ownerless(root: Path) -> None:
    for folder in sorted(root.glob(f"{_PREFIX}*")):
        owner = owner_of(folder.name)
        if owner is None or not has_ended(owner) or folder.lstat().st_uid != os.getuid():
            continue
        shutil.rmtree(folder, ignore_errors=True)
        logger.info("removed %s, left by a process that was killed", folder)
