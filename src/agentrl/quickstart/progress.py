"""Show work that takes long: a bar on a terminal, and lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LINE_SECONDS = 10.0
"""Interval of the lines where stdout is not a terminal."""

_BAR_SECONDS = 0.2
_MB = 1e6


@contextmanager
def working(
    what: str, report: Callable[[str], None], *, folder: Path | None = None, total: int | None = None
) -> Iterator[None]:
    """Show that ``what`` is being done, for the length of the block.

    With ``folder`` and ``total`` (bytes) it also shows how much of the total lies in the folder.
    ``report`` receives the lines.
    """
    began = time.monotonic()
    is_terminal = sys.stdout.isatty()
    if not is_terminal:
        report(what)
    ended = threading.Event()
    show = _show_bar if is_terminal else _show_lines
    shower = threading.Thread(target=show, args=(what, report, folder, total, ended), daemon=True)
    shower.start()
    outcome = "failed after"
    try:
        yield
        outcome = "done in"
    finally:
        ended.set()
        shower.join()
        report(f"{what}: {outcome} {time.monotonic() - began:.0f} s")


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below ``folder``, in bytes; files that vanish meanwhile do not count."""
    size = 0
    for path in folder.rglob("*"):
        try:
            size += path.lstat().st_size if not path.is_dir() else 0
        except FileNotFoundError:
            continue
    return size


def state_text(what: str, seconds: float, size: int | None, total: int | None) -> str:
    """Return one line about work in progress, such as ``downloading: 31 of 93 MB, 12 s``."""
    amount = "" if size is None or not total else f" {min(size, total) / _MB:.0f} of {total / _MB:.0f} MB,"
    return f"{what}:{amount} {seconds:.0f} s"


def _show_lines(
    what: str,
    report: Callable[[str], None],
    folder: Path | None,
    total: int | None,
    ended: threading.Event,
) -> None:
    began = time.monotonic()
    while not ended.wait(LINE_SECONDS):
        size = None if folder is None else folder_bytes(folder)
        report(state_text(what, time.monotonic() - began, size, total))


def _show_bar(
    what: str,
    report: Callable[[str], None],
    folder: Path | None,
    total: int | None,
    ended: threading.Event,
) -> None:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
    amounts = [BarColumn(), DownloadColumn()] if folder is not None and total else []
    with Progress(*columns, *amounts, TimeElapsedColumn(), transient=True) as progress:
        task = progress.add_task(what, total=total)
        while not ended.wait(_BAR_SECONDS):
            if folder is not None and total:
                progress.update(task, completed=min(folder_bytes(folder), total))
