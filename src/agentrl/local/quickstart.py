"""Run the quickstart: choose or resume its run, start its processes, say what it waits for, and report."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TextIO

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
from agentrl.errors import AgentRLError, ConfigError
from agentrl.inference.engines.commands import require_engine
from agentrl.local.launch import (
    SERVERS_FILE,
    RunPlan,
    agentrl_command,
    demo_model,
    require_teacher,
    run_processes,
)
from agentrl.local.mongod import EmbeddedMongo, disk_problem
from agentrl.local.quickstart_progress import ENDS, RIGHT, Pace, is_solved, told_progress
from agentrl.observe import logging as run_logging
from agentrl.observe.terminal import excerpt
from agentrl.screens.views.counts import Details
from agentrl.screens.views.pipelines import TrajectoryRow
from agentrl.screens.views.read import Views, WholeTrajectory

if TYPE_CHECKING:
    from agentrl.store.client import Store

EXCERPT_CHARS = 96

HELD_OUT_TASKS = 24
"""Tasks that are evaluated before and after: two take as long as a step."""


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
    def reward(self) -> str:
        """The mean rewards of the first and the last ``ENDS`` steps, of fewer where those are the same."""
        count, ends = len(self.rewards), min(ENDS, len(self.rewards) // 2)
        if not ends:
            return f"reward {self.rewards[0]:.3f} in 1 step"
        first, last = fmean(self.rewards[:ends]), fmean(self.rewards[-ends:])
        return f"reward {first:.3f} -> {last:.3f} over {count} steps"

    @property
    def is_solved(self) -> bool:
        """The last three steps have a reward of SOLVED."""
        return is_solved(self.rewards)


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
    solved = [f"solved      the reward of the last {ENDS} steps is {fmean(outcome.rewards[-ENDS:]):.2f}"]
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
        outcome.reward,
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
    this started it. Raises AgentRLError at once if another quickstart runs in this folder.
    """
    if teacher is not None:
        require_teacher(teacher, ("teacher",))
    require_engine(engine.engine)
    with alone_in_folder() as holder:
        run = open_run(flags.run_name, tiny=flags.tiny, steps=flags.steps, seed=run_flags.seed)
        print(os.getpid(), run.name, end="", file=holder, flush=True)
        return _run(run, flags, train, engine, teacher)


def _run(
    run: QuickstartRun, flags: QuickstartFlags, train: TrainConfig, engine: EngineConfig, teacher: str | None
) -> int:
    run_logging.setup(RunConfig(run_name=run.name, log_dir=str(run.logs)), "quickstart")
    mongo = EmbeddedMongo(Path(_MONGO_DIR))
    started_mongo = not mongo.status().running
    try:
        _report(f"run {run.name}: {'resuming' if run.resumed else 'starting'}")
        model = demo_model(run.seed if run.tiny else None)
        _report(f"database: {mongo.up().shown_uri} (data in {_MONGO_DIR})")
        with dashboard(run.name, run.logs / "dashboard.out") as address:
            _report(f"dashboard: {address}")
            held_out = run.preset.held_out if flags.evaluate else None
            pace = Pace(
                run.steps, minutes=flags.minutes, least_minutes=run.preset.minutes,
                ends_when_solved=flags.steps is None, skips_first=held_out is not None,
            )  # fmt: skip
            extended = "" if flags.minutes is not None else ", or more after the first step if it is slow"
            _report(f"{run.steps} steps, at most {pace.limit}{extended}")
            plan = _plan(run, flags, model, train, engine, teacher)
            groups = int(yaml.safe_load(run.recipe.read_text(encoding="utf-8"))["groups_per_step"])
            with told_progress(RunConfig(run_name=run.name), groups, pace, _report) as serving:
                evaluations = HeldOutCommands(run, plan, held_out)
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
    tasks: str | None
    """Name of the shipped file; None: nothing is evaluated."""

    def before(self) -> list[str] | None:
        """Return the command for version 0; None once there is another one."""
        return None if asyncio.run(self._last_version()) else self._command(0)

    def after(self) -> list[str] | None:
        """Return the command for the last version; None without a step."""
        last = asyncio.run(self._last_version())
        return self._command(last) if last else None

    def _command(self, version: int) -> list[str] | None:
        if self.tasks is None:
            return None
        source = shipped_files() / "tasks" / self.tasks
        file = self.run.logs / source.name
        replace_file(file, b"".join(source.read_bytes().splitlines(keepends=True)[:HELD_OUT_TASKS]))
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


@contextmanager
def alone_in_folder() -> Iterator[TextIO]:
    """Hold this folder for the block; yield the file for the pid of this process and the name of its run.

    Raises AgentRLError, which names the holder, if another quickstart has the folder: both would resume the
    same run, and the first to end would stop the database of the other.
    """
    STATE_DIR.mkdir(parents=True, exist_ok=True)
    # The lock ends with this process, however it ends; its children do not inherit the descriptor.
    with (STATE_DIR / "holder").open("a+", encoding="utf-8") as holder:
        try:
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder.seek(0)
            pid, _, name = holder.read().partition(" ")
            raise AgentRLError(
                f"a quickstart runs in this folder already: process {pid}, run {name}",
                hint=f"wait for it, or stop it: kill {pid} (it saves its step, and the same command resumes"
                f" it); `agentrl status {name}` shows it; or start this one in another folder",
            ) from None
        holder.truncate(0)
        yield holder


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
