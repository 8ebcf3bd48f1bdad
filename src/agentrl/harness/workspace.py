"""Prepare the working directory of a harness as an archive, from a template folder or a git bundle."""

from __future__ import annotations

import atexit
import io
import os
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from agentrl.atomic_folder import scratch_folder
from agentrl.errors import ConfigError
from agentrl.harness.config import HarnessConfig, HarnessLimits

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
_CLONE_SECONDS: Final = 300.0
_GIT_KIB: Final = 4 << 20
_BOUNDED_GIT: Final = ("/bin/sh", "-c", f'ulimit -v {_GIT_KIB}; exec git "$@"', "sh")
"""git with 4 GiB of memory: a kilobyte of a bundle may unpack to any size."""


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
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
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
    if config.workspace.bundle is None:
        yield config.workspace.template
        return
    folder = scratch_folder("bundle")
    try:
        clone = folder / "clone"
        _git(config, "clone", "--quiet", "--no-checkout", str(config.workspace.bundle), str(clone))
        commit = _commit(config, clone)
        _check_tree(config, clone, commit)
        _git(
            config,
            "-C",
            str(clone),
            "checkout",
            "--quiet",
            *([] if config.workspace.ref is None else [config.workspace.ref]),
        )
        _git(config, "-C", str(clone), "remote", "remove", "origin")
        yield clone
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _commit(config: HarnessConfig, clone: Path) -> str:
    """Return the commit that will be checked out: of a branch first, as git does. Raises ConfigError."""
    names = (
        ["HEAD"]
        if config.workspace.ref is None
        else [f"refs/remotes/origin/{config.workspace.ref}", config.workspace.ref]
    )
    for name in names:
        with suppress(ConfigError):
            return _git(
                config, "-C", str(clone), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"
            ).strip()
    raise _not_checked_out(config, "it has no such branch, tag or commit")


def _check_tree(config: HarnessConfig, clone: Path, commit: str) -> None:
    """Raise ConfigError for a tree above the limits: a kilobyte of a bundle may hold any number of files."""
    limits, size, count = config.limits, 0, 0
    command = [*_BOUNDED_GIT, "-C", str(clone), "ls-tree", "-r", "--long", commit]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=_git_environment()) as listing:
        for line in listing.stdout or ():
            length = line.split(b"\t", 1)[0].split()[-1]
            size, count = size + (int(length) if length.isdigit() else 0), count + 1
            if size > limits.disk_mb << 20 or count > limits.files:
                listing.kill()
                raise ConfigError(
                    f"{config.source}: workspace.bundle {config.workspace.bundle} holds more than"
                    f" limits.disk_mb {limits.disk_mb} or limits.files {limits.files}",
                    hint="raise the limit, if you trust the bundle",
                )


def _git(config: HarnessConfig, *words: str) -> str:
    """Run a command of git and return what it prints. Raises ConfigError."""
    if shutil.which("git") is None:
        raise ConfigError(f"{config.source}: workspace.bundle needs git", hint="install git")
    try:
        done = subprocess.run(
            [*_BOUNDED_GIT, *words],
            check=True,
            capture_output=True,
            text=True,
            env=_git_environment(),
            timeout=_CLONE_SECONDS,
        )
    except subprocess.SubprocessError as error:
        raise _not_checked_out(config, str(getattr(error, "stderr", None) or error)) from error
    return done.stdout


def _git_environment() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", ""), "GIT_CONFIG_NOSYSTEM": "1", "HOME": "/nonexistent"}


def _not_checked_out(config: HarnessConfig, said: str) -> ConfigError:
    bundle, ref = config.workspace.bundle, config.workspace.ref
    return ConfigError(
        f"{config.source}: workspace.bundle {bundle} with ref {ref!r} cannot be checked out:"
        f" {said.strip()[-500:]}",
        hint="make it by `git bundle create FILE HEAD BRANCH`, and name one of its branches as ref",
    )


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
