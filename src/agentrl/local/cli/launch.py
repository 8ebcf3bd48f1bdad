"""``agentrl launch`` and ``quickstart``: every process of a run on this machine, of a user or of the demo.

    agentrl quickstart
    agentrl launch train --recipe grpo --run_name NAME [--flag VALUE …]
    agentrl launch eval --recipe eval --run_name NAME [--flag VALUE …]

Engines and the trainer get GPUs of their own. A process that crashes is restarted. If one ends because of its
configuration, the reason is printed and the others are stopped. Nothing is started if the run has a live
trainer, or was begun with other settings.
"""

from __future__ import annotations

import os

from agentrl.base.installation import require
from agentrl.base.processes import StoppedBySignalError, raise_on_signals
from agentrl.config.load import CommandParser, group_of, parse
from agentrl.config.run import URI_VARIABLES, QuickstartFlags
from agentrl.config.schema import (
    EngineConfig,
    ModelConfig,
    PlacementConfig,
    RunConfig,
    TeacherConfig,
    TrainConfig,
)
from agentrl.errors import ConfigError
from agentrl.local.before_start import TASK_FILES, flags_of_variables


def main(argv: list[str]) -> int:
    """Prepare the model and the database, then run the processes until the main one ends."""
    command = argv[0] if argv[:1] and not argv[0].startswith("-") else "train"
    if command not in TASK_FILES:
        raise ConfigError(
            f"unknown word {command!r}; choose one of {', '.join(TASK_FILES)}",
            hint="agentrl launch train, or agentrl launch eval",
        )
    flags = [*flags_of_variables(os.environ, TASK_FILES[command]), *argv[argv[:1] == [command] :]]
    configs = parse(
        flags,
        command="agentrl launch",
        description="Starts the processes of a run on this machine, on GPUs of their own: `agentrl launch"
        " train` (database, engines, samplers, trainer) or `agentrl launch eval` (engines and an evaluation)."
        " Restarts those that crash. The scripts grpo.sh, minirl.sh and eval.sh start it with a recipe.",
        shown=[PlacementConfig, RunConfig, ModelConfig, EngineConfig],
    )
    try:
        with raise_on_signals():
            from agentrl.local.before_start import prepare
            from agentrl.local.processes import run_processes

            return run_processes(prepare(command, flags, configs, os.environ))
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
