"""What a process prints while it works: a summary a minute, each kind of warning once, errors at once."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from agentrl.observe.logging import ConsoleDigest


class _Console(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class _Setting:
    def __init__(self) -> None:
        self.now = 0.0
        self.console = _Console()
        self.digest = ConsoleDigest(self.console, seconds=60.0, clock=lambda: self.now)

    def log(self, level: int, message: str, **fields: Any) -> None:
        self.digest.handle(
            logging.makeLogRecord(
                {"msg": message, "levelno": level, "levelname": logging.getLevelName(level), **fields}
            )
        )


@pytest.fixture
def setting() -> _Setting:
    return _Setting()


def test_trajectories_and_groups_are_summed_up(setting: _Setting) -> None:
    setting.log(logging.INFO, "the sampler begins")
    for score in (0.0, 1.0, 1.0):
        setting.log(logging.INFO, "sampled", record="train/0/a/0/1")
        setting.log(logging.INFO, "scored", record="train/0/a/0/1", score=score)
    setting.log(logging.INFO, "group finalized", task="train/0/a")
    assert setting.console.lines == ["the sampler begins"]
    setting.now = 61.0
    setting.digest.tick()
    setting.digest.tick()
    assert setting.console.lines[1:] == [
        "last 61 s: 3 × sampled, 3 × scored (mean 0.667), 1 × group finalized"
    ]


def test_a_repeated_warning_is_shown_once_a_minute_and_an_error_always(setting: _Setting) -> None:
    for kind in ("tool", "tool", "engine", "tool"):
        setting.log(logging.WARNING, "trajectory failed", record="x", kind=kind)
    for _ in range(2):
        setting.log(logging.ERROR, "a failure cannot be stored", record="x")
    assert setting.console.lines == ["trajectory failed"] * 2 + ["a failure cannot be stored"] * 2
    setting.now = 60.0
    setting.log(logging.WARNING, "trajectory failed", record="x", kind="tool")
    assert setting.console.lines[4:] == ["last 60 s: 3 × trajectory failed (tool 3)"]
    setting.log(logging.WARNING, "trajectory failed", record="x", kind="tool")
    assert setting.console.lines[5:] == ["trajectory failed"]


def test_a_warning_without_fields_passes_each_time(setting: _Setting) -> None:
    for _ in range(2):
        setting.log(logging.WARNING, "the disk is nearly full")
    assert len(setting.console.lines) == 2


def test_the_rest_is_logged_at_the_end(setting: _Setting) -> None:
    setting.log(logging.INFO, "scored", record="x", score=0.5)
    setting.now = 3.0
    setting.digest.close()
    assert setting.console.lines == ["last 3 s: 1 × scored (mean 0.500)"]
