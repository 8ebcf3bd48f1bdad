"""Run the quickstart: choose or resume its run, start its processes, say what it waits for, and report."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.base.atomic_folder import replace_file
from agentrl.base.installation import shipped_files
from agentrl.base.processes import StoppedBySignalError, free_port, raise_on_signals
from agentrl.config.flags import flag_words
from agentrl.config.run import QuickstartFlags
from agentrl.config.schema import EngineConfig, RunConfig, TrainConfig
from agentrl.documents.status import ServiceStatus, StepStatus
from agentrl.errors import AgentRLError, ConfigError, TimeLimitError
from agentrl.local.launch import (
    SERVERS_FILE,
    RunPlan,
    agentrl_command,
    demo_model,
    require_teacher,
    run_processes,
)
from agentrl.local.mongod import EmbeddedMongo, disk_problem
from agentrl.observe import logging as run_logging
from agentrl.observe.terminal import excerpt
from agentrl.screens.views.counts import Details
from agentrl.screens.views.pipelines import TrajectoryRow
from agentrl.screens.views.read import Views, WholeTrajectory
from agentrl.store.mechanics.connection import STEP

if TYPE_CHECKING:
    from agentrl.screens.views.pipelines import StepRow
    from agentrl.store.client import Store

RIGHT = 0.5
"""A trajectory is right when its score is above this."""

EXCERPT_CHARS = 96

ENDS = 3
"""Steps at each end of the run over which the reward is averaged."""

HELD_OUT_TASKS = 24
"""Tasks that are evaluated before and after: two take as long as a step."""

SOLVED = 0.95
"""Mean reward of the last ENDS steps that solves the tasks: what is left to learn is a matter of luck."""


@dataclass(frozen=True)
class WorthReading:
    """One trajectory: why it is worth reading, and a few lines of it."""

    title: str
    record_id: str
    score: float
    version: int | None
    """The oldest policy version of its tokens."""
    tokens: int
    """Generated tokens."""
    lines: tuple[str, ...]


@dataclass(frozen=True)
class QuickstartOutcome:
    """The rewards and the cost of the committed steps, and the trajectories to look at."""

    rewards: list[float]
    seconds: float
    """Median time of forward, backward and optimizer in a step."""
    tokens: float
    """Mean number of tokens computed per step."""
    call_tokens: float
    """Mean number of tokens per step if every model call were a row of its own."""
    sampled: int
    """Number of trajectories in finished groups."""
    abandoned: int
    """Number of these that did not become training data."""
    worth_reading: list[WorthReading]
    plot: Path
    held_out: HeldOut | None = None

    @property
    def first(self) -> float:
        """The mean reward of the first three steps."""
        return fmean(self.rewards[:ENDS])

    @property
    def last(self) -> float:
        """The mean reward of the last three steps."""
        return fmean(self.rewards[-ENDS:])

    @property
    def is_solved(self) -> bool:
        """The last three steps have a reward of SOLVED."""
        return is_solved(self.rewards)


def is_solved(rewards: Sequence[float]) -> bool:
    """Return whether the last ENDS rewards are there, and SOLVED on average: few groups have a signal."""
    return len(rewards) >= ENDS and fmean(rewards[-ENDS:]) >= SOLVED


@dataclass(frozen=True)
class HeldOut:
    """The evaluations of tasks that are not trained, and one task of them before and after."""

    before: Mapping[str, Any]
    """``Evaluation.total`` of version 0; ``after`` is that of the last version."""
    after: Mapping[str, Any]
    lines: tuple[tuple[str, ...], ...]
    """A trajectory of version 0, and one of the last version, for the same task."""

    @property
    def text(self) -> str:
        """Both estimates with their 95 % intervals."""
        before, after = (_pass_at_1(total) for total in (self.before, self.after))
        return f"{before} -> {after} of {self.after['tasks']} tasks [95 %]"


def _pass_at_1(total: Mapping[str, Any]) -> str:
    found = total["pass_at"]["1"]
    return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


async def read_held_out(store: Store) -> HeldOut | None:
    """Return the finished evaluations of version 0 and of the last one; None without both."""
    done = {each.version: each for each in await store.evaluations.all() if each.total}
    last = max((version for version in done if version is not None), default=0)
    if 0 not in done or last == 0:
        return None
    views = Views(store.connection)
    rows = [
        {row.task.partition("/")[2]: row for row in await views.trajectories(split=done[version].id)}
        for version in (0, last)
    ]
    chosen = [[side[task] for side in rows] for task in rows[0] if task in rows[1]]
    scores = [[row.score or 0.0 for row in pair] for pair in chosen]
    best = max(range(len(chosen)), key=lambda index: scores[index][1] - scores[index][0], default=None)
    wholes = [] if best is None else [await views.whole_trajectory(row.id) for row in chosen[best]]
    return HeldOut(
        done[0].total, done[last].total, tuple(excerpt_lines(each) for each in wholes if each is not None)
    )


async def read_outcome(run_name: str, output: Path) -> QuickstartOutcome | None:
    """Read the rewards from the database and plot them; None if there is no step."""
    from agentrl.observe.plotting import plot_curve
    from agentrl.store.client import open_store

    async with await open_store(RunConfig(run_name=run_name)) as store:
        steps = await store.steps.find()
        if not steps:
            return None
        plot = output / "curve.png"
        plot_curve(run_name, await store.steps.metrics(), plot)
        metrics = [step.metrics for step in steps]
        groups = await Details(store.connection).groups()
        return QuickstartOutcome(
            rewards=[float(item["reward"]) for item in metrics],
            seconds=median(item["seconds_forward_backward"] + item["seconds_optimizer"] for item in metrics),
            tokens=fmean(item["unique_tokens"] for item in metrics),
            call_tokens=fmean(item["total_tokens"] for item in metrics),
            sampled=sum(item.trajectories for item in groups),
            abandoned=sum(item.trajectories - item.trained for item in groups),
            worth_reading=await read_worth_reading(store),
            plot=plot,
            held_out=await read_held_out(store),
        )


def print_report(run_name: str, output: Path, outcome: QuickstartOutcome) -> None:
    """Print the summary; its last line is ``reward FIRST -> LAST over N steps``."""
    agentrl = own_command()
    solved = [f"solved      the reward of the last {ENDS} steps is {outcome.last:.2f}"]
    lines = [
        "",
        f"a step      {outcome.seconds:.1f} s of training (median), {outcome.tokens:,.0f} tokens computed"
        f" for model calls of {outcome.call_tokens:,.0f}",
        f"sampled     {outcome.sampled} trajectories; {outcome.abandoned} of them are abandoned",
        *(solved if outcome.is_solved else []),
        f"plot        {outcome.plot}",
        f"checkpoint  {max(output.glob('checkpoint-*'), default=output)}",
        f"database    {run_name} in .agentrl/mongo (the server ends now; `{agentrl} mongo up` starts it)",
        "",
        "next, try:",
        f"  {agentrl} mongo up",
        f"  {agentrl} dashboard",
        f"  {agentrl} audit run --run_name {run_name}",
        "",
        *worth_reading_lines(outcome.worth_reading, f"{agentrl} audit record", run_name),
        *([] if outcome.held_out is None else held_out_lines(outcome.held_out)),
        f"reward {outcome.first:.3f} -> {outcome.last:.3f} over {len(outcome.rewards)} steps",
    ]
    print("\n".join(lines), flush=True)


def held_out_lines(found: HeldOut) -> list[str]:
    """Return one task before and after, side by side, and pass@1 of all."""
    table = Table("before training", "after", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for pair in zip_longest(*found.lines, fillvalue=""):
        table.add_row(*(Text(line) for line in pair))
    console = Console(width=min(120, shutil.get_terminal_size((100, 24)).columns), color_system=None)
    with console.capture() as captured:
        console.print(table)
    shown = ["a task that was not trained:", *captured.get().splitlines()] if found.lines else []
    return [*shown, f"held out pass@1 {found.text}"]


def own_command() -> str:
    """Return how a shell in this folder starts ``agentrl``: by its name if it finds it, else by its path."""
    script = Path(sys.executable).with_name("agentrl")
    if shutil.which("agentrl") == str(script):
        return "agentrl"
    here = Path.cwd()
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))


def worth_reading_lines(chosen: Sequence[WorthReading], command: str, run_name: str) -> list[str]:
    """Return the excerpts, each with the command that shows the whole trajectory."""
    if not chosen:
        return []
    lines = ["trajectories worth reading:"]
    for item in chosen:
        version = "" if item.version is None else f", policy version {item.version}"
        lines += [
            f"  {item.title}: score {item.score:g}{version}, {item.tokens} generated tokens",
            *(f"      {line}" for line in item.lines),
            f"      {command} {shlex.quote(item.record_id)} --run_name {run_name}",
        ]
    return [*lines, ""]


async def read_worth_reading(store: Store) -> list[WorthReading]:
    """Return the first wrong, the first right and the longest trajectory of the train split."""
    views, found = Views(store.connection), []
    for title, row in choose_worth_reading(await views.trajectories(split="train")):
        whole = await views.whole_trajectory(row.id)
        if whole is None or row.score is None:
            continue
        found.append(
            WorthReading(
                title, row.id, row.score, row.min_version, row.generated_tokens, excerpt_lines(whole)
            )
        )
    return found


def choose_worth_reading(rows: Sequence[TrajectoryRow]) -> list[tuple[str, TrajectoryRow]]:
    """Return up to three different trajectories with a score, each with its title."""
    scored = sorted((row for row in rows if row.score is not None), key=lambda row: (row.created_at, row.id))
    wrong = next((row for row in scored if (row.score or 0.0) <= RIGHT), None)
    right = next((row for row in scored if (row.score or 0.0) > RIGHT), None)
    others = [row for row in scored if row not in (wrong, right)]
    longest = max(others, key=lambda row: row.generated_tokens, default=None)
    named = (("first wrong", wrong), ("first right", right), ("longest", longest))
    return [(title, row) for title, row in named if row is not None]


def excerpt_lines(whole: WholeTrajectory) -> tuple[str, ...]:
    """Return the question, each model call with its tool results, and the expected answer, a line each."""
    lines = [f"question  {excerpt(whole.record.query, EXCERPT_CHARS)}"]
    for call in whole.calls:
        said = call.response.get("content") or ""
        asked = [
            f"{execution.name}({json.dumps(execution.arguments, ensure_ascii=False)}) = {execution.text}"
            for execution in call.tool_executions
        ]
        shown = " ".join([str(said), *asked]).strip() or call.error or "(no text)"
        lines.append(f"model     {excerpt(shown, EXCERPT_CHARS)}")
    if whole.record.final_answer != whole.record.answer:
        lines.append(f"expected  {excerpt(whole.record.answer, EXCERPT_CHARS)}")
    return tuple(lines)


logger = logging.getLogger(__name__)

SLACK = 2.0
"""The default limit leaves the rest this many times its estimate."""

LONGEST_MINUTES = 60.0
"""The default limit is never longer."""

_START_SECONDS = 60.0
"""Time for the start of the processes in the limit that is recommended."""

_RETOLD_SHARE, _RETOLD_SECONDS = 0.25, 60.0
_PARTS = {
    "training": ("seconds_pack", "seconds_forward_backward", "seconds_optimizer"),
    "sampling": ("seconds_data",),
    "publishing": ("seconds_publish",),
}
_ADVICE = {
    "training": "training is the slowest part",
    "sampling": "the trainer mostly waits for samples: the engine is the slowest part",
    "publishing": "publishing is the slowest part: the disk of output/ is slow",
}

LINE_SECONDS = 10.0
"""Least time between two lines about sampling."""

_POLL_SECONDS = 0.5
_PROGRESS_STOP_SECONDS = 10.0


class Pace:
    """Follows the steps of a run: its time limit, and what is said about the time that is left.

    One thread calls ``step``, another one reads ``deadline``.
    """

    def __init__(
        self,
        steps: int,
        *,
        minutes: float | None,
        least_minutes: float,
        ends_when_solved: bool = False,
        skips_first: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin now. ``minutes`` is the user's limit; without it the limit follows the measured speed.

        That default is at least ``least_minutes``, which is also the limit of the first step. A run that
        ``ends_when_solved`` ends after the step that solves it. With ``skips_first`` the first step, whose
        data were sampled beside an evaluation, estimates nothing.
        """
        self.steps = steps
        self.is_solved = False
        """The deadline is now, because the run is solved."""
        self._ends_when_solved, self._skips_first = ends_when_solved, skips_first
        self.waiting = "the engine has not started"
        """What the run waits for before its first step."""
        self._minutes = minutes
        self._clock = clock
        self._began = clock()
        self._deadline = self._began + 60 * (least_minutes if minutes is None else minutes)
        self._first: tuple[int, float] | None = None
        self._metrics: list[Mapping[str, Any]] = []
        self._last = 0
        self._rewards: list[float] = []
        """Of the steps up to the last one, without a gap."""
        self._told_end: float | None = None

    def deadline(self) -> float:
        """Return the end of the time limit, as ``time.monotonic`` counts."""
        return self._deadline

    @property
    def limit(self) -> str:
        """The time limit as text."""
        return shown(self._deadline - self._began)

    @property
    def is_over(self) -> bool:
        """The time limit has passed."""
        return self._clock() >= self._deadline

    def step(self, done: int, metrics: Mapping[str, Any], sampling: float) -> str | None:
        """Note that ``done`` steps are committed; return a line about the rest, or None without news.

        ``metrics`` are those of the last step; its data were ``sampling`` seconds' work.
        """
        now = self._clock()
        # Until an engine serves, the first step waits for the engine and not for samples.
        self._metrics.append({**metrics, "seconds_data": min(metrics["seconds_data"], sampling)})
        if self._first is None:
            self._first = done, now
        if self._ends_when_solved:
            # Forget those before a gap: a step that was committed between two looks may have a lower reward.
            self._rewards = [*(self._rewards if done == self._last + 1 else ()), float(metrics["reward"])]
            self._last = done
        left = self.steps - done
        if left <= 0 or self.is_over:
            return None
        if is_solved(self._rewards):
            self.is_solved, self._deadline = True, now
            mean = fmean(self._rewards[-ENDS:])
            return f"solved at step {done} of {self.steps}: the reward of {ENDS} steps in a row is {mean:.2f}"
        before, began = self._first
        if done == before and self._skips_first:
            return None
        each = (now - began) / (done - before) if done > before else _first_estimate(metrics, sampling)
        if self._minutes is None:
            longest = self._began + 60 * LONGEST_MINUTES
            self._deadline = max(self._deadline, min(now + SLACK * left * each, longest))
        end = now + left * each
        moved = abs(end - self._told_end) if self._told_end is not None else float("inf")
        if moved <= max(_RETOLD_SECONDS, _RETOLD_SHARE * (end - now)):
            return None
        self._told_end = end
        return (
            f"step {done} of {self.steps} after {shown(now - self._began)}; the other {left} take about"
            f" {shown(left * each)} on this machine ({each:.0f} s each); {self._limit_line(now, end, each)}"
        )

    def _limit_line(self, now: float, end: float, each: float) -> str:
        if end <= self._deadline:
            return f"the time limit is {self.limit}"
        fitting = int((self._deadline - now) / each)
        minutes = self._enough_minutes(end - self._began)
        return (
            f"the time limit of {self.limit} leaves time for about {fitting} of them:"
            f" --minutes {minutes} trains all"
        )

    def ended(self, done: int) -> TimeLimitError:
        """Return the error of a run that its limit ended with ``done`` steps: the reason, and what to do."""
        passed = self._clock() - self._began
        head = f"{done} of {self.steps} steps in {shown(passed)}"
        again = "the same command trains the rest"
        if not self._metrics:
            return TimeLimitError(
                f"{head}: {self.waiting}",
                hint=f"{again}: give it --minutes {self._enough_minutes(4 * passed)}; see the run's logs",
            )
        parts = {name: fmean(_sum(item, keys) for item in self._metrics) for name, keys in _PARTS.items()}
        speed = fmean(float(item["tokens_per_second"]) for item in self._metrics)
        slowest = max(parts, key=lambda name: parts[name])
        each = sum(parts.values())
        minutes = self._enough_minutes(_START_SECONDS + (self.steps - done) * each)
        return TimeLimitError(
            f"{head}: a step takes {each:.0f} s: {parts['training']:.0f} s of training"
            f" ({speed:,.0f} tokens/s), {parts['sampling']:.0f} s of waiting for samples,"
            f" {parts['publishing']:.0f} s of publishing; {_ADVICE[slowest]}",
            hint=f"{again}: give it --minutes {minutes};"
            " other work on this machine slows it down; --tiny trains a smaller model",
        )

    @staticmethod
    def _enough_minutes(seconds: float) -> int:
        return int(1.5 * seconds / 60) + 1


