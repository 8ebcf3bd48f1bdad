"""A tracker that fails or hangs stops nothing, and says so once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.schema import RunConfig
from agentrl.observe import trackers
from agentrl.observe.trackers import TRACKERS, open_trackers, public_parameters


class Recorder:
    """A tracker that keeps what it gets; ``fails`` names the methods that raise."""

    def __init__(self, *fails: str) -> None:
        self.fails = fails
        self.steps: list[int] = []
        self.closed = False

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.steps.append(step)
        if "log" in self.fails:
            raise ConnectionError("refused, token=abcdefgh12345678")

    def close(self) -> None:
        self.closed = True
        if "close" in self.fails:
            raise OSError("disk full")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Make trackers available by name: factories without arguments."""
    factories: dict[str, Any] = {}
    monkeypatch.setattr(TRACKERS, "get", lambda name: lambda *_: factories[name]())
    return factories


def test_one_that_raises_is_logged_once_and_the_others_go_on(
    registered: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Recorder("log", "close"), Recorder()
    registered |= {"bad": lambda: bad, "good": lambda: good}
    with caplog.at_level(logging.WARNING):
        tracker = open_trackers("bad,good", RunConfig(), tmp_path)
        for step in (1, 2, 3):
            tracker.log(step, {"reward": 0.5})
        tracker.close()
    assert bad.steps == good.steps == [1, 2, 3]
    assert good.closed
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "--report_to bad could not log a step (failure 1); training goes on" in messages[0]
    assert "abcdefgh12345678" not in messages[0]


def test_one_that_does_not_open_is_left_out(
    registered: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> Recorder:
        raise ConnectionError("no server")

    registered["bad"] = refuse
    with caplog.at_level(logging.WARNING):
        tracker = open_trackers("bad", RunConfig(), tmp_path)
        tracker.log(1, {"reward": 0.5})
        tracker.close()
    assert "could not open" in caplog.text


def test_one_that_hangs_delays_neither_the_start_nor_the_end(
    registered: dict[str, Any], tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    monkeypatch.setattr(trackers, "OPEN_SECONDS", 0.01)
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.01)
    registered["slow"] = lambda: release.wait(60) and Recorder()
    with caplog.at_level(logging.WARNING):
        tracker = open_trackers("slow", RunConfig(), tmp_path)
        tracker.log(1, {"reward": 0.5})
        tracker.close()
    release.set()
    assert "has not opened" in caplog.text
    assert "does not end" in caplog.text


def test_parameters_are_shown_without_secrets() -> None:
    parameters = {
        "learning_rate": 1e-5, "lora_rank": 8, "bf16": True, "none": None, "path": Path("/models/a"),
        "api_key": "abc", "uri": "mongodb://me:secret@db/", "token": "sk-abcdefghijklmnop1234",
    }  # fmt: skip
    assert public_parameters(parameters) == {
        "learning_rate": 1e-5, "lora_rank": 8, "bf16": True, "none": None, "path": "/models/a",
        "api_key": "***", "uri": "mongodb://***@db/", "token": "***",
    }  # fmt: skip
