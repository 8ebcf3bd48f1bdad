"""Check out a git bundle that others made, within bounds: a kilobyte of it may unpack to any size."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Final

from agentrl.untrusted_folder import DEEPEST

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