def shown(seconds: float) -> str:
    """Return a duration for a sentence: ``45 s``, ``2.5 min``, ``12 min``, ``2 h 5 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 10:
        return f"{round(seconds / 60, 1):g} min"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _first_estimate(metrics: Mapping[str, Any], sampling: float) -> float:
    """Return the seconds of a step by those of the first one: later, sampling and training overlap."""
    training = _sum(metrics, _PARTS["training"])
    return max(training, sampling) + _sum(metrics, _PARTS["publishing"])


def _sum(metrics: Mapping[str, Any], keys: Sequence[str]) -> float:
    return sum(float(metrics.get(key, 0.0)) for key in keys)


@dataclass(frozen=True)
class Start:
    """How far the start of a run is."""

    is_serving: bool
    """An engine is ready."""
    finished: int
    """Trajectories with a score."""
    right: int
    """Those whose score is above RIGHT."""
    groups: int
    """Finished groups with a signal, ready for the trainer."""


@contextlib.contextmanager
def told_progress(
    run: RunConfig, groups_per_step: int, pace: Pace, report: Callable[[str], None]
) -> Iterator[threading.Event]:
    """Report from a thread what the run waits for, and after a step how long the rest takes.

    Yields an event that is set when an engine serves, or when the progress cannot be read.
    """
    ended, serving = threading.Event(), threading.Event()
    teller = threading.Thread(
        target=lambda: asyncio.run(_tell(run, groups_per_step, pace, report, ended, serving)), daemon=True
    )
    teller.start()
    try:
        yield serving
    finally:
        ended.set()
        teller.join(_PROGRESS_STOP_SECONDS)


class StartLines:
    """Chooses when the state of a start is worth a line."""

    def __init__(self, groups_per_step: int) -> None:
        """``groups_per_step`` is what the trainer waits for."""
        self._groups = groups_per_step
        self._shown: Start | None = None
        self._last_line = 0.0

    def line(self, state: Start, seconds: float) -> str | None:
        """Return the line for ``state`` after ``seconds``; None if nothing new is worth one."""
        shown = self._shown
        only_counts = shown is not None and shown.is_serving == state.is_serving
        if state == shown or (only_counts and seconds - self._last_line < LINE_SECONDS):
            return None
        self._shown, self._last_line = state, seconds
        if not state.is_serving:
            return f"waiting for the engine, which loads the model ({seconds:.0f} s)"
        if shown is None or not shown.is_serving:
            return f"the engine is ready after {seconds:.0f} s; the samplers begin"
        ready = min(state.groups, self._groups)
        return (
            f"{'the trainer computes its step' if ready == self._groups else 'sampling'}:"
            f" {state.finished} trajectories have a score, {state.right} of them are right;"
            f" {ready} of {self._groups} groups are ready ({seconds:.0f} s)"
        )


async def _tell(
    run: RunConfig,
    groups_per_step: int,
    pace: Pace,
    report: Callable[[str], None],
    ended: threading.Event,
    serving: threading.Event,
) -> None:
    from agentrl.store.client import open_store

    began, lines = time.monotonic(), StartLines(groups_per_step)
    serving_since, is_first = began, True
    try:
        async with await open_store(run) as store:
            seen = _committed_at(await _last_committed(store))
            while not ended.is_set():
                last = await _last_committed(store)
                if last is not None and _committed_at(last) > seen:
                    seen = _committed_at(last)
                    training = float(last.metrics["seconds_forward_backward"])
                    line = pace.step(last.step, last.metrics, time.monotonic() - serving_since - training)
                    is_first = False
                elif is_first:
                    state = await _read_start(store)
                    if state.is_serving:
                        serving.set()
                    else:
                        serving_since = time.monotonic()
                    line = lines.line(state, time.monotonic() - began)
                    pace.waiting = line or pace.waiting
                else:
                    line = None
                if line is not None:
                    report(line)
                await store.wait_for_change(STEP, timeout=_POLL_SECONDS)
    except AgentRLError as error:  # only these lines are lost: the processes report their own errors
        logger.info("the progress of the run cannot be read: %s", error.message)
    finally:
        serving.set()


async def _last_committed(store: Store) -> StepRow | None:
    rows = await Views(store.connection).steps(status=StepStatus.COMMITTED, last=1)
    return rows[-1] if rows else None


def _committed_at(step: StepRow | None) -> float:
    return 0.0 if step is None or step.committed_at is None else step.committed_at.timestamp()


async def _read_start(store: Store) -> Start:
    views = Views(store.connection)
    engines = await views.engines()
    scores = [row.score for row in await views.trajectories(split="train") if row.score is not None]
    serving = (ServiceStatus.READY, ServiceStatus.UPDATING, ServiceStatus.LENT)
    counts = await Details(store.connection).groups()
    return Start(
        is_serving=any(engine.status in serving for engine in engines),
        finished=len(scores),
        right=sum(score > RIGHT for score in scores),
        groups=sum(count.groups - count.abandoned_groups for count in counts),
    )


STATE_DIR = Path(".agentrl/quickstart")
_MONGO_DIR = RunConfig.mongo_dir
_STOP_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class DemoPreset:
    """The defaults of one of the two quickstarts; ``minutes`` is the least time limit: see ``Pace``."""

    base_name: str
    tasks: str
    held_out: str | None = None
    """Tasks that are evaluated before and after the training."""
    steps: int
    minutes: float


REAL = DemoPreset(
    base_name="quickstart",
    tasks="calculator_train.jsonl",
    held_out="calculator_eval.jsonl",
    steps=12,
    minutes=10.0,
)
TINY = DemoPreset(base_name="quickstart-tiny", tasks="tiny_train.jsonl", steps=30, minutes=5.0)


@dataclass(frozen=True, kw_only=True)
class QuickstartRun:
    """One run. An unfinished run is resumed; after a finished one the next run gets the next number."""

    name: str
    tiny: bool
    steps: int
    seed: int
    resumed: bool = False

    @property
    def preset(self) -> DemoPreset:
        """The preset of this run."""
        return TINY if self.tiny else REAL

    @property
    def recipe(self) -> Path:
        """The YAML file with the run's flags."""
        return shipped_files() / "configs" / f"{self.preset.base_name}.yml"

    @property
    def tasks(self) -> Path:
        """The task file."""
        return shipped_files() / "tasks" / self.preset.tasks

    @property
    def logs(self) -> Path:
        """The folder of the processes' logs."""
        return Path("logs") / self.name

    @property
    def output(self) -> Path:
        """The folder of checkpoints, published weights and the plot."""
        return Path("output") / self.name


