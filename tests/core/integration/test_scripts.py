"""The run scripts as a person starts them: help, refusals, and the end of everything that they started."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from loaded_tasks import load_tasks
from tiny_policy import write_tiny_policy

from agentrl.config.schema import RunConfig, TaskConfig
from agentrl.documents.status import RecordStatus
from agentrl.store.client import Store

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("*.sh"))
SMALL = (
    "--max_prompt_tokens", "512", "--prompt_reserve_tokens", "32", "--max_new_tokens", "256",
    "--max_tokens", "2048", "--max_turns", "1", "--db_timeout_seconds", "20",
)  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with the real scripts, in which nothing is installed."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    (root / "scripts/setup.sh").write_text(". scripts/lib/common.sh\ntouch set-up\n", encoding="utf-8")
    (root / "assets").symlink_to(ROOT / "assets")
    return root


class Script:
    """A script in a session of its own."""

    def __init__(self, root: Path, venv: Path, name: str, *arguments: str, **variables: str) -> None:
        self.log = root.parent / "terminal.txt"
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                ["bash", f"scripts/{name}", *arguments],
                cwd=root, env={**os.environ, "AGENTRL_VENV": str(venv), "HF_HUB_OFFLINE": "1", **variables},
                stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it has not ended after {seconds} s:\n{self.output[-4000:]}")

    async def until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"it ended early:\n{self.output[-4000:]}"
            assert time.monotonic() < deadline, f"not in {seconds} s:\n{self.output[-4000:]}"
            await asyncio.sleep(0.1)


@pytest.fixture
def start(root: Path, warm_python: Path) -> Iterator[Callable[..., Script]]:
    started: list[Script] = []

    def start(name: str, *arguments: str, **variables: str) -> Script:
        started.append(Script(root, warm_python.parents[1], name, *arguments, **variables))
        return started[-1]

    yield start
    for script in started:
        script.process.kill()
        script.process.wait(10)
    for process in processes_in(root):
        process.kill()


def processes_in(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd().startswith(str(folder)) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def write_tasks(path: Path, **fields: object) -> str:
    lines = [
        json.dumps(
            {"id": f"t{number}", "query": "Say hello.", "answer": "hello", "scorer": "exact", **fields}
        )
        for number in range(64)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("arguments", [("--help",), ("run", "-h")])
def test_help_only_helps(root: Path, name: str, arguments: tuple[str, ...]) -> None:
    shutil.copy(ROOT / "scripts" / name, root / "scripts" / name)
    before = sorted(root.rglob("*"))
    done = subprocess.run(
        ["bash", f"scripts/{name}", *arguments], cwd=root, capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip
    assert f"bash scripts/{name}" in done.stdout
    assert sorted(root.rglob("*")) == before


def test_tasks_that_name_an_unknown_tool_server_are_refused_before_anything_starts(
    root: Path, tmp_path: Path, start: Callable[..., Script], run_config: RunConfig
) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", tools=["search"])
    script = start("grpo.sh", run_config.run_name, MODEL_PATH=str(tmp_path), TRAIN_FILE=tasks)
    assert script.wait(60) == 2
    assert "name the tools search, and none of --tools or of the tool servers is called so" in script.output
    assert "MCP_SERVERS_FILE" in script.output
    assert not (root / "logs").exists()
    assert not (root / ".agentrl").exists()


def test_a_script_works_in_the_folder_in_which_it_is_started(
    root: Path, tmp_path: Path, mongo_uri: str, warm_python: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    write_tasks(own / "tasks.jsonl", scorer="my_scorer:broken")
    write_tiny_policy(own / "model")
    (own / "my_scorer.py").write_text("raise OSError('read here')", encoding="utf-8")
    (root / "scripts/setup.sh").write_text("", encoding="utf-8")
    variables = {
        "AGENTRL_VENV": str(warm_python.parents[1]), "MONGO_URI": mongo_uri,
        "MODEL_PATH": "model", "TRAIN_FILE": "tasks.jsonl",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(root / "scripts/grpo.sh"), "own_run", *SMALL, "--tools", "my_scorer:broken"],
        cwd=own, env={**os.environ, **variables}, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "'my_scorer:broken' cannot be imported: OSError: read here" in done.stderr


def test_a_sampler_that_cannot_run_ends_the_script_with_its_reason(
    root: Path, tmp_path: Path, start: Callable[..., Script], run_config: RunConfig
) -> None:
    (tmp_path / "servers.yml").write_text("servers: {search: {command: /nowhere/search}}", encoding="utf-8")
    script = start(
        "minirl.sh", run_config.run_name, *SMALL, MODEL_PATH=str(write_tiny_policy(tmp_path / "model")),
        TRAIN_FILE=write_tasks(tmp_path / "tasks.jsonl"), MCP_SERVERS_FILE=str(tmp_path / "servers.yml"),
        MONGO_URI=str(run_config.db_connection_string), ROLES="serve sample", SAMPLERS="1",
    )  # fmt: skip
    assert script.wait(90) == 2
    assert "sampler-0 cannot run" in script.output
    assert "/nowhere/search" in script.output
    assert processes_in(root) == []


@pytest.mark.parametrize("name", ["grpo.sh", "quickstart.sh", "chaos.sh", "test.sh"])
async def test_a_signal_during_setup_ends_the_installation_too(
    root: Path, start: Callable[..., Script], name: str
) -> None:
    (root / "scripts/setup.sh").write_text("touch begun\nsleep 600\n", encoding="utf-8")
    script = start(name, "run")
    await script.until((root / "begun").exists, 60)
    script.process.terminate()
    assert await asyncio.to_thread(script.wait, 30) == 143
    assert processes_in(root) == []


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("number", "roles"), [(signal.SIGTERM, "serve sample train"), (signal.SIGINT, "serve sample")]
)
async def test_a_signal_ends_everything_and_interrupted_trajectories_are_released(
    number: signal.Signals, roles: str, root: Path, tmp_path: Path, start: Callable[..., Script],
    store: Store, run_config: RunConfig,
) -> None:  # fmt: skip
    accelerate = tmp_path / "accelerate.yml"
    accelerate.write_text(
        "{compute_environment: LOCAL_MACHINE, distributed_type: 'NO', use_cpu: true, num_processes: 1}",
        encoding="utf-8",
    )
    tasks = write_tasks(tmp_path / "tasks.jsonl")
    # A trainer that starts warm asks for their number before a sampler has loaded them.
    await load_tasks(store, run_config, TaskConfig(), tasks, split="train", num_generations=8)
    script = start(
        "grpo.sh", store.run_name, *SMALL, MODEL_PATH=str(write_tiny_policy(tmp_path / "model")),
        TRAIN_FILE=tasks, MONGO_URI=str(run_config.db_connection_string), SAMPLERS="1", ROLES=roles,
        **({"ACCELERATE_CONFIG": str(accelerate)} if "train" in roles else {}),
    )  # fmt: skip

    def trains() -> bool:
        return "train" not in roles or "training from step" in script.output

    async def generates() -> bool:
        return await store.database["Record"].count_documents({"status": RecordStatus.RUNNING.value}) > 0

    await script.until(trains, 120)
    deadline = time.monotonic() + 120
    while not await generates():
        assert time.monotonic() < deadline, script.output[-4000:]
        await asyncio.sleep(0.1)
    script.process.send_signal(number)
    assert await asyncio.to_thread(script.wait, 45) == 128 + number
    assert processes_in(root) == []
    records = await store.database["Record"].find().to_list()
    assert {record["status"] for record in records} <= {"released", "scored", "ready", "abandoned"}
