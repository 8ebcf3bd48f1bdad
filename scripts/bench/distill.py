"""Distil a warmed-up teacher into a tiny student, beside GRPO on the same tasks; and kill the teacher.

    python scripts/bench/distill.py [--seeds 3] [--steps 60] [--json FILE]
    python scripts/bench/distill.py --kills 10 [--steps 12]
    python scripts/bench/distill.py --quick          two steps of each loss on one seed

The task is to repeat a number. A seed makes a model of two layers; fine-tuning teaches the student to answer
a number, which is right in one of two, and from there the teacher to answer the right one. The student then
learns by GRPO from the score, and by OPD from the teacher alone, with the same flags otherwise. A
reward is that of a step's sampled trajectories. Exits with 1 unless OPD has the reward 0.9 within half of
GRPO's steps on every seed.

With ``--kills`` the student is distilled twice with synchronous sampling: undisturbed, and while the process
of the teacher is killed by SIGKILL that often, spread over the steps. Exits with 1 unless steps, data,
losses, rewards and published weights are equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import demo_path  # noqa: F401
from demo.tiny import build_tiny_model
from harness import add_quick
from learning import agentrl, environment

from agentrl.config.schema import RunConfig
from agentrl.processes import signal_session, start_child, stop_children, tail
from agentrl.store.client import Store, open_store
from agentrl.store.embedded.server import EmbeddedMongo

LEVEL = 0.9
NUMBERS = range(10)
SCORED = {"scorer": "exact", "answer_schema": "answer"}
BATCH_SIZE = 16
TOP = 16
"""Likeliest ids of the teacher that are stored for each token."""
STUDENT_STEPS, TEACHER_STEPS = 150, 600
STEP_SECONDS = 300.0
POLL_SECONDS = 0.1

Steps = list[tuple[int, float]]
"""(step, reward) of a run."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a seed's models, logs and runs lie."""

    work: Path
    seed: int
    uri: str
    steps: int

    def flags(self, run: str, loss: str, *, is_synchronous: bool = False) -> list[str]:
        """Return the flags of every process of a run."""
        distils = ["--columns", "teacher", "--drop_zero_advantage", "false", "--min_score_spread", "0"]
        size = ("4", "4") if is_synchronous else ("8", "8")
        alone = ["--sync_sampling", "true", "--max_concurrent_samples_per_process", "1"]
        return [
            "--run_name", run, "--db_connection_string", self.uri, "--seed", str(self.seed),
            "--output_dir", str(self.work / run), "--log_dir", str(self.work / "logs"),
            "--model_name_or_path", str(self.folder("student")),
            "--train_file", str(self.work / "tasks.jsonl"),
            "--agent_name", "single_turn", "--max_new_tokens", "8", "--max_prompt_tokens", "64",
            "--max_tokens", "4096", "--num_train_epochs", "50", "--num_generations", size[0],
            "--groups_per_step", size[1], "--max_steps", str(self.steps), "--save_steps", "1000",
            "--learning_rate", "2e-3", "--max_staleness", "1", "--loss_calculater", loss,
            "--heartbeat_seconds", "0.5", "--lease_seconds", "3",
            *(distils if loss == "OPD" else ()), *(alone if is_synchronous else ()),
        ]  # fmt: skip

    def folder(self, role: str) -> Path:
        """Return the folder of the student's or the teacher's model."""
        return self.work / f"{role}-{self.seed}"


