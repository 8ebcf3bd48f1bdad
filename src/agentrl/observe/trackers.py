"""Send metrics to the trackers that ``--report_to`` names: seven libraries, or your own.

Each works offline unless its environment names a server or a key. accelerate's trackers write,
except to MLflow. What is set here is where they write, and that they do not record the command line, the
console, the environment or code, which may contain secrets. Their error reports to the libraries' makers are
off.

Each tracker has a thread of its own, which opens it and sends to it. A tracker that fails or hangs delays and
stops nothing.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from agentrl.base.batches import batches
from agentrl.base.registry import Registry, refuse_bare
from agentrl.config.flags import names_in
from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError
from agentrl.observe.logging import redact


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
    refuse_bare(names, "tracker")
    return TRACKERS.register(*names)


PROJECT: Final = "agentrl"
"""The project or experiment of a tracker, unless the library's own environment variable names another."""

_CLEARML_RECORDS: Final = (
    "detect_repository", "matplotlib", "tensorflow", "tensorboard", "pytorch", "xgboost", "scikit", "fastai",
    "lightgbm", "hydra", "tfdefines", "joblib", "megengine", "catboost", "gradio", "jsonargparse",
)  # fmt: skip
"""What ClearML records by itself unless told otherwise: code, files, plots, arguments."""
_COMET_RECORDS: Final = (
    "log_code", "log_graph", "auto_param_logging", "auto_metric_logging", "auto_output_logging", "parse_args",
    "log_env_details", "log_git_metadata", "log_git_patch",
)  # fmt: skip
"""The same for Comet."""


class _Accelerate:
    """A tracker of accelerate, by its name there."""

    def __init__(self, library: str, /, *arguments: Any, **settings: Any) -> None:
        tracking = importlib.import_module("accelerate.tracking")  # it imports torch, which samplers lack
        tracking.PartialState()  # its log lines need one; a trainer has joined by it already
        self.tracker = tracking.LOGGER_TYPE_TO_CLASS[library](*arguments, **settings)
        self.tracker.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.tracker.log(dict(metrics), step=step)

    def close(self) -> None:
        self.tracker.finish()


@tracker("tensorboard")
def _tensorboard(run: RunConfig, output: Path, parameters: Mapping[str, Any]) -> Tracker:
    """Write event files. Parameters are left out: each start would add a run of its own for them."""
    _load("tensorboard.summary.writer.event_file_writer", "tensorboard")
    return _Accelerate("tensorboard", run.run_name, logging_dir=str(output / "tensorboard"))