def run_quickstart(
    flags: QuickstartFlags, run_flags: RunConfig, train: TrainConfig, engine: EngineConfig,
    teacher: str | None = None,
) -> int:  # fmt: skip
    """Train until the run has its steps, print the report, and return 0.

    With a ``teacher``, a folder or the URL of a server, the policy learns from it instead of from scores.
    Raises AgentRLError if the trainer fails, and TimeLimitError if the time limit ended it; the run is then
    resumed by the next call. On a terminal the dashboard stays until Ctrl-C. MongoDB is stopped at the end if
    this started it.
    """
    if teacher is not None:
        require_teacher(teacher, ("teacher",))
    run = open_run(flags.run_name, tiny=flags.tiny, steps=flags.steps, seed=run_flags.seed)
    run_logging.setup(RunConfig(run_name=run.name, log_dir=str(run.logs)), "quickstart")
    mongo = EmbeddedMongo(Path(_MONGO_DIR))
    started_mongo = not mongo.status().running
    try:
        _report(f"run {run.name}: {'resuming' if run.resumed else 'starting'}")
        model = demo_model(run.seed if run.tiny else None)
        _report(f"database: {mongo.up().shown_uri} (data in {_MONGO_DIR})")
        with dashboard(run.name, run.logs / "dashboard.out") as address:
            _report(f"dashboard: {address}")
            pace = Pace(
                run.steps, minutes=flags.minutes, least_minutes=run.preset.minutes,
                ends_when_solved=flags.steps is None, skips_first=run.preset.held_out is not None,
            )  # fmt: skip
            extended = "" if flags.minutes is not None else ", or more after the first step if it is slow"
            _report(f"{run.steps} steps, at most {pace.limit}{extended}")
            plan = _plan(run, flags, model, train, engine, teacher)
            groups = int(yaml.safe_load(run.recipe.read_text(encoding="utf-8"))["groups_per_step"])
            with told_progress(RunConfig(run_name=run.name), groups, pace, _report) as serving:
                evaluations = HeldOutCommands(run, plan)
                code = run_processes(
                    plan, pace.deadline, serving, before=evaluations.before, after=evaluations.after
                )
                is_over = pace.is_over and not pace.is_solved
            _conclude(run, pace, code, is_over=is_over)
            if sys.stdin.isatty() and sys.stdout.isatty():
                _report(f"the dashboard stays until Ctrl-C: {address}")
                wait_for_signal()
        return 0
    finally:
        if started_mongo:
            mongo.down()


