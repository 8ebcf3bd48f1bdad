"""``agentrl launch`` and ``quickstart``: every process of a run on this machine, of a user or of the demo.

    agentrl quickstart
    agentrl launch train --recipe grpo --run_name NAME [--flag VALUE …]
    agentrl launch eval --recipe eval --run_name NAME [--flag VALUE …]

Engines and the trainer get GPUs of their own. A process that crashes is restarted. If one ends because of its
configuration, the reason is printed and the others are stopped. Nothing is started if the run has a live
trainer, or was begun with other settings.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.arguments import flag_words
from agentrl.config.launch import QuickstartFlags
from agentrl.config.load import CommandParser, group_of, parse
from agentrl.config.run import URI_VARIABLES
from agentrl.config.schema import (
    EngineConfig,
    EvaluationConfig,
    GroupConfig,
    ModelConfig,
    PlacementConfig,
    RunConfig,
    TeacherConfig,
    TrainConfig,
)
from agentrl.errors import ConfigError
from agentrl.extras import require
from agentrl.launch.recipe import (
    AccelerateConfig,
    flags_of_variables,
    read_accelerate_config,
    read_recipe,
)
from agentrl.supervise import StoppedBySignalError, raise_on_signals

if TYPE_CHECKING:
    from agentrl.cli.placement import Placement
    from agentrl.launch.processes import RunPlan

ROLES = ("serve", "sample", "train")
_COMMANDS = ("train", "eval")


def main(argv: list[str]) -> int:
    """Prepare the model and the database, then run the processes until the main one ends."""
    try:
        with raise_on_signals():
            plan = _plan(argv, os.environ)
            from agentrl.launch.processes import run_processes

            return run_processes(plan)
    except StoppedBySignalError as stopped:
        return stopped.exit_code


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
    from agentrl.launch.quickstart import run_quickstart

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


def _plan(argv: list[str], variables: Mapping[str, str]) -> RunPlan:
    """Return what to start: everything is checked, the model is made, and the database runs."""
    command = argv[0] if argv[:1] and not argv[0].startswith("-") else "train"
    if command not in _COMMANDS:
        raise ConfigError(
            f"unknown word {command!r}; choose one of {', '.join(_COMMANDS)}",
            hint="agentrl launch train, or agentrl launch eval",
        )
    tasks = "train_file" if command == "train" else "eval_file"
    flags = [*flags_of_variables(variables, tasks), *argv[argv[:1] == [command] :]]
    configs = parse(
        flags,
        command="agentrl launch",
        description="Starts the processes of a run on this machine, on GPUs of their own: `agentrl launch"
        " train` (database, engines, samplers, trainer) or `agentrl launch eval` (engines and an evaluation)."
        " Restarts those that crash. The scripts grpo.sh, minirl.sh and eval.sh start it with a recipe.",
        shown=[PlacementConfig, RunConfig, ModelConfig, EngineConfig],
    )
    from agentrl.cli.gpus import place_processes
    from agentrl.launch.before_start import fit, require_joinable, require_teacher, require_usable
    from agentrl.launch.demo import SERVERS_FILE, default_servers, demo_model
    from agentrl.launch.processes import RunPlan
    from agentrl.store.embedded.server import EmbeddedMongo

    recipe = read_recipe(configs, tasks)
    flags, configs = [*flag_words(recipe), *flags], configs.with_flags(recipe)
    run = configs[RunConfig]

    def report(text: str) -> None:
        print(f"{run.run_name}: {text}", flush=True)

    roles = _roles(variables) if command == "train" else {"serve", "eval"}
    if command == "eval" and configs.given & {"eval_engine", "eval_model"}:
        roles = {"eval"}
    elif command == "eval":
        flags = ["--eval_engine", "shared", *flags]
    accelerate = read_accelerate_config(variables.get("ACCELERATE_CONFIG")) if "train" in roles else None
    machines = 1
    if accelerate is not None:
        machines, configs = accelerate.machines, configs.with_flags(accelerate.sizes)
    is_demo = configs[ModelConfig].model_name_or_path is None
    servers = default_servers(configs, is_demo=is_demo) if roles & {"sample", "eval"} else None
    if servers is not None:
        flags = ["--mcp_servers_file", str(SERVERS_FILE), *flags]
    if is_demo:
        model = {"model_name_or_path": str(demo_model())}
        flags, configs = [*flag_words(model), *flags], configs.with_flags(model)
    agreed = require_usable(configs, roles)
    columns = configs[GroupConfig].column_names
    teacher = configs[TeacherConfig].teacher if command == "train" and "sample" in roles else None
    if teacher is not None:
        require_teacher(teacher, columns)
    elif command == "train" and columns:
        report(f"groups wait for {', '.join(columns)}, and no --teacher is given: start agentrl teach too")
    has_database = run.db_connection_string is not None or EmbeddedMongo(run.mongo_dir).status().running
    if has_database:
        asyncio.run(require_joinable(configs, roles, agreed))
    placement = place_processes(
        configs, report, serves="serve" in roles, machines=machines,
        trains="train" in roles and not (accelerate is not None and accelerate.uses_cpu),
    )  # fmt: skip
    flags = fit(configs, flags, placement, machines, report, is_training=command == "train")
    if not has_database:
        EmbeddedMongo(run.mongo_dir).up()
        report(f"MongoDB started (data in {run.mongo_dir}); stop it with: agentrl mongo down")
        asyncio.run(require_joinable(configs, roles, agreed))
    return RunPlan(
        name=run.run_name,
        logs=Path(run.log_dir),
        flags=flags,
        engines=len(placement.engines) if placement is not None else int("serve" in roles),
        port=configs[EngineConfig].port,
        samplers=int(variables.get("SAMPLERS") or "2") if "sample" in roles else 0,
        main=_main_command(command, flags, accelerate, placement) if command in roles else None,
        follows=command == "train" and configs[EvaluationConfig].eval_steps is not None,
        teaches=teacher is not None,
        has_demo_tools=servers is not None,
        inf_mem_ratio=configs[EngineConfig].inf_mem_ratio,
        placement=placement,
    )


def _roles(variables: Mapping[str, str]) -> set[str]:
    roles = set((variables.get("ROLES") or " ".join(ROLES)).split())
    unknown = sorted(roles - set(ROLES))
    if unknown:
        raise ConfigError(f"ROLES names {', '.join(unknown)}", hint=f"choose among: {', '.join(ROLES)}")
    return roles


def _main_command(
    command: str, flags: Sequence[str], accelerate: AccelerateConfig | None, placement: Placement | None
) -> list[str]:
    """Return the command of the evaluation, or of the trainer with a process for each of its GPUs."""
    processes = len(placement.trainer) if placement is not None else 0
    if placement is not None and placement.is_colocated:
        flags = [*flags, "--colocate", "true"]
    module = ["-m", "agentrl.train", *flags]
    if command == "train" and accelerate is not None:
        program = [str(Path(sys.executable).with_name("accelerate")), "launch"]
        count = ["--num_processes", str(processes * accelerate.machines)] if processes else []
        return [*program, "--config_file", accelerate.path, *count, *module]
    if command == "train" and processes > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*launcher, "--nproc_per_node", str(processes), *module]
    return [sys.executable, "-m", "agentrl", command, *flags]
