"""Read the Dockerfile of a task: where its commands run, and what its base still lacks."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agentrl.documents.task_messages import BadTaskError

_HARMLESS: Final = frozenset({"LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "MAINTAINER", "STOPSIGNAL", "SHELL"})
"""Instructions that change no file: containers of tasks wait for commands, whatever their image starts."""


@dataclass(slots=True)
class Dockerfile:
    """What the last stage of a Dockerfile says."""

    base: str = ""
    workdir: str = "/"
    environment: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    copies: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    """Paths beside the Dockerfile, and where they go: an absolute path, a folder if it ends in ``/``."""
    needs_build: str | None = None
    """The first instruction that only a builder of images can follow, with its line; None without one."""


def read_dockerfile(path: Path) -> Dockerfile:
    """Return what a Dockerfile says. Raises BadTaskError for one without ``FROM``."""
    found = Dockerfile()
    for line, word, rest in _instructions(path.read_text(encoding="utf-8", errors="replace")):
        if not _follow(found, word, rest):
            found.needs_build = found.needs_build or f"line {line}: {word} {rest[:60]}"
    if not found.base:
        raise BadTaskError(f"{path.parent.name}/Dockerfile has no FROM")
    return found


def _follow(found: Dockerfile, word: str, rest: str) -> bool:
    """Take one instruction; return whether it can be followed without a builder."""
    match word:
        case "FROM":
            is_first, found.workdir, found.user = not found.base, "/", None
            found.environment, found.copies = {}, []
            found.base = next(name for name in [*rest.split(), "scratch"] if not name.startswith("--"))
            return is_first
        case "WORKDIR":
            found.workdir = posixpath.normpath(posixpath.join(found.workdir, _unquoted(rest)))
        case "USER":
            found.user = rest
        case "ENV":
            found.environment |= _variables(rest)
        case "COPY" | "ADD":
            words = _words(rest)
            is_plain = len(words) >= 2 and not any(name.startswith("--") or "://" in name for name in words)
            if word == "ADD" or not is_plain:
                return False
            target = posixpath.join(found.workdir, words[-1])
            is_folder = len(words) > 2 or words[-1].endswith(("/", ".")) or target == "/"
            found.copies.append((tuple(words[:-1]), posixpath.normpath(target) + "/" * is_folder))
        case _:
            return word in _HARMLESS
    return "$" not in rest


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the instruction in capitals and the rest of each; comments are left out."""
    begun, parts = 0, list[str]()
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        begun = begun if parts else number
        parts.append(line.removesuffix("\\").strip())
        if not line.endswith("\\"):
            word, _, rest = " ".join(parts).partition(" ")
            yield begun, word.upper(), rest.strip()
            parts = []


def _words(rest: str) -> list[str]:
    if rest.startswith("["):
        try:
            return [str(word) for word in json.loads(rest)]
        except (ValueError, RecursionError):
            return []
    return rest.split()


def _variables(rest: str) -> dict[str, str]:
    if re.match(r"[A-Za-z_][A-Za-z0-9_]*\s", rest):
        name, _, value = rest.partition(" ")
        return {name: _unquoted(value.strip())}
    try:
        pairs = [word.partition("=") for word in shlex.split(rest)]
    except ValueError:
        return {}
    return {name: value for name, _, value in pairs}


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