@dataclass(frozen=True)
class HeldOutCommands:
    """The commands that evaluate the held-out tasks of a run on its engine."""

    run: QuickstartRun
    plan: RunPlan

    def before(self) -> list[str] | None:
        """Return the command for version 0; None once there is another one."""
        return None if asyncio.run(self._last_version()) else self._command(0)

    def after(self) -> list[str] | None:
        """Return the command for the last version; None without a step."""
        last = asyncio.run(self._last_version())
        return self._command(last) if last else None

    def _command(self, version: int) -> list[str] | None:
        if self.run.preset.held_out is None:
            return None
        source = shipped_files() / "tasks" / self.run.preset.held_out
        lines, file = (
            source.read_text(encoding="utf-8").splitlines(keepends=True),
            self.run.logs / source.name,
        )
        replace_file(file, "".join(lines[:HELD_OUT_TASKS]).encode())
        _report(f"sampling {HELD_OUT_TASKS} held-out tasks with policy version {version}")
        flags = {"eval_file": file, "eval_version": version, "eval_engine": "shared"}
        return agentrl_command("eval", [*self.plan.flags, *flag_words(flags)])

    async def _last_version(self) -> int:
        from agentrl.store.client import open_store

        async with await open_store(RunConfig(run_name=self.run.name)) as store:
            last = await store.policy_versions.latest()
            return 0 if last is None else last.id


