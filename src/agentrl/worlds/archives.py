"""Keep working directories as tar archives: begin, add, put back, compare what differs, sanitize.

What a harness or a container has packed is untrusted: its links, owners, sizes and kinds are checked.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import os
import re
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentrl.base.untrusted_folder import DEEPEST

WORKSPACE: Final = "workspace"
HOME: Final = "home"
TEMPORARY: Final = "tmp"
_STEERING: Final = re.compile(
    r"(^|/)(conftest\.py|(site|user)customize(\.[^/]+)?|\.?pytest\.(ini|toml)|tox\.ini|entry_points\.txt"
    r"|[^/]+\.(pth|pyc)|__pycache__"
    r"|\.git/((modules|worktrees)/([^/]+/)+)?(hooks|config|config\.worktree|commondir))(/|$)|(^|/)\.git$"
)
"""Files of a working directory that run code of their own, or choose what is run, when tests are started.

A file or link ``.git`` is one: it leads to a repository elsewhere. A folder ``.git`` is work, but submodules
have their repositories in it. Python imports ``sitecustomize`` as a package or an extension too.
"""
_OWNER: Final = 1000
"""The user in the sandbox."""
DIFF_CHARACTERS: Final = 128 << 10
"""Longest diff that is kept."""
LISTED: Final = 200
"""Most files that are named."""
_TEXT_BYTES: Final = 128 << 10
"""Larger files are only named."""
_TEXT_LINES: Final = 3000
_CHUNK: Final = 1 << 20


def write_beginning(target: Path, source: Path | None) -> None:
    """Write the archive that a trajectory begins with: the folder ``source`` is its working directory."""
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as archive:
        for folder in (HOME, TEMPORARY):
            archive.addfile(_member(folder, 0, tarfile.DIRTYPE, 0o700))
        if source is None:
            archive.addfile(_member(WORKSPACE, 0, tarfile.DIRTYPE, 0o700))
        else:
            archive.add(source, arcname=WORKSPACE, filter=_owned)


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
    named = frozenset(os.path.normpath(f"{WORKSPACE}/{name}") for name in names)
    with tarfile.open(before) as source:
        is_dir = {os.path.normpath(member.name): member.isdir() for member in source}
    back = {name for name, is_folder in is_dir.items() if _is_put_back(name, is_folder, named)}
    files = {name for name in back if not is_dir[name]}
    leading = set().union(*map(_parents, back | named))

    def stays(name: str, is_folder: bool) -> bool:
        if _is_put_back(name, is_folder, named) or not files.isdisjoint((name, *_parents(name))):
            return False
        # Through a link in place of a leading folder, what is put back would be written elsewhere.
        return is_folder or name not in leading

    fresh = archive.with_suffix(".restored")
    with tarfile.open(fresh, "w", format=tarfile.GNU_FORMAT) as target:
        _copy(archive, target, stays)
        _copy(before, target, lambda name, is_folder: name in back or (is_folder and name in leading))
    fresh.replace(archive)


def _is_put_back(name: str, is_folder: bool, named: frozenset[str]) -> bool:
    """Return whether a member comes from the archive before the harness: the first case that holds decides.

    | member | comes from before |
    |---|---|
    | outside the working directory | yes |
    | a name in ``named``, or below one | yes |
    | a folder ``.git`` | no: it is work, but for its hooks and settings |
    | one that steers test runners, with ``named`` | yes |
    | any other | no |
    """
    folders = _parents(name)
    if WORKSPACE not in folders or not named.isdisjoint((name, *folders)):
        return True
    if is_folder and name.endswith("/.git"):
        return False
    return bool(named) and _STEERING.search(name) is not None


def _parents(name: str) -> list[str]:
    """Return the folders that lead to a member, whose name is normalized."""
    return [name[: slash.start()] for slash in re.finditer("/", name)]


def _copy(archive: Path, target: tarfile.TarFile, wanted: Callable[[str, bool], bool]) -> None:
    """Copy the members that ``wanted`` takes by name and kind; unlock them.

    If only other names of a file than its first are wanted, the first of these becomes the file. Copying it
    for each would let one file with many names fill the disk.
    """
    left_out: dict[str, tarfile.TarInfo] = {}
    first_names: dict[str, str] = {}
    with tarfile.open(archive) as source:
        for member in source:
            name, origin = os.path.normpath(member.name), member
            member.mode |= 0o700 if member.isdir() else 0o600
            if not wanted(name, member.isdir()):
                if member.isreg():
                    left_out[name] = member
                continue
            linked = os.path.normpath(member.linkname)
            if member.islnk() and not wanted(linked, False):
                if linked in first_names:
                    member.linkname = first_names[linked]
                elif linked in left_out:
                    first_names[linked], origin = name, left_out[linked]
                    member.type, member.size, member.linkname = tarfile.REGTYPE, origin.size, ""
                else:
                    continue
            target.addfile(member, source.extractfile(origin) if member.isreg() else None)


def keep(packed: Path, archive: Path, max_bytes: int, max_files: int) -> bool:
    """Replace the archive by what a container has packed, which may be anything; False if it is too large.

    Kept are files, folders and links, and all belong to the user. A sparse file counts as whole. More levels
    of folders than ``DEEPEST`` are too large. Raises tarfile.TarError.
    """
    fresh = archive.with_suffix(".kept")
    size = count = 0
    is_file: dict[str, bool] = {}
    with tarfile.open(packed, "r:") as source, tarfile.open(fresh, "w", format=tarfile.GNU_FORMAT) as target:
        for member in source:
            member.name = os.path.normpath(member.name)
            leaves = member.name.startswith("/") or member.name.split("/", 1)[0] in ("..", ".")
            if leaves or _owned(member) is None:
                continue
            size, count = size + member.size, count + 1
            if size > max_bytes or count > max_files or member.name.count("/") > DEEPEST:
                fresh.unlink()
                return False
            # What has the name of a link as its folder would be written where the link leads.
            through = not is_file.keys().isdisjoint(_parents(member.name))
            if through or (member.islnk() and not is_file.get(os.path.normpath(member.linkname))):
                continue
            if not member.isdir():
                is_file[member.name] = member.isreg()
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


@dataclass(frozen=True, slots=True)
class FolderChanges:
    """What differs between two archives."""

    files: tuple[str, ...]
    count: int
    diff: str


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: str
    text: str | None
    """None for a file that is large or not text."""


def compare(before: Path, after: Path, folder: str = "") -> FolderChanges:
    """Return how ``folder`` of the archives changed; its folder ``.git`` does not count."""
    old, new = _entries(before, folder), _entries(after, folder)
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    parts: list[str] = []
    length = 0
    for name in names:
        part = "\n".join(_diff(name, old.get(name), new.get(name))) + "\n"
        if length + len(part) > DIFF_CHARACTERS:
            parts.append(part[: max(0, DIFF_CHARACTERS - length)] + "\n[the rest of the diff is left out]\n")
            break
        parts.append(part)
        length += len(part)
    return FolderChanges(tuple(names[:LISTED]), len(names), "".join(parts))


def _entries(archive: Path, folder: str) -> dict[str, _Entry]:
    entries = {}
    prefix = f"{folder}/" if folder else ""
    with tarfile.open(archive, "r:") as source:
        for member in source:
            path = os.path.normpath(member.name)
            name = path.removeprefix(prefix)
            if path.startswith(prefix) and not f"{name}/".startswith(".git/") and not member.isdir():
                entries[name] = _entry(source, member)
    return entries


def _entry(source: tarfile.TarFile, member: tarfile.TarInfo) -> _Entry:
    if not member.isreg():
        target = f"link to {member.linkname}"
        return _Entry(target, target)
    if member.issparse():  # a few bytes may stand for any number
        return _Entry(f"sparse/{member.size}", None)
    reader = source.extractfile(member)
    digest = hashlib.sha256()
    content = b""
    while reader is not None and (chunk := reader.read(_CHUNK)):
        digest.update(chunk)
        content = chunk if member.size <= _TEXT_BYTES else b""
    try:
        text = None if member.size > _TEXT_BYTES or b"\0" in content else content.decode("utf-8")
    except UnicodeDecodeError:
        text = None
    return _Entry(f"{member.mode & 0o111:o}/{digest.hexdigest()}", text)


def _diff(name: str, old: _Entry | None, new: _Entry | None) -> Iterator[str]:
    title = f"{'added' if old is None else 'deleted' if new is None else 'changed'}: {name}"
    before, after = ([] if entry is None else _lines(entry) for entry in (old, new))
    if before is None or after is None:
        yield f"{title} (not shown)"
        return
    old_name, new_name = ("/dev/null" if old is None else f"a/{name}"), f"b/{name}"
    if new is None:
        new_name = "/dev/null"
    yield from difflib.unified_diff(before, after, old_name, new_name, lineterm="")
    if before == after:
        yield title


def _lines(entry: _Entry) -> list[str] | None:
    """Return the lines of a file; None if it is not shown."""
    lines = None if entry.text is None else entry.text.splitlines()
    return None if lines is None or len(lines) > _TEXT_LINES else lines
