"""A sampler on a machine without torch: it samples and scores, and finds its database by MONGO_URI_FILE."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_policy import write_tiny_policy
from waiting import until

from agentrl.config.schema import RunConfig
from agentrl.store.client import Store

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.usefixtures("starts_warm")]

PYTHON = sys.executable
"""The real one, before a test starts warm: it reads the sitecustomize.py."""

HIDDEN = """
import importlib.machinery

find = importlib.machinery.PathFinder.find_spec


def without(name, path=None, target=None):
    hidden = {"torch", "accelerate", "transformers", "safetensors", "gguf", "fastapi", "matplotlib"}
    return None if name.partition(".")[0] in {*hidden, "fiftyone"} else find(name, path, target)


importlib.machinery.PathFinder.find_spec = staticmethod(without)
"""
"""A sitecustomize.py that hides what only extras install."""

SMALL = (
    "--num_generations", "2", "--max_turns", "1", "--max_prompt_tokens", "128",
    "--prompt_reserve_tokens", "32",
    "--max_new_tokens", "8", "--max_tokens", "1024", "--max_total_tokens", "8192", "--max_staleness", "9",
)  # fmt: skip


@pytest.fixture
def start(run_config: RunConfig, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a command of the run, whose output goes to COMMAND.txt; kills it at the end."""
    uri = tmp_path / "uri"
    uri.write_text(f"{run_config.db_connection_string}\n", encoding="utf-8")
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/sitecustomize.py").write_text(HIDDEN, encoding="utf-8")
    common = [
        "--run_name", run_config.run_name, "--log_dir", run_config.log_dir, "--model_name_or_path",
        str(write_tiny_policy(tmp_path / "model")), *SMALL,
    ]  # fmt: skip
    started = []

    def run(command: str, *own: str, hidden: bool) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "MONGO_URI_FILE": str(uri),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if hidden:
            environment["PYTHONPATH"] = str(tmp_path / "hidden")
        python = PYTHON if hidden else sys.executable
        with (tmp_path / f"{command}.txt").open("wb") as sink:
            words = [python, "-m", "agentrl", command, *common, *own]
            started.append(subprocess.Popen(words, env=environment, stdout=sink, stderr=subprocess.STDOUT))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait(10)


async def test_it_samples_and_scores(
    store: Store, start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    lines = [{"id": f"t{number}", "query": "Say a.", "answer": "a", "scorer": "exact"} for number in range(4)]
    tasks.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    start("serve", "--engine", "local", hidden=False)

    async def serves() -> bool:
        return bool(await store.services.live(60.0))

    await until(serves, 120)  # a sampler that finds no engine looks again ever more seldom
    sampler = start("sample", "--train_file", str(tasks), hidden=True)
    deadline = time.monotonic() + 200
    while not await store.database["Record"].count_documents({"score": {"$ne": None}}):
        said = (tmp_path / "sample.txt").read_text(errors="replace")[-3000:]
        assert sampler.poll() in (None, 0), said
        assert time.monotonic() < deadline, said
        await asyncio.sleep(0.2)