@tracker("wandb")
def _wandb(run: RunConfig, output: Path, parameters: Mapping[str, Any]) -> Tracker:
    """Offline without WANDB_API_KEY and WANDB_MODE. The command line is not recorded: it may hold secrets."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    wandb = _load("wandb", "wandb")
    return _Accelerate(
        "wandb",
        os.environ.get("WANDB_PROJECT", PROJECT),
        name=run.run_name,
        id=run.run_name,
        resume="allow",
        dir=str(_made(output)),
        config=dict(parameters),
        mode=os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline"),
        settings=wandb.Settings(console="off", x_disable_meta=True, save_code=False),
    )


@tracker("swanlab")
def _swanlab(run: RunConfig, output: Path, parameters: Mapping[str, Any]) -> Tracker:
    """Offline without SWANLAB_API_KEY and SWANLAB_MODE."""
    swanlab = _load("swanlab", "swanlab")
    folder = _made(output / "swanlab")
    online = "online" if os.environ.get("SWANLAB_API_KEY") else "offline"
    return _Accelerate(
        "swanlab",
        os.environ.get("SWANLAB_PROJECT", PROJECT),
        name=run.run_name,
        log_dir=str(folder),
        mode=os.environ.get("SWANLAB_MODE") or online,
        config=dict(parameters),
        settings=swanlab.Settings(
            terminal={"proxy_type": "none"},
            probe={"hardware": False, "runtime": False, "requirements": False},
        ),
    )


@tracker("mlflow")
class _Mlflow:
    """Writes to MLFLOW_TRACKING_URI, by default a SQLite file; continues the run of that name.

    accelerate's tracker begins a new run at every start, drops long parameters, refuses more than 1000
    metrics a step, and writes through MLflow's global state.
    """

    def __init__(self, run: RunConfig, output: Path, parameters: Mapping[str, Any]) -> None:
        mlflow = _load("mlflow", "mlflow")
        self._metric, parameter = mlflow.entities.Metric, mlflow.entities.Param
        file = (_made(output) / "mlflow.db").absolute()
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{file}"
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        earlier = self._client.search_runs(
            [experiment], f"attributes.run_name = '{run.run_name}'", max_results=1
        )
        shown = {key: str(value)[:5000] for key, value in parameters.items()}
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            begun = earlier[0].data.params
            for key, value in shown.items():  # a parameter of MLflow never changes, a tag does
                if key in begun and (begun[key] != value or f"resumed.{key}" in earlier[0].data.tags):
                    self._client.set_tag(self._id, f"resumed.{key}", value)
            return
        self._id = self._client.create_run(experiment, run_name=run.run_name).info.run_id
        for batch in batches([parameter(key, value) for key, value in shown.items()], 100):
            self._client.log_batch(self._id, params=batch)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        now = int(time.time() * 1000)
        values = [self._metric(key, value, now, step) for key, value in metrics.items()]
        for batch in batches(values, 1000):
            self._client.log_batch(self._id, metrics=batch)

    def close(self) -> None:
        self._client.set_terminated(self._id)


@tracker("trackio")
def _trackio(run: RunConfig, output: Path, parameters: Mapping[str, Any]) -> Tracker:
    """Write SQLite files to TRACKIO_DIR, by default a folder of ``output``; TRACKIO_SPACE_ID sends them."""
    folder = _made(output / "trackio")
    os.environ.setdefault("TRACKIO_DIR", str(folder.absolute()))
    _load("trackio", "trackio")
    return _Accelerate(
        "trackio",
        os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=run.run_name,
        config=dict(parameters),
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )


@tracker("comet")
def _comet(run: RunConfig, output: Path, parameters: Mapping[str, Any]) -> Tracker:
    """Offline, as an archive for ``comet upload``, without COMET_API_KEY."""
    os.environ.setdefault("COMET_ERROR_TRACKING_ENABLE", "false")
    comet = _load("comet_ml", "comet_ml")
    folder = _made(output / "comet")
    opened = _Accelerate(
        "comet_ml",
        os.environ.get("COMET_PROJECT_NAME", PROJECT),
        online=bool(os.environ.get("COMET_API_KEY")),
        mode="create",
        experiment_config=comet.ExperimentConfig(
            name=run.run_name, offline_directory=str(folder), display_summary_level=0,
            **dict.fromkeys(_COMET_RECORDS, False),
        ),
    )  # fmt: skip
    opened.tracker.store_init_configuration(dict(parameters))
    return opened


@tracker("clearml")
def _clearml(run: RunConfig, output: Path, parameters: Mapping[str, Any]) -> Tracker:
    """Offline, as an archive for ``Task.import_offline_session``, without CLEARML_API_ACCESS_KEY."""
    folder = _made(output / "clearml")
    os.environ.setdefault("CLEARML_CACHE_DIR", str(folder.absolute()))
    task = _load("clearml", "clearml").Task
    if not os.environ.get("CLEARML_API_ACCESS_KEY"):
        task.set_offline(True)
    opened = _Accelerate(
        "clearml",
        run.run_name,
        project_name=os.environ.get("CLEARML_PROJECT", PROJECT),
        task_name=run.run_name,
        auto_connect_arg_parser=False,
        auto_connect_frameworks=dict.fromkeys(_CLEARML_RECORDS, False),
        auto_connect_streams=False,
        auto_resource_monitoring=False,
    )
    opened.tracker.tracker.connect(dict(parameters))  # as hyperparameters, which tasks are compared by
    return opened


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _load(module: str, library: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise _missing(library, str(error)) from error


def _missing(library: str, why: str) -> ConfigError:
    return ConfigError(
        f"--report_to {library} needs the library {library}, which is not installed ({why})",
        hint=f"pip install {library}",
    )


_LIBRARIES: Final = {"comet": "comet_ml"} | {
    name: name for name in ("tensorboard", "wandb", "swanlab", "mlflow", "trackio", "clearml")
}
"""Tracker → the library that it needs."""


def require_trackers(report_to: str) -> None:
    """Raise ConfigError for an unknown tracker and for a library that is not installed; open none.

    Call it before anything is started: trackers open once the model is loaded.
    """
    for name in names_in(report_to):
        if name != "none":
            TRACKERS.get(name)
        library = _LIBRARIES.get(name)
        if library is not None and importlib.util.find_spec(library) is None:
            raise _missing(library, f"no module named {library!r}")


logger = logging.getLogger(__name__)

OPEN_SECONDS = 60.0
CLOSE_SECONDS = 60.0
_REPEAT_SECONDS = 600.0
_QUEUED_STEPS = 1000


def open_trackers(
    report_to: str, run: RunConfig, output: str | Path, parameters: Mapping[str, Any] | None = None
) -> Tracker:
    """Return the trackers named in ``report_to`` (comma-separated, or ``none``) as one.

    Their files go below ``output``. ``parameters`` are shown beside the run if the tracker can, without
    secrets. A library works offline unless its own environment variables name a server or a key
    (docs/metrics.md). Waits at most ``OPEN_SECONDS`` for each; one that fails to open is logged and left out.
    Raises ConfigError for an unknown name and for a library that is not installed.
    """
    names = [name for name in names_in(report_to) if name != "none"]
    factories = [TRACKERS.get(name) for name in names]
    shown = public_parameters(parameters or {})
    return _Several(
        [
            _Sender(name, partial(factory, run, Path(output), shown))
            for name, factory in zip(names, factories, strict=True)
        ]
    )


def public_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``parameters`` without secrets, which a rule of ``redact`` finds by name or by shape."""
    return {
        name: value
        if value is None or isinstance(value, bool | int | float)
        else redact(f"{name}={value}").removeprefix(f"{name}=")
        for name, value in parameters.items()
    }


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
    def __init__(self, senders: Sequence[_Sender]) -> None:
        self._senders = senders

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        numbers = flatten(metrics)
        for sender in self._senders:
            sender.log(step, numbers)

    def close(self) -> None:
        for sender in self._senders:
            sender.ask_to_close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for sender in self._senders:
            sender.wait_closed(deadline)


