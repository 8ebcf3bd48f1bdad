"""Real trackers without a network: what they write is read back, and no secret is in it.

All trackers run in one process of their own, as in a trainer: several of them change the process. A library
that is not installed skips (pip install -r requirements/trackers.txt).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

SECRET = "correcthorsebattery"
LIBRARIES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "swanlab": "swanlab",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "comet": "comet_ml",
    "clearml": "clearml",
}
WRITE = """
import sys
from pathlib import Path
from agentrl.config.schema import RunConfig
from agentrl.observe.trackers import open_trackers
names, output, secret = sys.argv[1:4]
parameters = {"learning_rate": 1e-5, "uri": f"mongodb://me:{secret}@db/", "api_key": secret}
tracker = open_trackers(names, RunConfig(run_name="demo"), output, parameters)
tracker.log(1, {"reward": 0.25, "staleness_histogram": {"0": 3}})
tracker.log(2, {"reward": 0.5, "loss": float("nan")})
tracker.close()
"""


def read_tensorboard(output: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output / "tensorboard" / "demo"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def read_mlflow(output: Path) -> dict[str, list[tuple[int, float]]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{output / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("agentrl")
    run = client.search_runs([experiment.experiment_id])[0]
    assert (run.info.run_name, run.info.status) == ("demo", "FINISHED")
    assert run.data.params == {"learning_rate": "1e-05", "uri": "mongodb://***@db/", "api_key": "***"}
    return {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


def read_trackio(output: Path) -> dict[str, list[tuple[int, float]]]:
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage;"
        " print(json.dumps(SQLiteStorage.get_logs('agentrl', 'demo'), default=str))"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(output / "trackio")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    found: dict[str, list[tuple[int, float]]] = {}
    for row in json.loads(done.stdout.splitlines()[-1]):
        for name in row.keys() & {"reward", "staleness_histogram/0"}:
            found.setdefault(name, []).append((row["step"], row[name]))
    return found


def read_clearml(output: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for file in output.glob("clearml/offline/*/metrics.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            for event in json.loads(line):
                found.setdefault(event["metric"], []).append((event["iter"], event["value"]))
    return found


READERS: dict[str, Callable[[Path], dict[str, list[tuple[int, float]]]]] = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
    "clearml": read_clearml,
}
FILES = {
    "tensorboard": "tensorboard/demo/events.*",
    "mlflow": "mlflow.db",
    "trackio": "trackio/agentrl.db",
    "wandb": "wandb/offline-run-*/run-demo.wandb",
    "swanlab": "swanlab/run-*/*.swanlab",
    "comet": "comet/*.zip",
    "clearml": "clearml/offline/*.zip",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder that all installed trackers wrote into at once, and what the process printed."""
    output = tmp_path_factory.mktemp("trackers")
    names = [name for name, library in LIBRARIES.items() if importlib.util.find_spec(library)]
    if not names:
        pytest.skip("no tracker is installed: pip install -r requirements/trackers.txt")
    command = [sys.executable, "-c", WRITE, ",".join(names), str(output), SECRET]
    environment: dict[str, Any] = {
        name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "MLFLOW_"))
    }
    environment |= {"JUDGE_API_KEY": SECRET, "HOME": str(output / "home")}
    done = subprocess.run(
        command, cwd=output, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return output, done.stdout + done.stderr


@pytest.mark.filterwarnings("ignore")  # of the libraries that read
@pytest.mark.parametrize("name", LIBRARIES)
def test_what_a_tracker_writes_offline_is_read_back(name: str, written: tuple[Path, str]) -> None:
    pytest.importorskip(LIBRARIES[name], reason=f"not installed: {LIBRARIES[name]}")
    output, printed = written
    assert f"--report_to {name}" not in printed
    assert list(output.glob(FILES[name]))
    if name in READERS:
        found = READERS[name](output)
        assert found["reward"] == [(1, 0.25), (2, 0.5)]
        assert found["staleness_histogram/0"] == [(1, 3.0)]
        assert "loss" not in found


def test_no_secret_is_in_any_file(written: tuple[Path, str]) -> None:
    output, printed = written
    assert SECRET not in printed
    for file in output.rglob("*"):
        if file.is_file():
            assert SECRET.encode() not in file.read_bytes(), file
        if file.suffix == ".zip":
            with zipfile.ZipFile(file) as archive:
                for member in archive.namelist():
                    assert SECRET.encode() not in archive.read(member), (file, member)
