"""Run the quickstart: choose or resume its run, start its processes, and report what it learned."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agentrl.atomic_folder import replace_file
from agentrl.config.arguments import flag_words
from agentrl.config.launch import QuickstartFlags
from agentrl.config.schema import EngineConfig, RunConfig, TrainConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.launch.before_start import require_teacher
from agentrl.launch.demo import SERVERS_FILE, demo_model
from agentrl.launch.processes import RunPlan, agentrl_command, run_processes
from agentrl.launch.progress import Pace, told_progress
from agentrl.launch.report import print_report, read_outcome
from agentrl.observe import logging as run_logging
from agentrl.processes import free_port
from agentrl.shipped_files import shipped_files
from agentrl.store.embedded.server import EmbeddedMongo, disk_problem
from agentrl.supervise import StoppedBySignalError, raise_on_signals

STATE_DIR = Path(".agentrl/quickstart")
_MONGO_DIR = RunConfig.mongo_dir
_STOP_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The defaults of one of the two quickstarts; ``minutes`` is the least time limit: see ``Pace``."""

    base_name: str
    tasks: str
    steps: int
    minutes: float


REAL = Preset(base_name="quickstart", tasks="calculator_train.jsonl", steps=12, minutes=10.0)
TINY = Preset(base_name="quickstart-tiny", tasks="tiny_train.jsonl", steps=30, minutes=5.0)


@dataclass(frozen=True, kw_only=True)
class QuickstartRun:
    """One run. An unfinished run is resumed; after a finished one the next run gets the next number."""

    name: str
    tiny: bool
    steps: int
    seed: int
    resumed: bool = False

    @property
    def preset(self) -> Preset:
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
            pace = Pace(run.steps, minutes=flags.minutes, least_minutes=run.preset.minutes)
            extended = "" if flags.minutes is not None else ", or more after the first step if it is slow"
            _report(f"{run.steps} steps, at most {pace.limit}{extended}")
            plan = _plan(run, flags, model, train, engine, teacher)
            groups = int(yaml.safe_load(run.recipe.read_text(encoding="utf-8"))["groups_per_step"])
            with told_progress(RunConfig(run_name=run.name), groups, pace, _report) as serving:
                code = run_processes(plan, pace.deadline, serving)
                is_over = pace.is_over
            _conclude(run, pace, code, is_over=is_over)
            if sys.stdin.isatty() and sys.stdout.isatty():
                _report(f"the dashboard stays until Ctrl-C: {address}")
                wait_for_signal()
        return 0
    finally:
        if started_mongo:
            mongo.down()


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
