"""Processes that contradict what a run was begun with end before they claim, load or train."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_policy import write_tiny_policy

from agentrl.config.schema import RunConfig
from agentrl.store.client import Store

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("starts_warm")]


def start(run: RunConfig, command: str, *words: str) -> subprocess.Popen[str]:
    where = ("--run_name", run.run_name, "--db_connection_string", str(run.db_connection_string))
    folders = ("--log_dir", run.log_dir, "--output_dir", str(run.output_dir))
    return subprocess.Popen(
        [sys.executable, "-m", "agentrl", command, *where, *folders, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


async def test_processes_that_contradict_the_run_are_refused(
    store: Store, run_config: RunConfig, tmp_path: Path
) -> None:
    model = write_tiny_policy(tmp_path / "model")
    other = Path(shutil.copytree(model, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 64}))
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": 1, "query": "?", "answer": "1", "scorer": "exact"}\n')
    await store.settings.begin("tasks", {"num_generations": 4}, "sample")
    await store.settings.begin("loss", {"loss_calculater": "GRPO"}, "train")
    vocabulary = {"vocab_size": config["vocab_size"]}
    await store.settings.begin("model", vocabulary, "train")
    named = ("--model_name_or_path", str(model))
    processes = {
        "--num_generations is 2, and the run has 4": start(
            run_config, "sample", *named, "--train_file", str(tasks), "--num_generations", "2"
        ),
        "--loss_calculater is 'GSPO', and the run has 'GRPO'": start(
            run_config, "train", *named, "--loss_calculater", "GSPO"
        ),
        f"the model's vocab_size is {config['vocab_size'] + 64}, and the run has": start(
            run_config, "serve", "--model_name_or_path", str(other)
        ),
    }
    for message, process in processes.items():
        with process:
            out, _ = process.communicate(timeout=100)
        assert process.returncode == 2, out
        assert message in out
        assert "another --run_name" in out
        assert "Traceback" not in out
    assert await store.tasks.splits() == []
    assert await store.services.live(600) == []
    assert (await store.trainer_lease.read()).attempt == 0
