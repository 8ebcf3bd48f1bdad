"""Distil a warmed-up teacher into a tiny student, beside GRPO on the same tasks; and kill the teacher.

    python scripts/bench/distill.py [--seeds 3] [--steps 120] [--json FILE]
    python scripts/bench/distill.py --kills 10 [--steps 12]
    python scripts/bench/distill.py --quick          two steps of each loss on one seed

The task is to repeat a number of three digits. A seed makes a model of two layers; fine-tuning teaches the
student to answer with digits that are right in one of two, any digits otherwise, and from there the teacher
to answer the right ones. The student then learns from the teacher by OPD, with the teacher's 16 likeliest
ids at each token, and from the score by GRPO. A step is the same number of sampled trajectories in each.
``--ways`` adds OPD with the logprobs of the sampled tokens alone (``OPD-0``), and GRPO that samples on until
each group of a step has scores that differ (``GRPO-spread``). A reward is that of a step's sampled
trajectories, and 0.9 is to be the mean of three steps; most numbers are new to the policy. Exits with 1
unless OPD with the likeliest ids needs at most half of GRPO's steps on every seed.

With ``--kills`` the student is distilled twice with synchronous sampling: undisturbed, and while the process
of the teacher is killed by SIGKILL that often, spread over the steps. Exits with 1 unless steps, data,
losses, rewards and published weights are equal.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import demo_path  # noqa: F401
from commands import agentrl, command, database, environment
from demo.tiny import build_tiny_model
from harness import Row, bench_parser, finish

from agentrl.base.processes import signal_session, start_child, stop_children, tail
from agentrl.config.schema import RunConfig
from agentrl.store.client import Store, open_store

LEVEL, SPAN = 0.9, 3
"""The reward to reach, as a mean over that many steps."""
HALF = 0.5
TASKS = 1000
"""Most numbers that are trained on."""
GROUPS = 20_000
"""At least as many groups as a run may sample: GRPO drops those whose scores are equal."""
SCORED = {"scorer": "exact", "answer_schema": "answer"}
BATCH_SIZE = 16
TOP = 16
EVERY_GROUP = ("--drop_zero_advantage", "false", "--min_score_spread", "0")
GROUPS_OF_4 = ("--groups_per_step", "8", "--num_generations", "4")
STUDENT_STEPS, TEACHER_STEPS = 150, 600
STEP_SECONDS = 900.0
POLL_SECONDS = 0.1

Steps = list[tuple[int, float]]
"""(step, reward) of a run."""


@dataclass(frozen=True)
class Way:
    """How a student learns."""

    loss: str
    top: int = 0
    """Likeliest ids of the teacher that are stored for each token."""
    groups: tuple[str, ...] = (*GROUPS_OF_4, *EVERY_GROUP)
    """Flags that choose the groups of a step."""

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of every process."""
        columns = ("--columns", "teacher") if self.loss == "OPD" else ()
        return ("--loss_calculater", self.loss, *columns, *self.groups)


