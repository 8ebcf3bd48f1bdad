"""``agentrl quickstart``: every process of a run on this machine, ending with a plotted reward."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.load import CommandParser
from agentrl.config.schema import RunConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.observe import logging as run_logging
from agentrl.quickstart import runs
from agentrl.quickstart.report import print_report, read_outcome
from agentrl.quickstart.runs import QuickstartRun
from agentrl.store.embedded.server import EmbeddedMongo
from agentrl.supervise import Member, StoppedBySignalError, Supervisor, stop_on_signals

MONGO_DIR = ".agentrl/mongo"


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


def main(argv: list[str]) -> int:
    """Parse the flags, run, and print what came out."""
    options = _parse(argv)
    try:
        with stop_on_signals():
            return _run(options)
    except StoppedBySignalError as stopped:
        return stopped.exit_code


def _run(options: Options) -> int:
    run = runs.open_run(options.run_name, tiny=options.tiny, steps=options.steps, seed=options.seed)
    run_logging.setup(RunConfig(run_name=run.name, log_dir=str(run.logs)), "quickstart")
    mongo = EmbeddedMongo(Path(MONGO_DIR))
    started_mongo = not mongo.status().running
    try:
        _say(f"run {run.name}: {'resuming' if run.resumed else 'starting'}")
        model = _prepare_model(options)
        status = mongo.up()
        _say(f"database: {status.shown_uri} (data in {MONGO_DIR})")
        code = _train(run, options, model)
        if code != 0:
            raise AgentRLError(
                f"the trainer ended with exit code {code}",
                hint=f"its log is under {run.logs}; run this again",
            )
        outcome = asyncio.run(read_outcome(run, MONGO_DIR))
        runs.close_run(run)
        print_report(run, outcome)
        return 0
    finally:
        if started_mongo:
            mongo.down()


def _parse(argv: list[str]) -> Options:
    parser = CommandParser(prog="agentrl quickstart", description=__doc__)
    parser.add_argument(
        "--tiny", action="store_true", help="a two-layer model made here: four to five minutes"
    )
    parser.add_argument("--steps", type=int, help="optimizer steps of the whole run")
    parser.add_argument("--minutes", type=float, help="stop training after so many minutes")
    parser.add_argument("--engine", choices=("local", "sglang", "vllm"), default="local")
    parser.add_argument("--samplers", type=int, default=2, help="sampler processes (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--prefix_merging", choices=("off", "trajectory", "group"), default="group",
        help="what the trainer computes once (default: what a group shares)",
    )  # fmt: skip
    parser.add_argument(
        "--task_selection", choices=("order", "pass_rate"), default="order",
        help="what is sampled next: the next task, or one whose pass rate is near ½ (default: order)",
    )  # fmt: skip
    parser.add_argument(
        "--keep_every", type=int, default=0, help="keep every N-th published version (default: 0, none)"
    )
    parser.add_argument("--run_name", help="name of the run (default: quickstart, or the next free number)")
    options = Options(**vars(parser.parse_args(argv)))
    for name in ("steps", "minutes", "samplers"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ConfigError(f"--{name} is {value}", hint=f"give --{name} a value above 0")
    if options.run_name is not None:
        RunConfig(run_name=options.run_name)
    return options


def _prepare_model(options: Options) -> Path:
    if options.tiny:
        from agentrl.quickstart.warmup import prepare_tiny_model

        return prepare_tiny_model(options.seed, _say)
    from agentrl.quickstart.smollm import prepare_smollm

    return prepare_smollm(_say)


def _train(run: QuickstartRun, options: Options, model: Path) -> int:
    supervisor = Supervisor(_say)
    servers = runs.tool_servers(run)
    common = [
        "--config", str(run.config), "--run_name", run.name, "--log_dir", str(run.logs),
        "--model_name_or_path", str(model), "--mongo_dir", MONGO_DIR, "--seed", str(options.seed),
        "--mcp_servers_file", str(servers.file), "--task_selection", options.task_selection,
    ]  # fmt: skip
    try:
        supervisor.start(_member(run, "units-server", servers.http_command, threads=1, serves=True))
        engine = _agentrl("serve", [*common, "--engine", options.engine])
        supervisor.start(_member(run, "engine", engine, threads=1, serves=True))
        for index in range(options.samplers):
            supervisor.start(_member(run, f"sampler-{index}", _agentrl("sample", common), threads=1))
        minutes = options.minutes if options.minutes is not None else run.minutes
        _say(
            f"an engine ({options.engine}), {options.samplers} samplers and a trainer are starting:"
            f" {run.steps} steps, at most {minutes:g} minutes; logs in {run.logs}"
        )
        trainer = Member(
            "trainer",
            _agentrl(
                "train",
                [
                    *common,
                    "--max_steps",
                    str(run.steps),
                    "--prefix_merging",
                    options.prefix_merging,
                    "--keep_every",
                    str(options.keep_every),
                ],
            ),
            None,
            _environment(threads=run.trainer_threads),
        )
        return supervisor.run_main(trainer, deadline=time.monotonic() + 60 * minutes)
    except StoppedBySignalError:
        _say("stopping: the trainer finishes its step and saves; the same command resumes")
        raise
    finally:
        supervisor.stop()


def _member(
    run: QuickstartRun, name: str, command: list[str], *, threads: int, serves: bool = False
) -> Member:
    return Member(name, command, run.logs / f"{name}.out", _environment(threads=threads), serves)


def _agentrl(command: str, flags: list[str]) -> list[str]:
    return [sys.executable, "-m", "agentrl", command, *flags]


def _environment(*, threads: int) -> dict[str, str]:
    """Few threads a process: with more than there are cores, OpenMP's spinning starves everybody."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def _say(text: str) -> None:
    print(f"quickstart: {text}", flush=True)
