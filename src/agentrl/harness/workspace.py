"""Prepare the working directory of a harness as an archive, from a template folder or a git bundle."""

from __future__ import annotations

import atexit
import io
import os
import re
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from agentrl.atomic_folder import scratch_folder
from agentrl.errors import ConfigError
from agentrl.git_bundle import HINT, BundleError, BundleTooLargeError, check_out
from agentrl.harness.config import HarnessConfig, HarnessLimits
from agentrl.untrusted_folder import DEEPEST, discard

WORKSPACE: Final = "workspace"
HOME: Final = "home"
TEMPORARY: Final = "tmp"
_STEERING: Final = re.compile(
    r"(^|/)((conftest|sitecustomize|usercustomize)\.py|\.?pytest\.ini|tox\.ini|entry_points\.txt|[^/]+\.(pth|pyc)"
    r"|__pycache__|\.git/(hooks|config|config\.worktree|commondir))(/|$)|(^|/)\.git$"
)
"""Files of a working directory that run code of their own, or choose what is run, when tests are started.

A file or link ``.git`` is one: it leads to a repository elsewhere. A folder ``.git`` is work.
"""
_OWNER: Final = 1000
"""The user in the sandbox."""


def build_base(config: HarnessConfig, target: Path) -> None:
    """Write the archive that every trajectory begins with. Raises ConfigError."""
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as archive, _source(config) as source:
        for folder in (HOME, TEMPORARY):
            archive.addfile(_member(folder, 0, tarfile.DIRTYPE, 0o700))
        if source is None:
            archive.addfile(_member(WORKSPACE, 0, tarfile.DIRTYPE, 0o700))
        else:
            archive.add(source, arcname=WORKSPACE, filter=_owned)
    limit = config.limits.disk_mb << 20
    if target.stat().st_size > limit:
        raise ConfigError(
            f"{config.source}: the working directory has {target.stat().st_size >> 20} MiB, above"
            f" limits.disk_mb {config.limits.disk_mb}",
            hint="raise limits.disk_mb",
        )


def add_files(archive: Path, files: Mapping[str, bytes]) -> None:
    """Add files, by their path in the archive, readable and writable by the harness."""
    with tarfile.open(archive, "a", format=tarfile.GNU_FORMAT) as target:
        folders: set[str] = set()
        for name, content in files.items():
            for parent in reversed(Path(name).parents):
                if str(parent) not in (".", WORKSPACE, HOME, *folders):
                    folders.add(str(parent))
                    target.addfile(_member(str(parent), 0, tarfile.DIRTYPE, 0o700))
            target.addfile(_member(name, len(content), tarfile.REGTYPE, 0o600), io.BytesIO(content))


def restore(archive: Path, before: Path, names: tuple[str, ...]) -> None:
    """Put back as they were in ``before``: ``names`` of the working directory, and all that lies outside it.

    With ``names``, so are the files in it that steer interpreters and test runners (``_STEERING``). What
    stands in the way of a folder that leads to them, such as a link to another place, is dropped.
    """
    named = {os.path.normpath(f"{WORKSPACE}/{name}") for name in names}

    def is_restored(name: str) -> bool:
        if WORKSPACE not in _parents(name):
            return True
        steers = bool(named) and _STEERING.search(name) is not None
        return steers or not named.isdisjoint((name, *_parents(name)))

    with tarfile.open(before) as source:
        is_dir = {os.path.normpath(member.name): member.isdir() for member in source}
    back = {name for name in is_dir if is_restored(name)}
    leading = set().union(*map(_parents, back | named))
    files = {name for name in back if not is_dir[name]}

    def is_kept(name: str, is_folder: bool) -> bool:
        is_own = not is_restored(name) or (is_folder and name.endswith("/.git"))
        return is_own and (is_folder or name not in leading) and files.isdisjoint((name, *_parents(name)))

    fresh = archive.with_suffix(".restored")
    with tarfile.open(fresh, "w", format=tarfile.GNU_FORMAT) as target:
        _copy(archive, target, is_kept)
        _copy(before, target, lambda name, _: name in back)
    fresh.replace(archive)