class _Sender:
    """The thread of one tracker. Raises the ConfigErrors of opening it; logs every other error."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        self._name = name
        self._open_tracker = open_tracker
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_QUEUED_STEPS)
        self._opened = threading.Event()
        self._refusal: ConfigError | None = None
        self._failures = 0
        self._logged_at = -math.inf
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()
        if not self._opened.wait(OPEN_SECONDS):
            logger.warning("--report_to %s has not opened after %.0f s; training goes on", name, OPEN_SECONDS)
        if self._refusal is not None:
            raise self._refusal

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Queue a step; drop it if the tracker is ``_QUEUED_STEPS`` behind or did not open."""
        if not self._thread.is_alive():
            return
        try:
            self._queue.put_nowait((step, metrics))
        except queue.Full:
            self._failed("log a step", f"it is {_QUEUED_STEPS} steps behind")

    def ask_to_close(self) -> None:
        """Let the thread end after what is queued."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            logger.warning("--report_to %s is not closed: it hangs", self._name)

    def wait_closed(self, deadline: float) -> None:
        """Wait for the thread until ``deadline`` on the monotonic clock."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.warning("--report_to %s does not end; its last metrics may be missing", self._name)

    def _run(self) -> None:
        try:
            tracker = self._open_tracker()
        except ConfigError as error:
            self._refusal = error
            return
        except Exception as error:  # noqa: BLE001  a fault of the library must not stop the training
            self._failed("open", error)
            return
        finally:
            self._opened.set()
        while (item := self._queue.get()) is not None:
            self._try("log a step", partial(tracker.log, *item))
        self._try("close", tracker.close)

    def _try(self, doing: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  a fault of the library must not stop the training
            self._failed(doing, error)

    def _failed(self, doing: str, reason: object) -> None:
        """Log a failure: the first one, and then one every ten minutes with the number of failures."""
        self._failures += 1
        now = time.monotonic()
        if now - self._logged_at >= _REPEAT_SECONDS:
            self._logged_at = now
            logger.warning(
                "--report_to %s could not %s (failure %d); training goes on: %s",
                self._name, doing, self._failures, redact(f"{type(reason).__name__}: {reason}")[:500],
            )  # fmt: skip
