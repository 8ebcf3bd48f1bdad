"""The trackers of metrics."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import Mock

import pytest

from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError
from agentrl.observe.trackers import flatten, open_trackers


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
