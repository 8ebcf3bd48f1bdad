"""Remove the records of log files that name something withdrawn."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

_NAME_ENDS = r"(?![A-Za-z0-9_.-])"
_RECORD = re.compile(r"^.*\n?(?:    .*\n?)*", re.MULTILINE)
"""A line and the indented lines behind it."""
_FILES = re.compile(r"\.(log|out)\b")
"""Logs of processes, rotated ones too, and what processes of ``agentrl launch`` printed."""
_WRITER = re.compile(r"^(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d [A-Z]+ +([A-Za-z0-9_-]+)/", re.MULTILINE)
"""A line of ``observe.logging``, with its run: files of run ``math_2`` lie beside those of ``math``."""


def remove_lines(folder: Path, run_name: str, names: Collection[str]) -> int:
    """Remove the log records in ``folder`` of a run that contain one of ``names``; return how many.

    Files are changed in place: a process that appends to one goes on.
    """
    if not names or not folder.is_dir():
        return 0
    named = re.compile("|".join(re.escape(name) + _NAME_ENDS for name in sorted(names)))
    removed = 0
    for path in sorted(folder.glob(f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', run_name)}_*")):
        if _FILES.search(path.name) is None:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        writer = _WRITER.search(text)
        if writer is not None and writer[1] != run_name:
            continue
        records = _RECORD.findall(text)
        kept = [record for record in records if named.search(record) is None]
        if len(kept) < len(records):
            removed += len(records) - len(kept)
            with path.open("r+", encoding="utf-8") as stream:
                stream.write("".join(kept))
                stream.truncate()
    return removed
