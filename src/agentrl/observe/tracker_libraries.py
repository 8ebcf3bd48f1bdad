"""The trackers of seven libraries; each works offline unless its environment names a server or a key.

None of them records the command line, the console, the environment or code, which may contain secrets.
Their error reports to the libraries' makers are off.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError
from agentrl.observe.tracker_registry import tracker

PROJECT: Final = "agentrl"
"""The project or experiment of a tracker, unless the library's own environment variable names another."""

_CLEARML_RECORDS: Final = (
    "detect_repository", "matplotlib", "tensorflow", "tensorboard", "pytorch", "xgboost", "scikit", "fastai",
    "lightgbm", "hydra", "tfdefines", "joblib", "megengine", "catboost", "gradio", "jsonargparse",
)  # fmt: skip
"""What ClearML records by itself unless told otherwise: code, files, plots, arguments."""


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
    """Offline without WANDB_API_KEY and WANDB_MODE. The command line is not recorded: it may hold secrets."""

    def __init__(self, run: RunConfig, output: Path, parameters: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        wandb = _load("wandb", "wandb")
        output.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.run_name,
            id=run.run_name,
            resume="allow",
            dir=str(output),
            config=dict(parameters),
            mode=os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline"),
            settings=wandb.Settings(console="off", x_disable_meta=True, save_code=False),
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


@tracker("swanlab")
class _Swanlab:
    """Offline without SWANLAB_API_KEY and SWANLAB_MODE."""

    def __init__(self, run: RunConfig, output: Path, parameters: Mapping[str, Any]) -> None:
        swanlab = _load("swanlab", "swanlab")
        folder = output / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        online = "online" if os.environ.get("SWANLAB_API_KEY") else "offline"
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", PROJECT),
            name=run.run_name,
            log_dir=str(folder),
            mode=os.environ.get("SWANLAB_MODE") or online,
            config=dict(parameters),
            settings=swanlab.Settings(
                terminal={"proxy_type": "none"},
                probe={"hardware": False, "runtime": False, "requirements": False},
            ),
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


@tracker("mlflow")
class _Mlflow:
    """Writes to MLFLOW_TRACKING_URI, by default a SQLite file; continues the run of that name."""

    def __init__(self, run: RunConfig, output: Path, parameters: Mapping[str, Any]) -> None:
        mlflow = _load("mlflow", "mlflow")
        self._metric, parameter = mlflow.entities.Metric, mlflow.entities.Param
        output.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(output / 'mlflow.db').absolute()}"
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        earlier = self._client.search_runs(
            [experiment], f"attributes.run_name = '{run.run_name}'", max_results=1
        )
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(experiment, run_name=run.run_name).info.run_id
        shown = [parameter(key, str(value)[:5000]) for key, value in parameters.items()]
        for start in range(0, len(shown), 100):
            self._client.log_batch(self._id, params=shown[start : start + 100])

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        now = int(time.time() * 1000)
        values = [self._metric(key, value, now, step) for key, value in metrics.items()]
        for start in range(0, len(values), 1000):
            self._client.log_batch(self._id, metrics=values[start : start + 1000])

    def close(self) -> None:
        self._client.set_terminated(self._id)


@tracker("trackio")
class _Trackio:
    """Writes SQLite files to TRACKIO_DIR, by default a folder of ``output``; TRACKIO_SPACE_ID sends them."""

    def __init__(self, run: RunConfig, output: Path, parameters: Mapping[str, Any]) -> None:
        folder = output / "trackio"
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TRACKIO_DIR", str(folder.absolute()))
        self._run = _load("trackio", "trackio").init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=run.run_name,
            config=dict(parameters),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


@tracker("comet")
class _Comet:
    """Offline, as an archive for ``comet upload``, without COMET_API_KEY."""

    def __init__(self, run: RunConfig, output: Path, parameters: Mapping[str, Any]) -> None:
        os.environ.setdefault("COMET_ERROR_TRACKING_ENABLE", "false")
        comet = _load("comet_ml", "comet_ml")
        folder = output / "comet"
        folder.mkdir(parents=True, exist_ok=True)
        online = bool(os.environ.get("COMET_API_KEY"))
        self._experiment = (comet.Experiment if online else comet.OfflineExperiment)(
            project_name=os.environ.get("COMET_PROJECT_NAME", PROJECT),
            log_code=False,
            log_graph=False,
            auto_param_logging=False,
            auto_metric_logging=False,
            auto_output_logging=False,
            parse_args=False,
            log_env_details=False,
            log_git_metadata=False,
            log_git_patch=False,
            display_summary_level=0,
            **({} if online else {"offline_directory": str(folder)}),
        )
        self._experiment.set_name(run.run_name)
        self._experiment.log_parameters(dict(parameters))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._experiment.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._experiment.end()


@tracker("clearml")
class _Clearml:
    """Offline, as an archive for ``Task.import_offline_session``, without CLEARML_API_ACCESS_KEY."""

    def __init__(self, run: RunConfig, output: Path, parameters: Mapping[str, Any]) -> None:
        folder = output / "clearml"
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("CLEARML_CACHE_DIR", str(folder.absolute()))
        task = _load("clearml", "clearml").Task
        if not os.environ.get("CLEARML_API_ACCESS_KEY"):
            task.set_offline(True)
        self._task = task.init(
            project_name=os.environ.get("CLEARML_PROJECT", PROJECT),
            task_name=run.run_name,
            auto_connect_arg_parser=False,
            auto_connect_frameworks=dict.fromkeys(_CLEARML_RECORDS, False),
            auto_connect_streams=False,
            auto_resource_monitoring=False,
        )
        self._task.connect(dict(parameters))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        report = self._task.get_logger().report_scalar
        for key, value in metrics.items():
            report(title=key, series=key, value=value, iteration=step)

    def close(self) -> None:
        self._task.close()


def _load(module: str, library: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--report_to {library} needs the library {library}, which is not installed ({error})",
            hint=f"pip install {library}",
        ) from error
