"""``agentrl quickstart``: every process of a run on this machine, ending with a plotted reward."""

from __future__ import annotations

import os

from agentrl.config.load import CommandParser
from agentrl.config.run import URI_VARIABLES
from agentrl.config.schema import EngineConfig, RunConfig, TrainConfig
from agentrl.errors import ConfigError
from agentrl.extras import require
from agentrl.quickstart.run import Options, run_quickstart
from agentrl.supervise import StoppedBySignalError, stop_on_signals


def main(argv: list[str]) -> int:
    """Parse the flags, run, and print the result. The run uses the embedded server, whatever is set."""
    for name in URI_VARIABLES:
        os.environ.pop(name, None)
    options = _parse(argv)
    for package in ("torch", "matplotlib"):
        require(package, "agentrl quickstart", extra="quickstart")
    try:
        with stop_on_signals():
            return run_quickstart(options)
    except StoppedBySignalError as stopped:
        return stopped.exit_code


def _parse(argv: list[str]) -> Options:
    parser = CommandParser(prog="agentrl quickstart", description=__doc__)
    parser.add_argument(
        "--tiny", action="store_true", help="a two-layer model made here: four to five minutes"
    )
    parser.add_argument("--steps", type=int, help="optimizer steps of the whole run")
    parser.add_argument(
        "--minutes", type=float, help="time limit of the training (default: it follows the measured speed)"
    )
    parser.add_flags(EngineConfig, "engine")
    parser.add_argument("--samplers", type=int, default=2, help="sampler processes (default: 2)")
    parser.add_flags(RunConfig, "seed")
    parser.add_flags(TrainConfig, "prefix_merging", "keep_every")
    parser.add_argument(
        "--task_selection", choices=("order", "pass_rate"), default="order",
        help="what is sampled next: the next task, or one whose pass rate is near ½ (default: order)",
    )  # fmt: skip
    parser.add_argument("--run_name", help="name of the run (default: quickstart, or the next free number)")
    options = Options(**vars(parser.parse_args(argv)))
    for name in ("steps", "minutes", "samplers"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ConfigError(f"--{name} is {value}", hint=f"give --{name} a value above 0")
    if options.run_name is not None:
        RunConfig(run_name=options.run_name)
    return options
