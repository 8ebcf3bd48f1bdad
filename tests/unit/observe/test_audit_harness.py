"""The page of a trajectory shows what its harness did, without control characters."""

from __future__ import annotations

import io
from dataclasses import replace

from audit_documents import record
from rich.console import Console

from agentrl.documents.harness import CommandRun, Ending, HarnessRun
from agentrl.observe.audit.record import render_trajectory
from agentrl.store.views.read import WholeTrajectory

RUN = CommandRun(
    ended=Ending.EXITED, exit_code=0, seconds=2.5, memory_mb=100.0, stdout="hi \x1b[31mred\n", stdout_bytes=9
)
TESTS = replace(
    RUN, ended=Ending.NONZERO_EXIT, exit_code=1, stdout="", stderr="1 test failed", stderr_bytes=13
)


def test_the_page_shows_ending_output_diff_and_tests() -> None:
    harness = HarnessRun(
        run=RUN, changed_files=("a.py",), changes=1, diff="--- a/a.py\n+++ b/a.py\n", scoring=TESTS
    )
    shown = replace(record(), harness=HarnessRun.from_document(harness.to_document()))
    assert shown.harness == harness
    out = io.StringIO()
    Console(file=out, width=100).print(render_trajectory(WholeTrajectory(record=shown)))
    text = out.getvalue()
    assert "\x1b" not in text
    for part in (
        "exited · exit code 0 · 2.5 s",
        "1 files changed: a.py",
        "+++ b/a.py",
        "1 test failed",
        "hi ",
    ):
        assert part in text
