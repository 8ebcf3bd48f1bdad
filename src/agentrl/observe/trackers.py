"""Experiment trackers: tensorboard, wandb, mlflow or your own, chosen by ``--report_to``."""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError
from agentrl.registry import Registry


class Tracker(Protocol):
    """Receives the metrics of a run."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send one step's metrics, all of them finite numbers."""

    def close(self) -> None:
        """Flush and close."""


TrackerFactory = Callable[[RunConfig, Path, Mapping[str, Any]], Tracker]
"""Opens a tracker for a run, with its output folder and the parameters to show beside the run."""

TRACKERS: Registry[TrackerFactory] = Registry("tracker", group="agentrl.trackers", flag="--report_to")


def tracker(*names: str) -> Callable[[TrackerFactory], TrackerFactory]:
    """Register a class or function ``(RunConfig, output folder, parameters) -> Tracker`` under ``names``."""
    return TRACKERS.register(*names)


def open_trackers(
    report_to: str, run: RunConfig, output: str | Path, parameters: Mapping[str, Any] | None = None
) -> Tracker:
    """Return the trackers named in ``report_to`` (comma-separated, or ``none``) as one.

    Their files go below ``output``. ``parameters`` are shown beside the run if the tracker can. wandb works
    offline unless WANDB_API_KEY or WANDB_MODE is set; mlflow writes to MLFLOW_TRACKING_URI, by default to a
    file in ``output``.
    Raises ConfigError for an unknown name and for a library that is not installed.
    """
    names = [name.strip() for name in report_to.split(",") if name.strip() not in ("", "none")]
    factories = [TRACKERS.get(name) for name in names]
    return _Several([open_tracker(run, Path(output), parameters or {}) for open_tracker in factories])


def flatten(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the finite numbers of ``metrics``, those of nested mappings as ``key/inner``."""
    flat: dict[str, float] = {}
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}/"))
        elif isinstance(value, int | float) and math.isfinite(value):
            flat[f"{prefix}{key}"] = float(value)
    return flat


class _Several:
    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        numbers = flatten(metrics)
        for tracker in self._trackers:
            tracker.log(step, numbers)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


@tracker("tensorboard")
class _TensorBoard:
    """Writes event files without torch."""

    def __init__(self, run: RunConfig, output: Path, parameters: Mapping[str, Any]) -> None:
        writer = _load("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event = _load("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        self._summary = _load("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        self._writer = writer.EventFileWriter(str(output / "tensorboard" / run.run_name))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = [self._summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@tracker("wandb")
class _Wandb:
    def __init__(self, run: RunConfig, output: Path, parameters: Mapping[str, Any]) -> None:
        wandb = _load("wandb", "wandb")
        output.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "agentrl"),
            name=run.run_name,
            id=run.run_name,
            resume="allow",
            dir=str(output),
            config=dict(parameters),
            mode=os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline"),
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


@tracker("mlflow")
class _Mlflow:
    def __init__(self, run: RunConfig, output: Path, parameters: Mapping[str, Any]) -> None:
        self._mlflow = _load("mlflow", "mlflow")
        output.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(output / 'mlflow.db').absolute()}"
        self._mlflow.set_tracking_uri(uri)
        self._mlflow.set_experiment("agentrl")
        self._mlflow.start_run(run_name=run.run_name)
        self._mlflow.log_params(dict(parameters))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _load(module: str, library: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--report_to {library} needs the library {library}, which is not installed ({error})",
            hint=f"pip install {library}",
        ) from error
