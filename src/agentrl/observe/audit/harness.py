"""Show the harness of a trajectory: its ending, output and changed files, and the command that scored it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from agentrl.documents.harness import CommandRun, Ending, HarnessRun
from agentrl.observe.terminal import excerpt, plain

_FILES = 20


def render_harness(harness: HarnessRun) -> Iterator[RenderableType]:
    """Yield what the harness of a trajectory did. Its output is cleaned of control characters."""
    yield from _command("harness", harness.run)
    names = ", ".join(excerpt(name, 80) for name in harness.changed_files[:_FILES])
    more = f" and {harness.changes - _FILES} more" if harness.changes > _FILES else ""
    yield plain(f"{harness.changes} files changed{': ' if names else ''}{names}{more}")
    if harness.diff:
        yield _indented(plain(harness.diff.rstrip("\n")))
    if harness.scoring is not None:
        yield from _command("score command", harness.scoring)


def _command(title: str, run: CommandRun) -> Iterator[RenderableType]:
    ended = f"{run.ended} · exit code {run.exit_code} · {run.seconds:.1f} s · {run.memory_mb:.0f} MiB"
    yield Rule(Text(title), align="left", style="dim")
    yield plain(ended, "" if run.ended is Ending.EXITED else "red")
    outputs = (("stdout", run.stdout, run.stdout_bytes), ("stderr", run.stderr, run.stderr_bytes))
    for name, text, size in outputs:
        if text.strip():
            yield plain(f"{name}, {size:,} bytes", "dim")
            yield _indented(plain(text.rstrip("\n")))


def _indented(text: Text) -> Padding:
    return Padding(text, (0, 0, 0, 2), expand=False)
