"""Read what a harness leaves: how it changed its working directory, and the score of that."""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agentrl.documents.base import is_finite, sanitize_bson
from agentrl.documents.record import CommandRun, Ending
from agentrl.errors import HarnessError
from agentrl.harness.config import HarnessConfig, HarnessFile, ScoreCommand
from agentrl.harness.session import Session
from agentrl.harness.workspace import WORKSPACE, read_file, restore
from agentrl.scoring.scorers import ScoreResult

DIFF_CHARACTERS: Final = 128 << 10
"""Longest diff that is kept."""
LISTED: Final = 200
"""Most files that are named."""
_TEXT_BYTES: Final = 128 << 10
"""Larger files are only named."""
_TEXT_LINES: Final = 3000
_CHUNK: Final = 1 << 20
_LEFT_OUT: Final = f"{WORKSPACE}/.git"
_FILE_BYTES: Final = 1 << 20
_SCORING: Final = {
    "PYTHONNOUSERSITE": "1",
    "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.bareRepository", "GIT_CONFIG_VALUE_0": "explicit",
}  # fmt: skip
"""Settings of the command that scores: no packages of HOME, no folder that poses as a bare repository."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs between two archives."""

    files: tuple[str, ...]
    count: int
    diff: str


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: str
    text: str | None
    """None for a file that is large or not text."""


def compare(before: Path, after: Path) -> Changes:
    """Return how the working directory changed; the folder ``.git`` does not count."""
    old, new = _entries(before), _entries(after)
    names = sorted(name for name in old.keys() | new.keys() if _digest(old, name) != _digest(new, name))
    parts: list[str] = []
    length = 0
    for name in names:
        part = "\n".join(_diff(name, old.get(name), new.get(name))) + "\n"
        if length + len(part) > DIFF_CHARACTERS:
            parts.append(part[: max(0, DIFF_CHARACTERS - length)] + "\n[the rest of the diff is left out]\n")
            break
        parts.append(part)
        length += len(part)
    return Changes(tuple(names[:LISTED]), len(names), "".join(parts))


def _digest(entries: dict[str, _Entry], name: str) -> str | None:
    return entries[name].digest if name in entries else None


def _entries(archive: Path) -> dict[str, _Entry]:
    entries = {}
    with tarfile.open(archive) as source:
        for member in source:
            name = os.path.normpath(member.name)
            is_inside = name.startswith(f"{WORKSPACE}/") and not f"{name}/".startswith(f"{_LEFT_OUT}/")
            if is_inside and not member.isdir():
                entries[name.removeprefix(f"{WORKSPACE}/")] = _entry(source, member)
    return entries


def _entry(source: tarfile.TarFile, member: tarfile.TarInfo) -> _Entry:
    if not member.isreg():
        target = f"link to {member.linkname}"
        return _Entry(target, target)
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


async def score_files(
    config: HarnessConfig, session: Session, run: CommandRun, environment: dict[str, str]
) -> tuple[ScoreResult | None, CommandRun | None]:
    """Return the score, and the command that gave it; None for a score that comes from elsewhere.

    Raises HarnessError for a file or an output without a number.
    """
    if config.score == "exit_code":
        passed = run.ended is Ending.EXITED
        return ScoreResult(float(passed), {"exit_code": run.exit_code, "ended": run.ended.value}), None
    if isinstance(config.score, HarnessFile):
        name = config.score.file
        text = await asyncio.to_thread(read_file, session.archive, name, _FILE_BYTES)
        if text is None:
            raise HarnessError(
                f"the harness has not written {name!r}, the file with its score",
                hint="write a number, or JSON with 'score', into it",
            )
        return _read_score(text, f"the file {name!r}"), None
    if isinstance(config.score, ScoreCommand):
        return await _run_command(config.score, session, environment)
    return None, None


async def _run_command(
    command: ScoreCommand, session: Session, environment: dict[str, str]
) -> tuple[ScoreResult, CommandRun]:
    """Run the command on the working directory, with nothing else that the harness has left."""
    await asyncio.to_thread(restore, session.archive, session.before, command.restore)
    done = await session.run(
        command.command, {**_SCORING, **environment}, seconds=command.seconds, calls_model=False
    )
    if command.result == "stdout" and done.ended is Ending.EXITED:
        lines = done.stdout.strip().splitlines()
        return _read_score(lines[-1] if lines else "", "the last line of score.command"), done
    score = float(done.ended is Ending.EXITED)
    return ScoreResult(score, {"exit_code": done.exit_code, "ended": done.ended.value}), done


def _read_score(text: str, where: str) -> ScoreResult:
    """Read a number, or a JSON object with ``score`` and ``details``."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    details = value.get("details") if isinstance(value, dict) else None
    score = value.get("score") if isinstance(value, dict) else value
    if isinstance(score, bool) or not is_finite(score):
        raise HarnessError(
            f"{where} holds {text[:100]!a}, not a score", hint='write a number, or {"score": 1.0}'
        )
    return ScoreResult(float(score), sanitize_bson(details) if isinstance(details, dict) else {})
