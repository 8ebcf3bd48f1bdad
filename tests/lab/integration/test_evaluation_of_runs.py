"""``agentrl eval`` beside a trainer, on an environment, and when its own engine dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import number_game
import psutil
import pytest
from db_command import violations
from loaded_tasks import load_tasks
from test_sampling import Setting, quick
from tiny_policy import write_tiny_policy

from agentrl.config.schema import RunConfig, TaskConfig, ToolConfig
from agentrl.documents.status import EvaluationStatus, StepStatus
from agentrl.store.client import Store
from agentrl.tools.pool import ToolPool

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.usefixtures("quick")]

__all__ = ["quick"]

ADDRESS = "env:number_game:NumberGame?n=4&seed=3"
SHORT = ("--max_new_tokens", "4", "--prompt_reserve_tokens", "64", "--max_total_tokens", "8192")


class Commands:
    """Starts ``agentrl`` commands on the run; their output goes to files."""

    def __init__(self, run: RunConfig, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._started: list[subprocess.Popen[bytes]] = []
        self.model = write_tiny_policy(folder / "model")

    def start(self, name: str, *more: str) -> subprocess.Popen[bytes]:
        """Start a command."""
        words = [
            sys.executable, "-m", "agentrl", name, "--run_name", self._run.run_name,
            "--log_dir", self._run.log_dir, "--output_dir", str(self._run.output_dir),
            "--db_connection_string", str(self._run.db_connection_string),
            "--model_name_or_path", str(self.model), *more,
        ]  # fmt: skip
        path = os.pathsep.join([str(Path(number_game.__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
        with (self._folder / f"{name}.out").open("wb") as out:
            process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment)
        self._started.append(process)
        return process

    def said(self, name: str) -> str:
        """Return the output of a command."""
        return (self._folder / f"{name}.out").read_text(errors="replace")

    async def end(self, name: str, process: subprocess.Popen[bytes], code: int = 0) -> None:
        """Wait for the end of a command, with this exit code."""
        found = await asyncio.to_thread(process.wait, 200)
        assert found == code, self.said(name)[-3000:]

    def kill(self) -> None:
        """Kill what still runs."""
        for process in self._started:
            process.kill()
            process.wait(30)


@pytest.fixture
def commands(run_config: RunConfig, tmp_path: Path) -> Any:
    found = Commands(run_config, tmp_path)
    yield found
    found.kill()


async def test_versions_are_evaluated_on_an_environment_beside_their_trainer(
    store: Store, run_config: RunConfig, commands: Commands
) -> None:
    await load_tasks(store, run_config, TaskConfig(), ADDRESS, split="train", num_generations=2)
    async with ToolPool(ToolConfig()) as tools:
        guesses = iter(range(10_000))
        setting = Setting(store, lambda prompt: str(next(guesses) % 9 + 1), tools=tools)
        setting.engine.version = 0
        await setting.run()
    made = await store.database["DBRecordData"].distinct("_id")
    assert len(made) >= 4
    trainer = commands.start(
        "train", "--groups_per_step", "1", "--num_generations", "2", "--max_steps", "2",
        "--publish_steps", "1", "--max_staleness", "9", "--data_wait_seconds", "60",
        "--published_versions_kept", "2",
    )  # fmt: skip
    evaluation = commands.start(
        "eval", "--eval_file", ADDRESS.replace("seed=3", "seed=4"), "--eval_steps", "2",
        "--max_turns", "2", *SHORT,
    )  # fmt: skip
    await commands.end("train", trainer)
    async with asyncio.timeout(200):
        while await store.database["Evaluation"].count_documents({"status": "finished"}) < 2:
            assert evaluation.poll() is None, commands.said("eval")
            await asyncio.sleep(0.2)
    evaluation.send_signal(signal.SIGINT)
    await commands.end("eval", evaluation, 130)
    assert len(await store.steps.find(status=StepStatus.COMMITTED)) == 2
    found = await store.evaluations.all()
    assert [(item.step, item.status) for item in found] == [
        (0, EvaluationStatus.FINISHED), (2, EvaluationStatus.FINISHED),
    ]  # fmt: skip
    for item in found:
        total = (item.results or {})["total"]
        assert (total["tasks"], total["scored"], total["failed"]) == (4, 4, 0)
    versions = await store.database["DispatchedSamplingTask"].distinct("versions.version")
    assert versions == [item.version for item in found]
    assert await store.database["DBRecordData"].distinct("_id") == made
    assert await violations(store) == []


async def test_an_own_engine_that_dies_ends_the_evaluation_which_the_same_command_finishes(
    store: Store, commands: Commands, tmp_path: Path
) -> None:
    tasks = [{"id": f"t{number}", "query": "1+1?", "answer": "2", "scorer": "exact"} for number in range(4)]
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    long = (
        "--eval_file", str(file), "--eval_model", str(commands.model), "--agent_name", "single_turn",
        "--max_new_tokens", "400", "--max_total_tokens", "8192", "--tools", "",
    )  # fmt: skip
    process = commands.start("eval", *long)
    async with asyncio.timeout(120):
        while not await store.database["Task"].count_documents({"slots.status": "running"}):
            assert process.poll() is None, commands.said("eval")
            await asyncio.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    (engine,) = [child for child in children if "agentrl.local.engine" in child.cmdline()][-1:]
    engine.kill()
    await commands.end("eval", process, 1)
    assert "the engine of the evaluation ended with exit code" in commands.said("eval")
    assert "the same command goes on where this one stopped" in commands.said("eval")
    (stopped,) = await store.evaluations.all()
    assert (stopped.status, stopped.results) == (EvaluationStatus.STOPPED, None)
    assert (await store.evaluations.counts(stopped.id)).running == 0
    await commands.end("eval", commands.start("eval", *long))
    (finished,) = await store.evaluations.all()
    assert (finished.id, finished.status) == (stopped.id, EvaluationStatus.FINISHED)
    total = (finished.results or {})["total"]
    assert (total["scored"], total["failed"]) == (4, 0)
    assert await violations(store) == []
