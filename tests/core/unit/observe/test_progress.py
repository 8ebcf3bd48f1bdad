"""Progress on stderr: nothing for short work, lines without a terminal; and the line of a step."""

from __future__ import annotations

import io
import threading
from typing import Any

from rich.console import Console

from agentrl.observe.progress import HEADER_EVERY, StepView, Work, progress, seconds_of


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
    work.advance(12)
    assert work.line(1.0) == "sorting: 12, 1 s", "more than the total is not a part of it"


def test_what_is_done_can_be_measured_in_a_unit() -> None:
    stream = _Stream()
    seconds = {"first_seconds": 0.0, "line_seconds": 30.0}
    with progress("downloading", 93.0, unit=" MB", measure=lambda: 31.2, stream=stream, **seconds):
        assert stream.written.wait(10)
    assert stream.getvalue() == "downloading: 31 of 93 MB, 0 s\n"


METRICS = {
    "reward": 0.125, "pass_rate": 0.1, "loss": -1.234e-3, "kl_k3": 2.3e-4, "grad_norm": 1.2345,
    "staleness_mean": 0.5, "staleness_max": 1.0, "tokens_per_second": 1234.5, "groups_open": 7.0,
    "groups_ready": 3.0, "sharing_ratio": 1.75, "mfu": 0.412, "seconds_data": 3.0, "seconds_optimizer": 1.0,
}  # fmt: skip


def lines_of(steps: list[dict[str, Any]], max_steps: int = -1) -> list[str]:
    out = io.StringIO()
    view = StepView(Console(file=out, width=40), max_steps=max_steps)
    for number, metrics in enumerate(steps, 1):
        view.step(number, metrics)
    return out.getvalue().splitlines()


def test_a_step_is_one_aligned_plain_line() -> None:
    header, line = lines_of([METRICS], max_steps=30)
    expected = "1/30 0.125 0.10 -1.23e-03 2.3e-04 1.23 0.50/1 1,234 1.75 41.2% 7/3 4.0"
    assert line.split() == expected.split()
    assert len(header) == len(line)
    assert "\x1b" not in line
    ends = [header.index(title) + len(title) for title in ("reward", "loss", "KL(μ‖π)", "tok/s", "seconds")]
    assert all(line[end - 1] != " " and line[end : end + 1] in ("", " ") for end in ends)


def test_missing_and_non_finite_values_are_a_dash() -> None:
    _, line = lines_of([{"reward": float("nan"), "loss": "no number"}])
    assert line.split() == ["1", "–", "–", "–", "–", "–", "–/–", "–", "–", "–", "–/–", "–"]


def test_the_header_is_repeated() -> None:
    lines = lines_of([METRICS] * (HEADER_EVERY + 1))
    assert [number for number, line in enumerate(lines) if "reward" in line] == [0, HEADER_EVERY + 1]


def test_seconds_are_the_sum_of_the_timed_parts() -> None:
    assert seconds_of(METRICS) == 4.0
    assert seconds_of({"reward": 1.0}) is None