def main() -> int:
    """Compare the steps to a reward, or the runs with and without kills."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_quick(parser)
    parser.add_argument("--seeds", type=int, default=3, help="number of models (default: 3)")
    parser.add_argument("--first_seed", type=int, default=0, help="seed of the first model (default: 0)")
    parser.add_argument(
        "--steps", type=int, help="most optimizer steps of a run (default: 60; 12 with kills)"
    )
    parser.add_argument(
        "--kills", type=int, default=0, help="SIGKILLs of the teacher (default: compare losses)"
    )
    parser.add_argument("--json", type=Path, help="write the rewards to this file")
    parser.add_argument("--work", type=Path, help="keep models, logs and database here")
    given = parser.parse_args()
    steps = given.steps or (2 if given.quick else 12 if given.kills else 60)
    seeds = range(given.first_seed, given.first_seed + (1 if given.quick or given.kills else given.seeds))
    with tempfile.TemporaryDirectory(prefix="agentrl-distill-") as scratch:
        work = given.work or Path(scratch)
        mongo = EmbeddedMongo(work / "mongo")
        uri = mongo.up().uri
        try:
            settings = [Setting(work=work, seed=seed, uri=uri, steps=steps) for seed in seeds]
            for setting in settings:
                prepare(setting, is_quick=given.quick)
            if given.kills:
                return compare_kills(settings[0], given.kills)
            rewards = {setting.seed: compare_losses(setting) for setting in settings}
        finally:
            mongo.down()
    if given.json is not None:
        given.json.write_text(json.dumps(rewards, indent=1), encoding="utf-8")
    return 0 if given.quick or all(is_half(losses) for losses in rewards.values()) else 1


def prepare(setting: Setting, *, is_quick: bool) -> None:
    """Write the tasks, and make the two models of a seed."""
    work = setting.work
    lines = [json.dumps({"id": f"t{n}", "query": f"repeat {n}", "answer": str(n), **SCORED}) for n in NUMBERS]
    (work / "tasks.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    made = work / f"random-{setting.seed}"
    if made.exists():
        shutil.rmtree(made)
    corpus = [f"system\nuser\nrepeat {n}\nassistant\n<answer>{n}</answer>" for n in NUMBERS]
    build_tiny_model(made, setting.seed, corpus=corpus)
    for role, base, steps in (
        ("student", made, STUDENT_STEPS), ("teacher", setting.folder("student"), TEACHER_STEPS)
    ):  # fmt: skip
        if (setting.folder(role) / "config.json").is_file():
            continue  # of an earlier call with this --work
        choice = random.Random(f"{setting.seed}/{role}")
        file = work / f"{role}-{setting.seed}.jsonl"
        total = (2 if is_quick else steps) * BATCH_SIZE
        file.write_text("".join(f"{json.dumps(lesson(role, choice))}\n" for _ in range(total)), "utf-8")
        agentrl("sft", [
            "--run_name", "warm-up", "--seed", str(setting.seed), "--max_steps", str(total // BATCH_SIZE),
            "--batch_size", str(BATCH_SIZE), "--max_tokens", "2048", "--learning_rate", "2e-3",
            "--model_name_or_path", str(base), "--train_file", str(file),
            "--output_dir", str(setting.folder(role)), "--log_dir", str(work / "logs"),
        ], work)  # fmt: skip


def lesson(role: str, choice: random.Random) -> dict[str, Any]:
    """Return a conversation: the teacher's answer is right, the student's in one of two; else any number."""
    asked = choice.choice(NUMBERS)
    said = asked if role == "teacher" or choice.random() < 0.5 else choice.choice(NUMBERS)
    return {
        "messages": [
            {"role": "user", "content": f"repeat {asked}"},
            {"role": "assistant", "content": f"<answer>{said}</answer>"},
        ]
    }


def compare_losses(setting: Setting) -> dict[str, Steps]:
    """Train by GRPO and by OPD until the reward is reached; print and return the rewards."""
    rewards: dict[str, Steps] = {}
    for loss in ("OPD", "GRPO"):
        began = time.monotonic()
        rewards[loss] = asyncio.run(train(setting, f"{loss.lower()}_{setting.seed}", loss, until=LEVEL))
        print(f"seed {setting.seed} {loss}: {rewards[loss][0][1]:.3f} at step 1, {LEVEL} at step"
              f" {reached(rewards[loss])}, {time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    return rewards


def reached(steps: Steps) -> int | None:
    """Return the first step with the reward; None if no step has it."""
    return next((step for step, reward in steps if reward >= LEVEL), None)


def is_half(losses: dict[str, Steps]) -> bool:
    """Return whether OPD needs at most half of GRPO's steps; GRPO counts its last one if it never arrives."""
    distilled = reached(losses["OPD"])
    return distilled is not None and 2 * distilled <= (reached(losses["GRPO"]) or losses["GRPO"][-1][0])


async def train(setting: Setting, run: str, loss: str, *, until: float) -> Steps:
    """Train until a step has the reward ``until`` or the trainer ends; return the rewards."""
    flags = setting.flags(run, loss)
    async with await open_store(RunConfig(run_name=run, db_connection_string=setting.uri)) as store:
        roles = ("serve", "sample", *(("teach",) if loss == "OPD" else ()), "train")
        with processes(setting, run, flags, roles) as started:
            return await follow(store, started[-1], setting.work / "logs" / f"{run}-train.out", until)


