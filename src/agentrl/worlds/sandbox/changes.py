"""Compare two archives of a folder: which files differ, and a unified diff of those that are text."""

from __future__ import annotations

import difflib
import hashlib
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DIFF_CHARACTERS: Final = 128 << 10
"""Longest diff that is kept."""
LISTED: Final = 200
"""Most files that are named."""
_TEXT_BYTES: Final = 128 << 10
"""Larger files are only named."""
_TEXT_LINES: Final = 3000
_CHUNK: Final = 1 << 20


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