def keep(packed: Path, archive: Path, limits: HarnessLimits) -> bool:
    """Replace the archive by what a container has packed, which may be anything; False if it is too large.

    Kept are files, folders and links, and all belong to the user. A sparse file counts as whole. Raises
    tarfile.TarError.
    """
    fresh = archive.with_suffix(".kept")
    size = count = 0
    with tarfile.open(packed, "r:") as source, tarfile.open(fresh, "w", format=tarfile.GNU_FORMAT) as target:
        for member in source:
            member.name = os.path.normpath(member.name)
            leaves = member.name.startswith(("/", "..")) or member.name == "."
            if leaves or _owned(member) is None:
                continue
            size, count = size + member.size, count + 1
            if size > limits.disk_mb << 20 or count > limits.files:
                fresh.unlink()
                return False
            member.mode &= 0o777
            member.type = tarfile.REGTYPE if member.isreg() else member.type
            target.addfile(member, source.extractfile(member) if member.isreg() else None)
    fresh.replace(archive)
    return True


def read_file(archive: Path, name: str, limit: int) -> str | None:
    """Return the text of a file of the working directory, at most ``limit`` bytes; None if there is none."""
    wanted = os.path.normpath(f"{WORKSPACE}/{name}")
    content = None
    with tarfile.open(archive) as source:
        for member in source:
            if os.path.normpath(member.name) == wanted and member.isreg():
                reader = source.extractfile(member)
                content = None if reader is None else reader.read(limit).decode("utf-8", "replace")
    return content


def keep_until_exit() -> Path:
    """Return a new folder that is deleted when this process ends."""
    folder = scratch_folder("harness")
    atexit.register(discard, folder)
    return folder


def _parents(name: str) -> list[str]:
    """Return the folders that lead to a member."""
    return [str(parent) for parent in Path(name).parents][:-1]


def _copy(archive: Path, target: tarfile.TarFile, wanted: Callable[[str, bool], bool]) -> None:
    """Copy the members that ``wanted`` takes by name and kind, and no link to any other; unlock them."""
    with tarfile.open(archive) as source:
        for member in source:
            links_away = member.islnk() and not wanted(os.path.normpath(member.linkname), False)
            member.mode |= 0o700 if member.isdir() else 0o600
            if wanted(os.path.normpath(member.name), member.isdir()) and not links_away:
                target.addfile(member, source.extractfile(member) if member.isreg() else None)


@contextmanager
def _source(config: HarnessConfig) -> Iterator[Path | None]:
    """Yield the folder that the working directory is copied from; None for an empty one."""
    limits, workspace = config.limits, config.workspace
    if workspace.bundle is None:
        yield workspace.template
        return
    folder = scratch_folder("bundle")
    try:
        clone = folder / "clone"
        check_out(
            workspace.bundle, clone, ref=workspace.ref, max_bytes=limits.disk_mb << 20, max_files=limits.files
        )
        yield clone
    except BundleTooLargeError as error:
        raise ConfigError(
            f"{config.source}: workspace.bundle {workspace.bundle} holds more than limits.disk_mb"
            f" {limits.disk_mb} or limits.files {limits.files}, or {DEEPEST} levels of folders",
            hint="raise the limit, if you trust the bundle",
        ) from error
    except BundleError as error:
        raise ConfigError(
            f"{config.source}: workspace.bundle {workspace.bundle} with ref {workspace.ref!r} cannot be"
            f" checked out: {error}",
            hint=f"{HINT}, and name one of its branches as ref",
        ) from error
    finally:
        discard(folder)


def _owned(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Give a member to the user in the sandbox; leave out pipes, sockets and devices."""
    member.uid = member.gid = _OWNER
    member.uname = member.gname = ""
    member.mode |= 0o700 if member.isdir() else 0o600
    kept = member.isdir() or member.isreg() or member.issym() or member.islnk()
    return member if kept else None


def _member(name: str, size: int, kind: bytes, mode: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.type, member.mode = size, kind, mode
    member.uid = member.gid = _OWNER
    member.mtime = int(time.time())
    return member
