"""Walk and delete folders that others fill: of any depth, with paths of any length, and with links and locks.

``shutil.rmtree`` and ``os.walk`` recurse or build paths: a folder some thousand levels deep ends them, and a
path longer than the system's limit hides files from them. Only the standard library may be imported here, as
the sandbox's launcher runs without others.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import stat
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Final

DEEPEST: Final = 128
"""Levels of folders that ``entries_of`` follows; each takes a descriptor."""


class TooDeepError(OSError):
    """A folder has more levels than ``DEEPEST``."""


def lies_in(path: Path, folder: Path) -> bool:
    """Return whether ``path`` lies in ``folder`` when its links are followed; a loop ends where it begins.

    Before Python 3.13 ``Path.resolve`` raises RuntimeError for a loop.
    """
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def entries_of(
    folder: str | Path, *, unlock: bool = False, skip: Container[str] = ()
) -> Iterator[tuple[int, str, os.stat_result]]:
    """Yield all that is below a folder: the descriptor of its folder, its name and its status; no links.

    ``unlock`` makes folders readable that their owner, this user, has locked. Folders named in ``skip`` are
    not entered. What vanishes meanwhile is left out. Raises TooDeepError, and OSError for what cannot be
    read.
    """
    levels: list[tuple[int, list[str]]] = []
    try:
        top = _open(str(folder), None, unlock=unlock)
        levels.append((top, os.listdir(top)))
        while levels:
            here, names = levels[-1]
            if not names:
                os.close(levels.pop()[0])
                continue
            name = names.pop()
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                status = os.lstat(name, dir_fd=here)
                yield here, name, status
                if stat.S_ISDIR(status.st_mode) and name not in skip:
                    if len(levels) == DEEPEST:
                        raise TooDeepError(f"{folder} has more than {DEEPEST} levels of folders")
                    below = _open(name, here, unlock=unlock)
                    levels.append((below, os.listdir(below)))
    finally:
        for descriptor, _ in levels:
            os.close(descriptor)


def remove_folder(folder: str | Path) -> None:
    """Delete a folder with all that it holds; one that does not exist is not an error.

    Raises the first OSError after all else has been deleted. Folders below it are moved to its top before
    they are emptied, so that no path has more than two names.
    """
    problems: list[OSError] = []
    mark, numbers = secrets.token_hex(8), itertools.count()
    try:
        top = _open(str(folder), None, unlock=True)
    except FileNotFoundError:
        return
    try:
        waiting = ["."]
        while waiting:
            name = waiting.pop()
            with _noted(problems):
                here = _open(name, top, unlock=True)
                try:
                    for entry in os.listdir(here):
                        with _noted(problems):
                            if not stat.S_ISDIR(os.lstat(entry, dir_fd=here).st_mode):
                                os.unlink(entry, dir_fd=here)
                                continue
                            os.close(_open(entry, here, unlock=True))  # what is locked cannot be moved
                            moved = f"{mark}-{next(numbers)}"
                            os.rename(entry, moved, src_dir_fd=here, dst_dir_fd=top)
                            waiting.append(moved)
                finally:
                    os.close(here)
                if name != ".":
                    os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    with _noted(problems):
        os.rmdir(folder)
    if problems:
        raise problems[0]


def discard(folder: str | Path) -> None:
    """Delete as much of a folder as can be deleted, as ``remove_folder`` does."""
    with contextlib.suppress(OSError):
        remove_folder(folder)


@contextlib.contextmanager
def _noted(problems: list[OSError]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problems.append(error)


def _open(name: str, folder: int | None, *, unlock: bool) -> int:
    """Return a descriptor of a folder that is not a link; ``unlock`` lets its owner read and change it."""
    flags = os.O_DIRECTORY | os.O_NOFOLLOW
    if not unlock:
        return os.open(name, os.O_RDONLY | flags, dir_fd=folder)
    descriptor = os.open(name, flags | os.O_PATH, dir_fd=folder)
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            with contextlib.suppress(PermissionError):  # another user's: it is open to this one, or it fails
                os.chmod(f"/proc/self/fd/{descriptor}", mode | stat.S_IRWXU)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=descriptor)
    finally:
        os.close(descriptor)
