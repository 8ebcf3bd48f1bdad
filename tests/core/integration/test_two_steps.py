"""The core alone: tasks, a sampler and a trainer as processes, and an engine that answers by a script.

``scripts/core_alone.sh`` runs it, with the unit tests of the core, in a copy that has no wing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_engine import Call, ScriptedEngine
from tiny_policy import tiny_tokenizer, write_tiny_policy
from waiting import until

from agentrl.base.concurrency import background
from agentrl.config.schema import RunConfig
from agentrl.documents.status import ServiceStatus, StepStatus
from agentrl.store.client import Store

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

STEPS, GROUPS, GENERATIONS = 2, 2, 2
SAMPLING = (
    "--num_generations", str(GENERATIONS), "--max_turns", "1", "--max_prompt_tokens", "128",
    "--max_new_tokens", "32", "--prompt_reserve_tokens", "32", "--max_tokens", "1024",
    "--max_total_tokens", "8192", "--max_staleness", "9",
)  # fmt: skip
TRAINING = ("--max_steps", str(STEPS), "--groups_per_step", str(GROUPS))


class Answering(ScriptedEngine):
    """Answers ``a`` to one half of the requests and ``b`` to the other; loads each version at once."""

    def __init__(self) -> None:
        super().__init__(self.answer)
        tokenizer = tiny_tokenizer()
        self.vocab_size = len(tokenizer)
        self._answers = itertools.cycle(
            [tokenizer.encode(f"<answer>{text}</answer><|im_end|>") for text in "ab"]
        )
        self.version = 0

    async def answer(self, call: Call) -> None:
        ids = next(self._answers)
        logprobs = [[-math.log(self.vocab_size), token, None] for token in ids]
        await call.head()
        await call.tokens(ids, len(ids), "stop", version=str(self.version), output_token_logprobs=logprobs)
        await call.done()

    async def follow(self, store: Store) -> None:
        """Send heartbeats of an engine that serves the newest version."""
        await store.services.register(self.service("scripted"))
        while True:
            self.version = await store.policy_versions.newest_id() or 0
            await store.services.beat(
                "scripted", status=ServiceStatus.READY, policy_version=self.version, running_requests=0,
                context_length=4096,
            )  # fmt: skip
            await asyncio.sleep(0.2)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that a test has started; those that still run are killed at its end."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait(10)


async def test_a_run_of_two_steps(
    store: Store, run_config: RunConfig, processes: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    lines = [{"id": f"t{number}", "query": "Say a.", "answer": "a", "scorer": "exact"} for number in range(8)]
    tasks.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    common = [
        "--run_name", run_config.run_name, "--db_connection_string", str(run_config.db_connection_string),
        "--log_dir", run_config.log_dir, "--output_dir", str(run_config.output_dir),
        "--model_name_or_path", str(write_tiny_policy(tmp_path / "model")),
    ]  # fmt: skip

    def start(command: str, *flags: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{command}.txt").open("wb") as log:
            words = [sys.executable, "-m", "agentrl", command, *common, *flags]
            processes.append(subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT))
        return processes[-1]

    async with Answering().serving() as engine, background(engine.follow(store)):
        sampler = start("sample", "--train_file", str(tasks), "--target_concurrency", "auto", *SAMPLING)
        trainer = start("train", *SAMPLING, *TRAINING)
        await until(lambda: trainer.poll() is not None or sampler.poll() not in (None, 0), 200)
    logs = (tmp_path / "sample.txt", tmp_path / "train.txt")
    said = {log.stem: log.read_text(errors="replace") for log in logs}
    assert trainer.poll() == 0, said
    committed = await store.steps.find(status=StepStatus.COMMITTED)
    assert [step.step for step in committed] == [1, 2], said
    assert await store.policy_versions.newest_id() == STEPS
    assert f"{engine.url} reports no metrics" in said["sample"]
