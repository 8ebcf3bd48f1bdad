"""Harnesses in the container that a Harbor task brings: the gateway, files, the tests' score, time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from harness_run import CALL, HarnessRun, write_harness
from rootfs_here import rootfs_problem, rootfs_with_python

from agentrl.config.sampling import ContainerConfig
from agentrl.config.schema import ToolConfig
from agentrl.documents.record import Record
from agentrl.documents.status import RecordStatus, StopReason
from agentrl.environments.environment import use_containers
from agentrl.errors import ConfigError
from agentrl.rollout.load_tasks import read_task_source
from agentrl.store.client import Store
from agentrl.tools.pool import ToolPool
from agentrl.worlds.harness.prepare import prepare

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(120),
    pytest.mark.skipif(rootfs_problem() is not None, reason=f"no containers: {rootfs_problem()}"),
]

TASK = Path(__file__).parents[3] / "assets/examples/harbor/tasks/write-file"


@pytest.fixture(autouse=True)
def containers() -> Iterator[None]:
    """Let this process use a root file system with Python for every image."""
    use_containers(ContainerConfig(rootfs=str(rootfs_with_python())))
    yield
    use_containers(ContainerConfig())


async def run(store: Store, task: Path, harness: Path) -> Record:
    """Run the trajectory of a Harbor task by a harness."""
    rollout = HarnessRun(store, harness)
    async with ToolPool(ToolConfig()) as tools:
        rollout.worker = replace(rollout.worker, tools=tools)
        records = await rollout.run_all(list(read_task_source(task, num_generations=1).tasks))
    return records["write-file"]


async def test_a_harness_calls_the_model_and_the_tests_of_the_task_score_its_work(
    store: Store, tmp_path: Path
) -> None:
    command = f"{CALL}\ncat note ~/.rc $AGENTRL_QUESTION_FILE; pwd; printf hello > greeting.txt"
    files = {"note": "a note\n", "~/.rc": "${AGENTRL_MODEL}\n"}
    harness = write_harness(tmp_path, command, isolation="task", files=files)
    record = await run(store, TASK, harness)
    assert record.status is RecordStatus.SCORED, record.failure
    assert (record.score, record.stop_reason, record.turns) == (1.0, StopReason.ANSWERED, 1)
    kept = record.harness
    assert kept is not None
    assert kept.run is not None
    assert kept.run.stdout.startswith("the answer\na note\npolicy\nWrite the word")
    assert kept.run.stdout.endswith("/app\n")
    assert kept.scoring is not None
    assert {"greeting.txt", "note"} <= set(kept.changed_files)
    assert "+hello" in kept.diff


async def test_at_the_task_s_limit_of_time_the_work_is_scored(store: Store, tmp_path: Path) -> None:
    task = tmp_path / "write-file"
    shutil.copytree(TASK, task)
    described = (task / "task.toml").read_text().replace("timeout_sec = 300.0", "timeout_sec = 3.0")
    (task / "task.toml").write_text(described)
    command = f"{CALL}\nprintf hello > /app/greeting.txt; sleep 60"
    record = await run(store, task, write_harness(tmp_path, command, isolation="task"))
    assert (record.score, record.stop_reason) == (1.0, StopReason.TIME_LIMIT), record.failure
    assert record.harness is not None
    assert record.harness.changed_files == ("greeting.txt",)


async def test_a_harness_outside_of_the_container_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"brings a container, and .* has isolation: auto"):
        await run(store, TASK, write_harness(tmp_path, "true"))


@pytest.mark.parametrize(
    ("key", "value"),
    [("score", "reward"), ("answer", {"file": "a"}), ("image", "python"), ("workspace", {"template": "."})],
)
def test_keys_that_have_no_meaning_in_the_task_s_container_are_named(
    tmp_path: Path, key: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=f"{key}"):
        prepare(write_harness(tmp_path, "true", isolation="task", **{key: value}))
