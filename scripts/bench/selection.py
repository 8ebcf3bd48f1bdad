"""Measure what --task_selection pass_rate saves: abandoned trajectories and steps to a reward.

    python scripts/bench/selection.py [--tasks tiny|mixed] [--steps 30] [--seeds 0 1 2] [--json FILE]
    python scripts/bench/selection.py --simulate
    python scripts/bench/selection.py --quick      one simulation, and two groups of a model without a warm-up

One process alternates between sampling, training and evaluation. It uses the model, tasks, groups and
learning rate of ``agentrl quickstart --tiny``, and chooses groups with the code of admission
(``store.epochs.choose``). A step trains the first groups whose scores differ; the remaining groups wait
for the next step. The reward is measured on held-out questions at temperature 1, because the training reward
depends on which tasks were chosen. ``mixed`` adds subtractions and products; the model's warm-up covers only
sums.

``--simulate`` needs no model. It draws scores for 400 tasks whose eases have a given standard deviation; some
are impossible. The policy's pass rate on the mean task grows from 0.30 to 0.95 over 40 groups, as in the
quickstart. It stops after 56 trained groups.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import demo_path  # noqa: F401
import torch
from demo.tasks import expressions, tiny_expressions
from demo.tiny import build_tiny_model, prepare_tiny_model
from harness import bench_parser
from rich.console import Console
from rich.table import Table
from selection_policy import Policy, Trajectory

from agentrl.config.schema import GroupConfig
from agentrl.documents.record import Record
from agentrl.documents.task import Begin
from agentrl.scoring.evaluation import LIMIT, Trials, estimate_ability, pass_probability
from agentrl.scoring.groups import decide_group, summarize
from agentrl.store.epochs import (
    ORDER,
    PASS_RATE,
    RECENT_GROUPS,
    Option,
    RateEstimate,
    choose,
    ease_after_group,
)

GENERATIONS, GROUPS_PER_STEP = 8, 16
EPOCHS, OPEN_GROUPS = 50, 2 * GROUPS_PER_STEP
TARGET = 0.9
HELD_OUT = 128


class Tasks:
    """The tasks of every epoch, in memory. Groups begin as in admission."""

    def __init__(self, questions: Sequence[str], selection: str, seed: int) -> None:
        self.questions = questions
        self.selection = selection
        self._orders = self._epochs(seed)
        self._ordered: list[Option] = []
        self._known: dict[str, Option] = {}
        """Copies for later epochs that may begin early, by task."""
        self._begun: set[str] = set()
        self._recent: list[Trials] = []
        self._first: list[Trials] = []
        """Trials of tasks that were sampled for the first time."""
        self._count = 0

    def begin(self, capacity: int) -> list[tuple[Option, Begin]]:
        """Choose up to ``capacity`` next groups."""
        ability = estimate_ability(self._recent[-RECENT_GROUPS:])
        estimate = RateEstimate(ability, tuple(self._first[-RECENT_GROUPS:]))
        while len(self._ordered) < capacity:
            self._ordered += [option for option in next(self._orders) if option.id not in self._begun]
        ordered = [self._known.get(o.task_id, o) if o.epoch else o for o in self._ordered[:capacity]]
        known = sorted(self._known.values(), key=lambda option: (abs(option.ease + ability), option.id))
        offered = known if self.selection == PASS_RATE else []
        chosen = choose(ordered, offered, estimate, self._count + 1, capacity)
        self._count += len(chosen)
        ids = {choice.option.id for choice in chosen}
        self._begun |= ids
        self._ordered = [option for option in self._ordered if option.id not in ids]
        self._known = {name: option for name, option in self._known.items() if option.id not in ids}
        return [(c.option, Begin(number=0, by=c.by, ability=ability, ease=c.option.ease)) for c in chosen]

    def finalize(self, option: Option, begun: Begin, summary: dict[str, Any]) -> None:
        """Update the estimates from a finished group."""
        trials = Trials(GENERATIONS, summary["pass_rate"] * GENERATIONS, begun.ease)
        self._recent.append(trials)
        if option.epoch == 0:
            self._first.append(trials)
        copy = self._option(option.task_id, option.epoch + 1, ease_after_group(begun, summary))
        if copy.epoch < EPOCHS and copy.id not in self._begun:
            self._known[option.task_id] = copy

    def _epochs(self, seed: int) -> Iterator[list[Option]]:
        for epoch in range(EPOCHS):
            names = [str(place) for place in range(len(self.questions))]
            random.Random(f"{seed}/{epoch}").shuffle(names)
            yield [self._option(name, epoch, 0.0) for name in names]

    def _option(self, name: str, epoch: int, ease: float) -> Option:
        before = f"{epoch - 1}/{name}" if epoch else None
        return Option(
            id=f"{epoch}/{name}", task_id=name, epoch=epoch, generations=GENERATIONS, ease=ease, before=before
        )


@dataclass
class Run:
    """Results of one selection with one seed."""

    selection: str
    seed: int
    sampled: int = 0
    abandoned: int = 0
    early: int = 0
    """Groups that began early, by pass rate."""
    seconds: float = 0.0
    """CPU seconds of sampling and training, without evaluation."""
    shares: list[float] = field(default_factory=list)
    """Share of abandoned trajectories, by step."""
    rewards: list[float] = field(default_factory=list)
    """Reward on held-out questions, before the first step and after each step."""

    @property
    def share(self) -> float:
        """Share of abandoned trajectories."""
        return self.abandoned / self.sampled

    @property
    def reached(self) -> int | None:
        """First step at which the mean of three evaluations reaches ``TARGET``, or None."""
        means = [fmean(self.rewards[i - 2 : i + 1]) for i in range(2, len(self.rewards))]
        return next((step for step, mean in enumerate(means, start=2) if mean >= TARGET), None)


def measure(folder: Path, questions: Sequence[str], held_out: Sequence[str], run: Run, steps: int) -> None:
    """Train with one selection and one seed, and record the results in ``run``."""
    policy, tasks = Policy(folder, run.seed), Tasks(questions, run.selection, run.seed)
    waiting: list[list[Trajectory]] = []
    run.rewards.append(policy.score(held_out))
    for step in range(steps):
        started, before = time.process_time(), (run.sampled, run.abandoned)
        while len(waiting) < GROUPS_PER_STEP:
            waiting += sample_groups(policy, tasks, run, min(OPEN_GROUPS - len(waiting), 8))
        policy.train([one for group in waiting[:GROUPS_PER_STEP] for one in group])
        waiting = waiting[GROUPS_PER_STEP:]
        run.seconds += time.process_time() - started
        sampled = run.sampled - before[0]
        run.shares.append((run.abandoned - before[1]) / sampled if sampled else 0.0)
        run.rewards.append(policy.score(held_out))
        print(
            f"{run.selection} seed {run.seed} step {step + 1}: abandoned {run.shares[-1]:.2f} of {sampled},"
            f" reward {run.rewards[-1]:.3f}, {run.seconds:.0f} s", flush=True,
        )  # fmt: skip


def sample_groups(policy: Policy, tasks: Tasks, run: Run, count: int) -> list[list[Trajectory]]:
    """Sample ``count`` groups and return those whose scores differ."""
    begun = tasks.begin(count)
    questions = [tasks.questions[int(option.task_id)] for option, _ in begun for _ in range(GENERATIONS)]
    trajectories = policy.sample(questions)
    kept = []
    for place, (option, begin) in enumerate(begun):
        members = trajectories[place * GENERATIONS : (place + 1) * GENERATIONS]
        records = [
            Record(id=str(i), task=option.id, traj_id=i, attempt=1, split="train", epoch=option.epoch,
                   query="", score=one.score, turns=1)
            for i, one in enumerate(members)
        ]  # fmt: skip
        decisions = decide_group(records, GroupConfig(), random.Random(0))
        trained = [d for d in decisions if d.advantage is not None]
        for decision in trained:
            members[int(decision.record_id)].advantage = decision.advantage or 0.0
        tasks.finalize(option, begin, summarize(records, 0, len(trained), {}))
        run.sampled += len(members)
        run.abandoned += len(members) - len(trained)
        run.early += begin.by == PASS_RATE
        if trained:
            kept.append(members)
    return kept


def questions_of(kind: str) -> tuple[list[str], list[str]]:
    """Return training questions (quickstart, or three operators) and different held-out questions."""
    make = (
        tiny_expressions if kind == "tiny" else lambda seed: expressions(seed, smallest=50, operators="+-*")
    )
    train = list(dict.fromkeys(q for q, _ in zip(make(3), range(600), strict=False)))[:512]
    known = set(train)
    fresh = (q for q in make(4) if q not in known)
    return train, [q for q, _ in zip(fresh, range(HELD_OUT), strict=False)]


def simulate(selection: str, deviation: float, impossible: float, seed: int) -> tuple[int, int]:
    """Return the number of sampled groups, and of groups whose scores are all equal.

    ``deviation`` is the standard deviation of the tasks' eases, ``impossible`` the share of impossible tasks.
    """
    rng = random.Random(seed)
    eases = [-LIMIT if rng.random() < impossible else rng.gauss(0, deviation) for _ in range(400)]
    tasks = Tasks([""] * len(eases), selection, seed)
    sampled = trained = 0
    open_groups: list[tuple[Option, Begin, dict[str, Any]]] = []
    while trained < 56:
        ability = -0.85 + 3.75 * min(1.0, trained / 40)
        for option, begun in tasks.begin(4):
            rate = pass_probability(ability, eases[int(option.task_id)])
            passed = sum(rng.random() < rate for _ in range(GENERATIONS))
            summary = {"scored": GENERATIONS, "pass_rate": passed / GENERATIONS}
            open_groups.append((option, begun, summary))
            sampled += 1
            trained += 0 < passed < GENERATIONS
        while len(open_groups) > 4:
            tasks.finalize(*open_groups.pop(0))
    return sampled, sampled - trained


def show_simulation(seeds: int = 20) -> None:
    """Print means over the seeds, for tasks from equally hard to very different."""
    for deviation, impossible in ((0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (1.5, 0.0), (1.0, 0.5)):
        for selection in (ORDER, PASS_RATE):
            runs = [simulate(selection, deviation, impossible, seed) for seed in range(seeds)]
            sampled, agreed = (fmean(values) for values in zip(*runs, strict=True))
            print(
                f"deviation {deviation}, impossible {impossible}, {selection}: {sampled:.0f} groups,"
                f" {agreed / sampled:.2f} without spread"
            )


def main() -> int:
    """Measure both selections with every seed and print a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("--model", type=Path, help="model folder (default: that of quickstart --tiny)")
    parser.add_argument("--tasks", choices=("tiny", "mixed"), default="tiny", help="default: tiny")
    parser.add_argument("--steps", type=int, default=30, help="steps per run (default: 30)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--json", type=Path, help="write the runs to this file too")
    parser.add_argument("--simulate", action="store_true", help="draw scores without a model")
    options = parser.parse_args()
    if options.simulate:
        show_simulation()
        return 0
    torch.set_num_threads(1)
    train, held_out = questions_of(options.tasks)
    if options.quick:
        show_simulation(seeds=1)
        with tempfile.TemporaryDirectory() as folder:
            model = build_tiny_model(Path(folder) / "model", 0)
            policy, tasks = Policy(model, 0), Tasks(train[:16], PASS_RATE, 0)
            sample_groups(policy, tasks, Run(PASS_RATE, 0), 2)
            policy.score(held_out[:4])
        return 0
    model = options.model or prepare_tiny_model(0, print)
    runs = []
    for seed in options.seeds:
        for selection in (ORDER, PASS_RATE):
            run = Run(selection, seed)
            measure(model, train, held_out, run, options.steps)
            runs.append(run)
            if options.json:
                options.json.write_text(json.dumps([asdict(item) for item in runs]), encoding="utf-8")
    show(runs, options.steps)
    return 0


def show(runs: Sequence[Run], steps: int) -> None:
    """Print a table with one row per run."""
    table = Table(title=f"--task_selection, {steps} steps of {GROUPS_PER_STEP} groups of {GENERATIONS}")
    columns = ("selection", "seed", "sampled", "abandoned", "share", "last third", "begun early", "CPU s",
               f"steps to {TARGET}", "last reward")  # fmt: skip
    for name in columns:
        table.add_column(name)
    for run in runs:
        last = fmean(run.shares[-max(1, steps // 3) :])
        table.add_row(
            run.selection, str(run.seed), str(run.sampled), str(run.abandoned), f"{run.share:.3f}",
            f"{last:.3f}", str(run.early), f"{run.seconds:.0f}", str(run.reached or "-"),
            f"{fmean(run.rewards[-3:]):.3f}",
        )  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