def _plan(
    run: QuickstartRun, flags: QuickstartFlags, model: Path, train: TrainConfig, engine: EngineConfig,
    teacher: str | None,
) -> RunPlan:  # fmt: skip
    distils = {"loss_calculater": "OPD", "columns": "teacher", "teacher": teacher}
    words = flag_words(
        {
            "config": run.recipe,
            "train_file": run.tasks,
            "run_name": run.name,
            "log_dir": run.logs,
            "model_name_or_path": model,
            "seed": run.seed,
            "mcp_servers_file": SERVERS_FILE,
            "task_selection": flags.task_selection,
            "engine": engine.engine,
            "max_steps": run.steps,
            "prefix_merging": train.prefix_merging,
            "keep_every": train.keep_every,
            **(distils if teacher is not None else {}),
        }
    )
    return RunPlan(
        name="quickstart",
        logs=run.logs,
        flags=words,
        engines=1,
        samplers=flags.samplers,
        teaches=teacher is not None,
        main=agentrl_command("train", words),
        has_demo_tools=True,
        # With one arena, memory that a thread has freed is used by the next one: processes stay smaller.
        variables={"MALLOC_ARENA_MAX": "1", "HF_HUB_OFFLINE": "1"},
        run=RunConfig(run_name=run.name),
    )