async def follow(store: Store, trainer: Any, log: Path, until: float) -> Steps:
    """Wait for the end of the trainer or for the reward. Raises SystemExit if it fails or hangs."""
    seen: Steps = []
    moved_at = time.monotonic()
    while True:
        is_over = trainer.poll() is not None
        steps = [(step.step, float(step.metrics["reward"])) for step in await store.steps.find()]
        if len(steps) > len(seen):
            seen, moved_at = steps, time.monotonic()
        if (is_over and trainer.returncode == 0) or any(reward >= until for _, reward in seen):
            return seen
        if is_over or time.monotonic() - moved_at > STEP_SECONDS:
            raise SystemExit(f"the trainer ended or made no step; {log}:\n{tail(log)}")
        await asyncio.sleep(POLL_SECONDS)


@contextmanager
def processes(setting: Setting, run: str, flags: list[str], commands: tuple[str, ...]) -> Iterator[list[Any]]:
    """Run processes for the duration of the block."""
    logs = setting.work / "logs"
    logs.mkdir(exist_ok=True)
    started: list[Any] = []
    try:
        for command in commands:
            teacher = ["--teacher", str(setting.folder("teacher")), "--teacher_top_logprobs", str(TOP)]
            own = teacher if command == "teach" else []
            words = [sys.executable, "-m", "agentrl", command, *flags, *own]
            started.append(start_child(words, log=logs / f"{run}-{command}.out", env=environment()))
        yield started
    finally:
        stop_children(started)


def compare_kills(setting: Setting, kills: int) -> int:
    """Distil undisturbed and with kills of the teacher; return 0 if both trained the same."""
    undisturbed, _ = asyncio.run(distil(setting, "undisturbed", 0))
    killed, done = asyncio.run(distil(setting, "killed", kills))
    same = undisturbed == killed
    print(
        f"{len(killed['steps'])} steps, {done} kills of the teacher: {'identical' if same else 'different'}"
    )
    if not same:
        print(json.dumps({"undisturbed": undisturbed, "killed": killed}, indent=1))
    return 0 if same and done == kills else 1


async def distil(setting: Setting, run: str, kills: int) -> tuple[dict[str, Any], int]:
    """Train with a teacher that is killed ``kills`` times; return what was trained, and the kills."""
    flags = setting.flags(run, "OPD", is_synchronous=True)
    choice = random.Random(f"{setting.seed}/{kills}")
    done = 0
    async with await open_store(RunConfig(run_name=run, db_connection_string=setting.uri)) as store:
        with processes(setting, run, flags, ("serve", "sample", "train")) as (*_, trainer):
            while done < kills and trainer.poll() is None:
                with processes(setting, run, flags, ("teach",)) as (teacher,):
                    await until_step(store, trainer, done * setting.steps // kills, choice)
                    signal_session(teacher, signal.SIGKILL)
                    teacher.wait(10)
                    done += 1
            with processes(setting, run, flags, ("teach",)):
                log = setting.work / "logs" / f"{run}-train.out"
                await follow(store, trainer, log, until=2.0)
        steps = await store.steps.find()
        versions = await store.policy_versions.all()
        columns = [item async for item in store.database["Column"].find({}, {"status": 1, "failures": 1})]
        assert all(column["failures"] == 0 for column in columns)
        return {
            "steps": [(step.step, step.policy_version, list(step.data)) for step in steps],
            "losses": [step.metrics["loss"] for step in steps],
            "rewards": [step.metrics["reward"] for step in steps],
            "versions": [(each.id, [file.sha256 for file in each.files]) for each in versions],
        }, done


async def until_step(store: Store, trainer: Any, step: int, choice: random.Random) -> None:
    """Wait until a random moment after the commit of ``step``, while columns may be running."""
    deadline = time.monotonic() + STEP_SECONDS
    while trainer.poll() is None and time.monotonic() < deadline:
        last = await store.steps.last()
        running = await store.database["Column"].count_documents({"status": "running"})
        if (0 if last is None else last.step) >= step and running:
            break
        await asyncio.sleep(POLL_SECONDS / 10)
    await asyncio.sleep(choice.uniform(0.0, 0.2))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
