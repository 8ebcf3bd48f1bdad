"""``agentrl quickstart``: every process of a run on this machine, ending with a plotted reward."""

from __future__ import annotations

import os

from agentrl.config.load import CommandParser, group_of
from agentrl.config.run import URI_VARIABLES, QuickstartFlags
from agentrl.config.schema import EngineConfig, RunConfig, TrainConfig
from agentrl.extras import require
from agentrl.supervise import StoppedBySignalError, stop_on_signals


def main(argv: list[str]) -> int:
    """Parse the flags, run, and print the result. The run uses the embedded server, whatever is set."""
    for name in URI_VARIABLES:
        os.environ.pop(name, None)
    parser = CommandParser(prog="agentrl quickstart", description=__doc__)
    parser.add_flags(QuickstartFlags)
    parser.add_flags(EngineConfig, "engine")
    parser.add_flags(RunConfig, "seed")
    parser.add_flags(TrainConfig, "prefix_merging", "keep_every")
    arguments = parser.parse_args(argv)
    flags = group_of(QuickstartFlags, arguments)
    for package in ("torch", "matplotlib"):
        require(package, "agentrl quickstart", extra="quickstart")
    from agentrl.launch.quickstart import run_quickstart

    run = RunConfig(seed=arguments.seed)
    try:
        with stop_on_signals():
            return run_quickstart(
                flags, run, group_of(TrainConfig, arguments), group_of(EngineConfig, arguments)
            )
    except StoppedBySignalError as stopped:
        return stopped.exit_code