def _conclude(run: QuickstartRun, pace: Pace, code: int, *, is_over: bool) -> None:
    """Print the report of a run whose trainer has ended, and mark it as finished. Raises AgentRLError."""
    if code != 0:
        raise disk_problem(Path(_MONGO_DIR)) or AgentRLError(
            f"the trainer ended with exit code {code}", hint=f"its log is in {run.logs}; run this again"
        )
    outcome = asyncio.run(read_outcome(run.name, run.output))
    if outcome is not None:
        print_report(run.name, run.output, outcome)
    done = 0 if outcome is None else len(outcome.rewards)
    if is_over and done < run.steps:
        raise pace.ended(done)
    if outcome is None:
        raise AgentRLError("the trainer ended before its first step", hint=f"its log is in {run.logs}")
    close_run(run)


def open_run(name: str | None, *, tiny: bool, steps: int | None, seed: int) -> QuickstartRun:
    """Return the unfinished run to resume, or a new one. Raises ConfigError."""
    preset = TINY if tiny else REAL
    candidates = [name] if name else [preset.base_name, *(f"{preset.base_name}-{n}" for n in range(2, 1000))]
    for candidate in candidates:
        try:
            state = json.loads(_state_file(candidate).read_text(encoding="utf-8"))
        except FileNotFoundError:
            run = QuickstartRun(name=candidate, tiny=tiny, steps=steps or preset.steps, seed=seed)
            return _write_state(run, finished=False)
        if not state["finished"] and state["tiny"] == tiny and state["seed"] == seed:
            target = steps or int(state["steps"])
            run = QuickstartRun(name=candidate, tiny=tiny, steps=target, seed=seed, resumed=True)
            return _write_state(run, finished=False)
    raise ConfigError(
        f"the run {name} is finished, or was started with other settings",
        hint="choose another --run_name, or leave it out to use the next free one",
    )


