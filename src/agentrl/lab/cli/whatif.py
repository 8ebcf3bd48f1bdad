"""``agentrl whatif`` trains stored steps of a run again with other flags, and compares the two.

    agentrl whatif math --steps 40-60 --loss_calculater GSPO
    agentrl whatif math math_slow --learning_rate 1e-7
    agentrl whatif --compare math_gspo,math_cispo --out losses.html

It needs the database and the checkpoints of the parent, no engine and no sampler. The child is a run with a
database and a folder of its own, which reads the data of the parent where they lie.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agentrl.config.flags import names_in, require_writable
from agentrl.config.load import Configs, leading_words, parse
from agentrl.config.schema import (
    GroupConfig,
    LossConfig,
    MemoryConfig,
    OptimConfig,
    RunConfig,
    TraceConfig,
)
from agentrl.errors import ConfigError
from agentrl.lab.flags import WhatIfConfig, check_flags

_NAMES = 2
"""Words before the flags: the parent and the child."""


def main(argv: list[str]) -> int:
    """Train the stored steps again; return 0."""
    names = leading_words(argv, _NAMES)
    configs = parse(
        argv[len(names) :],
        command="agentrl whatif RUN [NEW]",
        description="Trains stored steps of RUN again, in their order, with another loss, advantage,"
        " correction, group rule or learning rate, and compares the two. NEW, by default RUN_whatif_N, reads"
        " the data of RUN where they lie, and needs no engine and no sampler. Without such flags it gives"
        " RUN's own weights, bit for bit on the same machine. `agentrl whatif --compare NEW,NEW` trains"
        " nothing and compares several.",
        shown=(RunConfig, LossConfig, GroupConfig, OptimConfig, MemoryConfig, TraceConfig),
        extra=(WhatIfConfig,),
    )
    flags = configs[WhatIfConfig]
    if "run_name" in configs.given or len(set(names)) < len(names):
        raise ConfigError(
            "--run_name names no run here"
            if "run_name" in configs.given
            else f"{names[0]} is the parent and cannot be the new run",
            hint="agentrl whatif RUN NEW --loss_calculater GSPO",
        )
    if bool(names) == bool(flags.compare):
        raise ConfigError(
            "no run is named" if not names else "--compare trains nothing, and a run is named",
            hint="agentrl whatif RUN --loss_calculater GSPO; or agentrl whatif --compare CHILD,CHILD",
        )
    check_flags(configs)
    require_writable("--out", flags.out)
    from agentrl.observe.logging import setup

    children = names_in(flags.compare)
    setup(replace(configs[RunConfig], run_name=[*names, *children][0]), "whatif")
    if children:
        return _compare(children, configs, flags.out or f"output/{children[0]}/whatif.html")
    from agentrl.distributed.mesh import is_first_rank
    from agentrl.lab.whatif_run import train_again

    child = train_again(names[0], names[1] if len(names) == _NAMES else None, configs)
    if not is_first_rank():
        return 0
    folder = configs[RunConfig].output_dir or f"output/{child}"
    return _compare([child], configs, flags.out or f"{folder}/whatif.html")


def _compare(children: Sequence[str], configs: Configs, out: str) -> int:
    """Print the table and write the page; return 0."""
    from agentrl.lab.whatif import compare_runs, print_comparison, write_page
    from agentrl.observe.terminal import stdout_console

    found = asyncio.run(compare_runs(children, configs))
    print_comparison(stdout_console(), found)
    write_page(found, Path(out))
    print(out)
    return 0
