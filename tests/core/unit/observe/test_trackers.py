"""The trackers of metrics; one that fails or hangs stops nothing, and says so once."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError
from agentrl.observe import trackers
from agentrl.observe.trackers import TRACKERS, flatten, open_trackers, public_parameters, require_trackers


def test_flatten_keeps_finite_numbers_alone() -> None:
    metrics = {"a": 1, "b": float("inf"), "c": "text", "d": {"0": 2, "1": {"x": 3.5}}, "e": None}
    assert flatten(metrics) == {"a": 1.0, "d/0": 2.0, "d/1/x": 3.5}


@pytest.mark.parametrize("report_to", ["none", "", " none , "])
def test_no_tracker_is_a_tracker(report_to: str, tmp_path: Path) -> None:
    tracker = open_trackers(report_to, RunConfig(), tmp_path)
    tracker.log(1, {"reward": 0.125})
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_tracker_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'tensorbord'") as caught:
        open_trackers("tensorbord", RunConfig(), tmp_path)
    assert "clearml, comet, mlflow, swanlab, tensorboard, trackio, wandb" in caught.value.message
    assert "did you mean 'tensorboard'" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_library_is_named_with_its_install_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in list(sys.modules):
        if module.split(".")[0] == name:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr("sys.meta_path", [_Hides(name), *sys.meta_path])
    with pytest.raises(ConfigError) as caught:
        open_trackers(f"none,{name}", RunConfig(), tmp_path)
    assert caught.value.hint == f"pip install {name}"


def test_trackers_are_checked_before_anything_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers._LIBRARIES, "wandb", "no_such_library")
    monkeypatch.setitem(trackers._LIBRARIES, "mlflow", "json")
    for fine in ("none", "", "mlflow", "none, mlflow"):
        require_trackers(fine)
    with pytest.raises(ConfigError, match="--report_to no_such_library needs the library") as caught:
        require_trackers("mlflow,wandb")
    assert caught.value.hint == "pip install no_such_library"
    with pytest.raises(ConfigError, match="'tensorbord'"):
        require_trackers("tensorbord")


class _Hides:
    """An import finder for which one library is not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.split(".")[0] == self._name:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


@pytest.mark.parametrize(("key", "mode"), [(None, "offline"), ("abc", "online")])
def test_wandb_is_offline_without_a_key(
    key: str | None, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Mock(__spec__=ModuleSpec("wandb", None))  # accelerate looks for the spec
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    tracker = open_trackers("wandb", RunConfig(run_name="demo"), tmp_path, {"learning_rate": 1e-5})
    tracker.log(3, {"reward": 0.5, "histogram": {"0": 2}, "until": "now"})
    tracker.close()
    begun = library.init.call_args.kwargs
    assert (begun["mode"], begun["config"]) == (mode, {"learning_rate": 1e-5})
    run = library.init.return_value
    run.log.assert_called_once_with({"reward": 0.5, "histogram/0": 2.0}, step=3)
    run.finish.assert_called_once_with()


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
