"""Progress on stderr: nothing for short work, lines without a terminal."""

from __future__ import annotations

import io
import threading

from agentrl.observe.progress import Work, progress


class _Stream(io.StringIO):
    """Sets ``written`` after the first line."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def flush(self) -> None:
        super().flush()
        if "\n" in self.getvalue():
            self.written.set()


def test_short_work_shows_nothing() -> None:
    stream = _Stream()
    with progress("loading", stream=stream, first_seconds=30.0) as work:
        work.advance()
    assert stream.getvalue() == ""


def test_long_work_prints_lines_where_there_is_no_terminal() -> None:
    stream = _Stream()
    with progress("exporting", total=2000, stream=stream, first_seconds=0.0, line_seconds=30.0):
        assert stream.written.wait(10)
    assert stream.getvalue() == "exporting: 0 of 2,000, 0 s\n"


def test_a_line_counts_what_is_done() -> None:
    work = Work("searching", None)
    assert work.line(3.4) == "searching, 3 s"
    work.advance(1500)
    assert work.line(65.0) == "searching: 1,500, 65 s"
    work.describe("sorting", 10)
    assert work.line(1.0) == "sorting: 0 of 10, 1 s"


def test_what_is_done_can_be_measured_in_a_unit() -> None:
    stream = _Stream()
    with progress(
        "downloading",
        93.0,
        unit=" MB",
        measure=lambda: 31.2,
        stream=stream,
        first_seconds=0.0,
        line_seconds=30.0,
    ):
        assert stream.written.wait(10)
    assert stream.getvalue() == "downloading: 31 of 93 MB, 0 s\n"
