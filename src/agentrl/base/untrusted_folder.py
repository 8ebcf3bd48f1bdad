"""Walk and delete folders that others fill, and check out the git bundles that others made, within bounds.

``shutil.rmtree`` and ``os.walk`` recurse or build paths: a folder some thousand levels deep ends them, and a
path longer than the system's limit hides files from them. Only the standard library may be imported here, as
the sandbox's launcher runs without others.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import stat
import subprocess
from collections.abc import Container, Iterator
from contextlib import suppress
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


HINT: Final = "make it by `git bundle create FILE HEAD BRANCH`"
_SECONDS: Final = 300.0
_MEMORY_KIB: Final = 4 << 20
_BOUNDED: Final = ("/bin/sh", "-c", f'ulimit -v {_MEMORY_KIB}; exec git "$@"', "sh")


class BundleError(Exception):
    """Why a bundle cannot be checked out."""


class BundleTooLargeError(BundleError):
    """The tree of a bundle is above its limits."""


def check_out(bundle: Path, target: Path, *, ref: str | None = None, max_bytes: int, max_files: int) -> None:
    """Check out a branch, tag or commit of ``bundle``, by default its HEAD, into the new folder ``target``.

    The sizes of all files are added up before any is written. What the commit does not reach is dropped from
    the repository: a later one may hold the solution. Raises BundleError without git or ``ref``, and
    BundleTooLargeError.
    """
    if shutil.which("git") is None:
        raise BundleError("there is no git: install it")
    _git("clone", "--quiet", "--no-checkout", str(bundle), str(target))
    _require_small(target, _commit(target, ref), max_bytes, max_files)
    _git("-C", str(target), "checkout", "--quiet", *([] if ref is None else [ref]))
    _git("-C", str(target), "remote", "remove", "origin")
    _forget_later_commits(target)


def _commit(clone: Path, ref: str | None) -> str:
    """Return the commit that will be checked out: of a branch first, as git does."""
    for name in ["HEAD"] if ref is None else [f"refs/remotes/origin/{ref}", ref]:
        with suppress(BundleError):
            return _git("-C", str(clone), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").strip()
    raise BundleError("it has no such branch, tag or commit")


def _require_small(clone: Path, commit: str, max_bytes: int, max_files: int) -> None:
    size = count = 0
    command = [*_BOUNDED, "-C", str(clone), "ls-tree", "-r", "--long", commit]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=_environment()) as listing:
        for entry in listing.stdout or ():
            described, _, path = entry.partition(b"\t")
            length = described.split()[-1]
            size, count = size + (int(length) if length.isdigit() else 0), count + 1
            if size > max_bytes or count > max_files or path.count(b"/") > DEEPEST:
                listing.kill()
                raise BundleTooLargeError(
                    f"it holds more than {max_bytes >> 20} MiB, {max_files:,} files or {DEEPEST} levels of"
                    " folders"
                )


def _forget_later_commits(clone: Path) -> None:
    """Drop branches, tags and objects that HEAD does not reach."""
    names = ("for-each-ref", "--format=%(refname)")
    every, reached = (set(_git("-C", str(clone), *names, *more).split()) for more in ((), ("--merged=HEAD",)))
    for name in sorted(every - reached):
        _git("-C", str(clone), "update-ref", "-d", name)
    _git("-C", str(clone), "reflog", "expire", "--expire=now", "--all")
    _git("-C", str(clone), "gc", "--quiet", "--prune=now")


def _git(*words: str) -> str:
    """Run a command of git and return what it prints."""
    try:
        done = subprocess.run(
            [*_BOUNDED, *words], check=True, capture_output=True, text=True, env=_environment(),
            timeout=_SECONDS,
        )  # fmt: skip
    except subprocess.SubprocessError as error:
        raise BundleError(str(getattr(error, "stderr", None) or error).strip()[-500:]) from error
    return done.stdout


def _environment() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", ""), "GIT_CONFIG_NOSYSTEM": "1", "HOME": "/nonexistent"}