def close_run(run: QuickstartRun) -> None:
    """Mark a run as finished: the next quickstart starts a new one."""
    _write_state(run, finished=True)


def _write_state(run: QuickstartRun, *, finished: bool) -> QuickstartRun:
    path = _state_file(run.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {**dataclasses.asdict(run), "finished": finished}
    replace_file(path, json.dumps(state, indent=2).encode())
    return run


def _state_file(name: str) -> Path:
    return STATE_DIR / name / "state.json"


@contextmanager
def dashboard(run_name: str, log: Path) -> Iterator[str]:
    """Serve the dashboard during the block, and yield the login link of the run's page.

    The token reaches it by a pipe: arguments, environment, files and logs of this user are open to the run's
    harnesses.
    It answers a few seconds later. Training does not depend on it: if it ends, only ``log`` says so.
    """
    port, token = free_port(*range(8900, 8920)), secrets.token_urlsafe(32)
    command = agentrl_command("dashboard", ["--port", str(port), "--token_file", "/dev/stdin"])
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(token.encode())
    try:
        yield f"http://127.0.0.1:{port}/runs/{run_name}?token={token}"
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_signal() -> None:
    """Return at SIGINT, which Ctrl-C sends, or SIGTERM."""
    with contextlib.suppress(StoppedBySignalError), raise_on_signals():
        while True:
            signal.pause()


def _report(text: str) -> None:
    print(f"quickstart: {text}", flush=True)
