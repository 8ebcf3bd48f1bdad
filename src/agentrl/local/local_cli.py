"""The commands of one machine: launch, quickstart, mongo, plan and try.

Flags are read before anything heavy is imported, so that ``--help`` is instant.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.base.installation import require
from agentrl.base.processes import StoppedBySignalError, cancel_on_signals, raise_on_signals
from agentrl.config.flags import flag_words
from agentrl.config.load import CommandParser, Configs, group_of, leading_words, parse
from agentrl.config.run import URI_VARIABLES, QuickstartFlags
from agentrl.config.schema import (
    AdapterConfig,
    AgentConfig,
    ContainerConfig,
    DeviceConfig,
    EngineConfig,
    EngineListConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TeacherConfig,
    ToolConfig,
    TraceConfig,
    TrainConfig,
    flag,
)
from agentrl.config.training import PlanConfig
from agentrl.errors import ConfigError, did_you_mean, quoted

if TYPE_CHECKING:
    from agentrl.local.mongod import EmbeddedMongo, EmbeddedStatus
    from agentrl.local.plan.search import PlannedServices, Search


_VARIABLES = {
    "model_name_or_path": "MODEL_PATH",
    "tp_size": "TP_SIZE",
    "mcp_manager_url": "MCP_MANAGER_URL",
    "agent_config_path": "AGENT_CONFIG",
    "engine": "ENGINE",
}


def launch(argv: list[str]) -> int:
    """Prepare the model and the database, then run the processes until the main one ends.

        agentrl launch train --recipe dapo --run_name NAME [--flag VALUE …]
        agentrl launch eval --recipe eval --run_name NAME [--flag VALUE …]

    Engines and the trainer get GPUs of their own. A process that crashes is restarted. If one ends because of
    its configuration, the reason is printed and the others are stopped. Nothing is started if the run has a
    live trainer, or was begun with other settings.
    """
    command = argv[0] if argv[:1] and not argv[0].startswith("-") else "train"
    if command not in ("train", "eval"):
        raise ConfigError(
            f"unknown word {command!r}; choose one of train, eval",
            hint=did_you_mean(command, ("train", "eval")),
        )
    flags = [*flags_of_variables(os.environ, f"{command}_file"), *argv[argv[:1] == [command] :]]
    configs = parse(
        flags,
        command="agentrl launch",
        needs_run=True,
        description="Starts the processes of a run on this machine, on GPUs of their own: `agentrl launch"
        " train` (database, engines, samplers, trainer) or `agentrl launch eval` (engines and an evaluation)."
        " Restarts those that crash. The scripts grpo.sh, minirl.sh and eval.sh start it with a recipe.",
        shown=[PlacementConfig, RunConfig, ModelConfig, EngineConfig],
    )
    try:
        with raise_on_signals():
            from agentrl.local.launch import prepare, run_processes

            return run_processes(prepare(command, flags, configs, os.environ))
    except StoppedBySignalError as stopped:
        return stopped.exit_code


def flags_of_variables(variables: Mapping[str, str], tasks: str) -> list[str]:
    """Return the flags that the environment variables set; later flags of the command line override them.

    ``tasks`` is the flag of the run's task file, ``train_file`` or ``eval_file``.

    MONGO_URI and MONGO_URI_FILE are left to the processes, so that no password is in a command line.
    """
    named = {**_VARIABLES, tasks: tasks.upper()}
    if not variables.get("MCP_MANAGER_URL"):
        named["mcp_servers_file"] = "MCP_SERVERS_FILE"
    return flag_words({flag: variables[name] for flag, name in named.items() if variables.get(name)})


def quickstart(argv: list[str]) -> int:
    """Run the demo and print the result. The run uses the embedded server, whatever is set."""
    for name in URI_VARIABLES:
        os.environ.pop(name, None)
    parser = CommandParser(
        prog="agentrl quickstart",
        description="Runs every process of a small run on this machine, and ends with a plotted reward.",
    )
    parser.add_flags(QuickstartFlags)
    parser.add_flags(EngineConfig, "engine")
    parser.add_flags(RunConfig, "seed")
    parser.add_flags(TrainConfig, "prefix_merging", "keep_every")
    parser.add_flags(TeacherConfig, "teacher")
    arguments = parser.parse_args(argv)
    flags = group_of(QuickstartFlags, arguments)
    for package in ("torch", "matplotlib"):
        require(package, "agentrl quickstart", extra="quickstart")
    from agentrl.local.quickstart import run_quickstart

    run = RunConfig(seed=arguments.seed)
    try:
        with raise_on_signals():
            return run_quickstart(
                flags,
                run,
                group_of(TrainConfig, arguments),
                group_of(EngineConfig, arguments),
                arguments.teacher,
            )
    except StoppedBySignalError as stopped:
        return stopped.exit_code


def mongo(argv: list[str]) -> int:
    """Run one action; ``status`` and ``uri`` exit with 3 if the server is down."""
    parser = CommandParser(prog="agentrl mongo", description="The embedded MongoDB of this machine.")
    parser.add_argument(
        "action", choices=("up", "status", "uri", "down"), help="uri prints the URI with the password"
    )
    parser.add_argument("--mongo_dir", "--dir", default=RunConfig.mongo_dir, help="its folder (%(default)s)")
    parser.add_argument("--mongod", help="up: the mongod to start (default: the newest usable one)")
    parser.add_argument("--port", type=int, help="up: move it to this port (0: any free one)")
    parser.add_argument("--json", action="store_true", help="status: print one JSON value")
    arguments = parser.parse_args(argv)

    from agentrl.local.mongod import EmbeddedMongo
    from agentrl.observe.terminal import print_json

    if arguments.json and arguments.action != "status":
        raise ConfigError(f"--json goes with status, not with {arguments.action}", hint="leave --json out")
    server = EmbeddedMongo(arguments.mongo_dir)
    if arguments.action == "down":
        print("stopped" if server.down() else f"no embedded MongoDB is running under {server.directory}")
        return 0
    if arguments.action == "up":
        status = server.up(arguments.port, mongod=arguments.mongod)
        _report_choice(status)
    else:
        status = server.status()
    if arguments.json:
        # Without the password, which ``uri`` alone prints.
        print_json(
            {
                "running": status.running, "pid": status.pid, "port": status.port, "data": server.dbpath,
                "log": server.log, "uri": status.shown_uri if status.running else None,
                "version": ".".join(map(str, status.version)) if status.version else None,
            }
        )  # fmt: skip
    elif not status.running:
        print(f"no embedded MongoDB is running under {server.directory}\n  → agentrl mongo up")
    else:
        print(status.uri if arguments.action == "uri" else _description(server, status))
    return 0 if status.running else 3


def _report_choice(status: EmbeddedStatus) -> None:
    """Say which mongod was started and why others were not; say nothing if the server was running."""
    from agentrl.local.mongod import version_text

    choice = status.choice
    if choice is None:
        return
    for reason in choice.skipped:
        print(f"skipped {reason}")
    print(f"started {choice.mongod}")
    if choice.upgrades and choice.data_version is not None:
        written, now = version_text(choice.data_version), version_text(choice.mongod.version)
        print(f"the data of {written} now belong to {now}: an older mongod cannot open them any more")


def _description(server: EmbeddedMongo, status: EmbeddedStatus) -> str:
    from agentrl.local.mongod import end_of_life_notice, version_text

    version = f"MongoDB {version_text(status.version)}  " if status.version else ""
    lines = [
        f"running  {version}pid {status.pid}  data {server.dbpath}  log {server.log}",
        str(status.shown_uri),
    ]
    notice = end_of_life_notice(status.version, date.today()) if status.version else None
    if notice:
        lines += [notice, "  → a newer mongod: docs/databases.md"]
    lines.append(f"for Compass, with the password: agentrl mongo uri --mongo_dir {quoted(server.directory)}")
    return "\n".join(lines)


NOTHING_FITS = 3
"""Exit code of ``agentrl plan`` when no layout fits."""


def plan(argv: list[str]) -> int:
    """Print the plan; return 3 if no layout fits."""
    configs = parse(
        argv,
        command="agentrl plan",
        description="Plans a training run without a GPU: memory per rank, the layouts that fit, ordered by"
        " estimated time, their flags, and how many samplers, engines and database nodes they need. Sizes and"
        " memory flags that are given are kept; the others are searched.",
        shown=[
            ModelConfig,
            TaskConfig,
            TrainConfig,
            MemoryConfig,
            AdapterConfig,
            OptimConfig,
            DeviceConfig,
        ],
        extra=[PlanConfig],
    )
    search, services = _search(configs)
    from agentrl.local.plan.search import plan_json, print_plan
    from agentrl.observe.terminal import stdout_console

    if configs[PlanConfig].json:
        print(json.dumps(plan_json(search, services), indent=2))
    else:
        print_plan(stdout_console(), search, services)
    return NOTHING_FITS if services is None else 0


def _search(configs: Configs) -> tuple[Search, PlannedServices | None]:
    """Return the layouts, and the services beside the fastest one that fits; None if none fits."""
    from agentrl.weights.folder import require_config

    flags = configs[PlanConfig]
    folder = flags.model or configs[ModelConfig].model_name_or_path
    if folder is None:
        raise ConfigError("no model is given", hint="give --model FOLDER; its config.json is enough")
    require_config(Path(folder), "--model")
    from agentrl.local.placement import parse_gpus

    cluster = parse_gpus(
        flags.gpus,
        memory_gib=flags.gpu_memory_gib,
        per_node=flags.gpus_per_node,
        network_gbps=flags.network_gbps,
    )
    engine = parse_gpus(flags.engine_gpu).gpu if flags.engine_gpu else cluster.gpu
    from agentrl.local.plan.memory import (  # torch: after what can be wrong
        critic_parameters,
        open_model,
        reference_parameters,
    )
    from agentrl.local.plan.search import Search, build_workload, size_services

    work = build_workload(configs)
    trust = configs[ModelConfig].trust_remote_code
    model = open_model(Path(folder), flags.context, trust_remote_code=trust)
    search = Search(
        model=model, work=work, cluster=cluster, configs=configs,
        reference_parameters=reference_parameters(configs, model),
        critic_parameters=critic_parameters(configs, model),
    )  # fmt: skip
    search.run()
    fitting = next((item for item in search.verdicts if item.state == "fits"), None)
    if fitting is None:
        return search, None
    return search, size_services(
        model, work, fitting.candidate.time.total, engine,
        request_tokens_per_second=flags.request_tokens_per_second, tool_seconds=flags.tool_seconds,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TryConfig:
    """Which task to try, and on which engine."""

    line: int | None = flag(None, "line of the task in the file (default: its first task)")
    prompt: bool = flag(False, "print the first prompt as the model reads it, and call no engine")
    oracle: bool = flag(
        False, "run the tests of Harbor tasks untouched and after their own solutions, and call no engine"
    )


def try_one(argv: list[str]) -> int:
    """Run one trajectory of a task: JSON, a task's id in the run, or a task file. Return 1 if it fails."""
    wanted = leading_words(argv, 1)
    configs = parse(
        argv[len(wanted) :],
        command="agentrl try TASK",
        description="Runs one trajectory of TASK and prints it; nothing is kept. TASK is a JSON object, the"
        " id of a task of the run, or a task file or folder. The trial has a database of its own on the"
        " server of the run, which is dropped at the end. Without --engine_url and a live engine of the run,"
        " the local engine serves --model_name_or_path for the trial.",
        shown=[
            RunConfig,
            ModelConfig,
            SamplingConfig,
            AgentConfig,
            ToolConfig,
            ContainerConfig,
            EngineListConfig,
            TraceConfig,
        ],
        extra=[TryConfig],
    )
    if not wanted:
        raise ConfigError(
            "agentrl try takes a task",
            hint='give its JSON, e.g. \'{"query": "1+1?", "answer": "2", "scorer": "exact"}\'; or a'
            " task's id, or a task file",
        )
    from agentrl.local.try_task import run_solutions, try_task
    from agentrl.observe.tracing import tracing

    flags = configs[TryConfig]
    if flags.oracle:
        return asyncio.run(cancel_on_signals(run_solutions(configs, wanted[0], line=flags.line)))
    with tracing(configs, "try"):
        url = configs[EngineConfig].engine_url
        trial = try_task(configs, wanted[0], line=flags.line, engine_url=url, prompt=flags.prompt)
        return asyncio.run(cancel_on_signals(trial))