DISTILLED = f"OPD-{TOP}"
SINGLES = ("--groups_per_step", "32", "--num_generations", "1", "--advantage", "reward", *EVERY_GROUP)
WAYS = {
    DISTILLED: Way("OPD", TOP, SINGLES),
    "GRPO": Way("GRPO"),
    "OPD-0": Way("OPD", 0, SINGLES),
    "GRPO-spread": Way("GRPO", groups=GROUPS_OF_4),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a seed's models, logs and runs lie."""

    work: Path
    seed: int
    uri: str
    steps: int
    digits: int

    @property
    def tasks(self) -> int:
        """The number of tasks."""
        return min(TASKS, 10**self.digits)

    def flags(self, run: str, way: Way, *, is_synchronous: bool = False) -> list[str]:
        """Return the flags of every process of a run."""
        alone = ["--sync_sampling", "true", "--max_concurrent_samples_per_process", "1",
                 "--groups_per_step", "16"]  # fmt: skip
        return [
            "--run_name", run, "--db_connection_string", self.uri, "--seed", str(self.seed),
            "--output_dir", str(self.work / run), "--log_dir", str(self.work / "logs"),
            "--model_name_or_path", str(self.folder("student")),
            "--train_file", str(self.work / "tasks.jsonl"),
            "--agent_name", "single_turn", "--max_new_tokens", "8", "--max_prompt_tokens", "64",
            "--max_tokens", "4096", "--num_train_epochs", str(GROUPS // self.tasks), "--save_steps", "1000",
            "--max_steps", str(self.steps),
            "--learning_rate", "2e-3", "--max_staleness", "1",
            "--heartbeat_seconds", "0.5", "--lease_seconds", "3",
            *way.flags, *(alone if is_synchronous else ()),
        ]  # fmt: skip

    def folder(self, role: str) -> Path:
        """Return the folder of the student's or the teacher's model."""
        return self.work / f"{role}-{self.seed}"


def main() -> int:
    """Compare the steps to a reward, or the runs with and without kills."""
    parser = bench_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of models (default: 3)")
    parser.add_argument("--first_seed", type=int, default=0, help="seed of the first model (default: 0)")
    parser.add_argument(
        "--steps", type=int, help="most optimizer steps of a run (default: 120; 12 with kills)"
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=[DISTILLED, "GRPO"],
        help=f"how to train (default: {DISTILLED} GRPO)",
    )
    parser.add_argument("--digits", type=int, default=3, help="digits of a number (default: 3)")
    parser.add_argument(
        "--kills", type=int, default=0, help="SIGKILLs of the teacher (default: compare losses)"
    )
    parser.add_argument("--json", type=Path, help="write the rewards to this file")
    parser.add_argument("--work", type=Path, help="keep models, logs and database here")
    given = parser.parse_args()
    steps = given.steps or (2 if given.quick else 12 if given.kills else 120)
    seeds = range(given.first_seed, given.first_seed + (1 if given.quick or given.kills else given.seeds))
    with database(given.work) as (work, uri):
        settings = [
            Setting(work=work, seed=seed, uri=uri, steps=steps, digits=given.digits) for seed in seeds
        ]
        for setting in settings:
            prepare(setting, is_quick=given.quick)
        if given.kills:
            return compare_kills(settings[0], given.kills)
        rewards = {setting.seed: compare_losses(setting, given.ways) for setting in settings}
    if given.json is not None:
        given.json.write_text(json.dumps(rewards, indent=1), encoding="utf-8")
    rows = [row for seed, ways in rewards.items() for row in compared(seed, ways)]
    return finish("distillation", rows, quick=given.quick)


def prepare(setting: Setting, *, is_quick: bool) -> None:
    """Write the tasks, and make the two models of a seed."""
    work = setting.work
    numbers = [f"{n:0{setting.digits}d}" for n in range(10**setting.digits)]
    tasks = random.Random(setting.seed).sample(numbers, setting.tasks)
    lines = [json.dumps({"id": f"t{n}", "query": f"repeat {n}", "answer": n, **SCORED}) for n in tasks]
    (work / "tasks.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    made = work / f"random-{setting.seed}"
    if made.exists():
        shutil.rmtree(made)
    corpus = [f"system\nuser\nrepeat {n}\nassistant\n<answer>{n}</answer>" for n in range(10)]
    build_tiny_model(made, setting.seed, corpus=corpus)
    for role, base, steps in (
        ("student", made, STUDENT_STEPS), ("teacher", setting.folder("student"), TEACHER_STEPS)
    ):  # fmt: skip
        if (setting.folder(role) / "config.json").is_file():
            continue  # of an earlier call with this --work
        choice = random.Random(f"{setting.seed}/{role}")
        file = work / f"{role}-{setting.seed}.jsonl"
        total = (2 if is_quick else steps) * BATCH_SIZE
        file.write_text(
            "".join(f"{json.dumps(lesson(role, setting.digits, choice))}\n" for _ in range(total)), "utf-8"
        )
        agentrl("sft", [
            "--run_name", "warm-up", "--seed", str(setting.seed), "--max_steps", str(total // BATCH_SIZE),
            "--batch_size", str(BATCH_SIZE), "--max_tokens", "2048", "--learning_rate", "2e-3",
            "--model_name_or_path", str(base), "--train_file", str(file),
            "--output_dir", str(setting.folder(role)), "--log_dir", str(work / "logs"),
        ], work)  # fmt: skip


def lesson(role: str, digits: int, choice: random.Random) -> dict[str, Any]:
    """Return a conversation: the teacher's digits are right, the student's in one of two; else any."""
    asked = choice.choices("0123456789", k=digits)
    said = [
        digit if role == "teacher" or choice.random() < 0.5 else choice.choice("0123456789")
        for digit in asked
    ]
    return {
        "messages": [
            {"role": "user", "content": f"repeat {''.join(asked)}"},
            {"role": "assistant", "content": f"<answer>{''.join(said)}</answer>"},
        ]
    }


def compare_losses(setting: Setting, ways: list[str]) -> dict[str, Steps]:
    """Train each way until the reward is reached; print and return the rewards."""
    rewards: dict[str, Steps] = {}
    for way in ways:
        began = time.monotonic()
        rewards[way] = asyncio.run(train(setting, f"{way.lower()}_{setting.seed}", WAYS[way]))
        print(f"seed {setting.seed} {way}: {rewards[way][0][1]:.3f} at step 1, {LEVEL} at step"
              f" {reached(rewards[way])}, {time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    return rewards


def reached(steps: Steps) -> int | None:
    """Return the first step at which the mean of the last ``SPAN`` rewards is ``LEVEL``; None if none is."""
    values = [reward for _, reward in steps]
    return next(
        (end for end in range(SPAN, len(values) + 1) if fmean(values[end - SPAN : end]) >= LEVEL), None
    )


def compared(seed: int, rewards: dict[str, Steps]) -> list[Row]:
    """Return the steps of each distillation beside GRPO's; one that never arrives counts its last step."""
    steps = {way: reached(rewards[way]) for way in rewards}
    shown = {way: str(steps[way] or f"> {len(rewards[way])}") for way in rewards}
    return [
        Row(
            what=f"seed {seed}: steps of {way} and of GRPO to {LEVEL}", ours=shown[way],
            baseline=shown["GRPO"],
            ratio=(steps[way] or math.inf) / (steps["GRPO"] or len(rewards["GRPO"])), more=False,
            target=HALF if way == DISTILLED else None,
        )
        for way in rewards if way != "GRPO" and "GRPO" in rewards
    ]  # fmt: skip


async def train(setting: Setting, run: str, way: Way) -> Steps:
    """Train until the reward is reached or the trainer ends; return the rewards."""
    flags = setting.flags(run, way)
    async with await open_store(RunConfig(run_name=run, db_connection_string=setting.uri)) as store:
        roles = ("serve", "sample", *(("teach",) if way.loss == "OPD" else ()), "train")
        with processes(setting, run, flags, roles, way.top) as started:
            log = setting.work / "logs" / f"{run}-train.out"
            return await follow(store, started[-1], log, until_reached=True)


async def follow(store: Store, trainer: Any, log: Path, *, until_reached: bool = False) -> Steps:
    """Wait for the end of the trainer or for the reward. Raises SystemExit if it fails or hangs."""
    seen: Steps = []
    moved_at = time.monotonic()
    while True:
        is_over = trainer.poll() is not None
        steps = [(step.step, float(step.metrics["reward"])) for step in await store.steps.find()]
        if len(steps) > len(seen):
            seen, moved_at = steps, time.monotonic()
        if (is_over and trainer.returncode == 0) or (until_reached and reached(seen) is not None):
            return seen
        if is_over or time.monotonic() - moved_at > STEP_SECONDS:
            raise SystemExit(f"the trainer ended or made no step; {log}:\n{tail(log)}")
        await asyncio.sleep(POLL_SECONDS)


@contextmanager
def processes(
    setting: Setting, run: str, flags: list[str], names: tuple[str, ...], top: int = TOP
) -> Iterator[list[Any]]:
    """Run processes for the duration of the block; a teacher stores its ``top`` likeliest ids."""
    logs = setting.work / "logs"
    logs.mkdir(exist_ok=True)
    started: list[Any] = []
    try:
        for name in names:
            teacher = ["--teacher", str(setting.folder("teacher")), "--teacher_top_logprobs", str(top)]
            own = teacher if name == "teach" else []
            log = logs / f"{run}-{name}.out"
            started.append(start_child(command(name, [*flags, *own]), log=log, env=environment()))
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
    flags = setting.flags(run, WAYS[DISTILLED], is_synchronous=True)
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
                await follow(store, trainer, log)
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
