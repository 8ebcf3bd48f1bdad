"""Run the quickstart: choose or resume its run, write its files, and supervise its processes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agentrl.config.schema import RunConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.observe import logging as run_logging
from agentrl.processes import half_of_cores, thread_limits
from agentrl.quickstart.dashboard import dashboard, wait_for_signal
from agentrl.quickstart.pace import Pace
from agentrl.quickstart.report import print_report, read_outcome
from agentrl.quickstart.waiting import told_progress
from agentrl.shipped_files import shipped_files
from agentrl.store.embedded.server import EmbeddedMongo, disk_problem
from agentrl.supervise import StoppedBySignalError, SupervisedProcess, Supervisor

MONGO_DIR = ".agentrl/mongo"
STATE_DIR = Path(".agentrl/quickstart")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The flags of ``agentrl quickstart``."""

    tiny: bool
    steps: int | None
    minutes: float | None
    engine: str
    samplers: int
    seed: int
    prefix_merging: str
    task_selection: str
    keep_every: int
    run_name: str | None


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
    def config(self) -> Path:
        """The YAML file with the run's hyperparameters."""
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


@dataclass(frozen=True)
class ToolServers:
    """The MCP servers of a run: the file that configures them, and the command of the HTTP server."""

    file: Path
    http_command: list[str]


def run_quickstart(options: Options) -> int:
    """Train until the run has its steps, print the report, and return 0.

    Raises AgentRLError if the trainer fails, and TimeLimitError if the time limit ended it; the run is then
    resumed by the next call. On a terminal the dashboard stays until Ctrl-C. MongoDB is stopped at the end if
    this started it.
    """
    run = open_run(options.run_name, tiny=options.tiny, steps=options.steps, seed=options.seed)
    run_logging.setup(RunConfig(run_name=run.name, log_dir=str(run.logs)), "quickstart")
    mongo = EmbeddedMongo(Path(MONGO_DIR))
    started_mongo = not mongo.status().running
    try:
        _report(f"run {run.name}: {'resuming' if run.resumed else 'starting'}")
        model = _prepare_model(options)
        status = mongo.up()
        _report(f"database: {status.shown_uri} (data in {MONGO_DIR})")
        with dashboard(run.name, MONGO_DIR, run.logs / "dashboard.out") as address:
            _report(f"dashboard: {address}")
            pace = Pace(run.steps, minutes=options.minutes, least_minutes=run.preset.minutes)
            code, is_over = _train(run, options, model, pace)
            if code != 0:
                raise disk_problem(mongo.directory) or AgentRLError(
                    f"the trainer ended with exit code {code}",
                    hint=f"its log is in {run.logs}; run this again",
                )
            outcome = asyncio.run(read_outcome(run.name, run.output, MONGO_DIR))
            done = 0 if outcome is None else len(outcome.rewards)
            if outcome is not None:
                print_report(run.name, run.output, outcome)
            if is_over and done < run.steps:
                raise pace.ended(done)
            if outcome is None:
                raise AgentRLError(
                    "the trainer ended before its first step", hint=f"its log is in {run.logs}"
                )
            close_run(run)
            if sys.stdin.isatty() and sys.stdout.isatty():
                _report(f"the dashboard stays until Ctrl-C: {address}")
                wait_for_signal()
        return 0
    finally:
        if started_mongo:
            mongo.down()


def open_run(name: str | None, *, tiny: bool, steps: int | None, seed: int) -> QuickstartRun:
    """Return the unfinished run to resume, or a new one. Raises ConfigError."""
    preset = TINY if tiny else REAL
    candidates = [name] if name else [preset.base_name, *(f"{preset.base_name}-{n}" for n in range(2, 1000))]
    for candidate in candidates:
        state = _read_state(candidate)
        if state is None:
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


def tool_servers(run: QuickstartRun) -> ToolServers:
    """Write the run's tool-server file: the calculator over stdio, the unit converter over HTTP."""
    port = _free_port()
    python = sys.executable
    content = {
        "servers": {
            "calculator": {
                "command": python,
                "args": ["-m", "agentrl.quickstart.servers.calculator"],
                "scope": "shared",
            },
            "units": {"url": f"http://127.0.0.1:{port}/mcp"},
        }
    }
    path = STATE_DIR / run.name / "mcp_servers.yml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return ToolServers(path, [python, "-m", "agentrl.quickstart.servers.units", "--port", str(port)])


def _prepare_model(options: Options) -> Path:
    if options.tiny:
        from agentrl.quickstart.tiny import prepare_tiny_model

        return prepare_tiny_model(options.seed, _report)
    from agentrl.quickstart.smollm import prepare_smollm

    return prepare_smollm(_report)


def _train(run: QuickstartRun, options: Options, model: Path, pace: Pace) -> tuple[int, bool]:
    """Start the tool server, the engine and the samplers, and run the trainer.

    Returns the trainer's exit code, and whether it ended after the time limit.
    """
    supervisor = Supervisor(_report)
    servers = tool_servers(run)
    common = [
        "--config", str(run.config), "--train_file", str(run.tasks), "--run_name", run.name,
        "--log_dir", str(run.logs), "--model_name_or_path", str(model), "--mongo_dir", MONGO_DIR,
        "--seed", str(options.seed), "--mcp_servers_file", str(servers.file),
        "--task_selection", options.task_selection,
    ]  # fmt: skip
    trainer_flags = [
        *common, "--max_steps", str(run.steps), "--prefix_merging", options.prefix_merging,
        "--keep_every", str(options.keep_every),
    ]  # fmt: skip

    def process(name: str, command: list[str], *, is_server: bool = False) -> SupervisedProcess:
        log = None if name == "trainer" else run.logs / f"{name}.out"
        threads = half_of_cores() if name in ("trainer", "engine") else 1
        return SupervisedProcess(name, command, log, _environment(threads), is_server=is_server)

    try:
        supervisor.start(process("units-server", servers.http_command, is_server=True))
        engine = _agentrl("serve", [*common, "--engine", options.engine])
        supervisor.start(process("engine", engine, is_server=True))
        for index in range(options.samplers):
            supervisor.start(process(f"sampler-{index}", _agentrl("sample", common)))
        extended = "" if options.minutes is not None else ", or more after the first step if it is slow"
        _report(
            f"an engine ({options.engine}), {options.samplers} samplers and a trainer are starting:"
            f" {run.steps} steps, at most {pace.limit}{extended}; logs in {run.logs}"
        )
        trainer = process("trainer", _agentrl("train", trainer_flags))
        config = RunConfig(run_name=run.name, mongo_dir=MONGO_DIR)
        with told_progress(config, _groups_per_step(run), pace, _report):
            code = supervisor.run_main(trainer, deadline=pace.deadline)
            return code, pace.is_over
    except StoppedBySignalError:
        _report("stopping: the trainer finishes its step and saves; the same command resumes")
        raise
    finally:
        supervisor.stop()


def _groups_per_step(run: QuickstartRun) -> int:
    settings: dict[str, Any] = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    return int(settings["groups_per_step"])


def _agentrl(command: str, flags: list[str]) -> list[str]:
    return [sys.executable, "-m", "agentrl", command, *flags]


def _environment(threads: int) -> dict[str, str]:
    # With one arena, memory that a thread has freed is used by the next one: trainer and engine stay smaller.
    return {**os.environ, **thread_limits(threads), "MALLOC_ARENA_MAX": "1", "HF_HUB_OFFLINE": "1"}


def _report(text: str) -> None:
    print(f"quickstart: {text}", flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _state_file(name: str) -> Path:
    return STATE_DIR / name / "state.json"


def _read_state(name: str) -> dict[str, Any] | None:
    try:
        state: dict[str, Any] = json.loads(_state_file(name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return state


def _write_state(run: QuickstartRun, *, finished: bool) -> QuickstartRun:
    path = _state_file(run.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {**dataclasses.asdict(run), "finished": finished}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(state, indent=2), encoding="utf-8")
    partial.replace(path)
    return run
