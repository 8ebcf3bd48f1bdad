"""``agentrl blame`` ranks the trajectories that moved held-out tasks between two evaluations of a run."""

from __future__ import annotations

import asyncio

from agentrl.config.flags import require_writable
from agentrl.config.load import Configs, leading_words, parse
from agentrl.config.schema import ModelConfig, RunConfig, TrainConfig
from agentrl.documents.record import check_label
from agentrl.errors import ConfigError
from agentrl.lab.flags import BlameConfig


def main(argv: list[str]) -> int:
    """Parse ``argv``, and print and write the ranking; 130 if a signal stopped it."""
    named = leading_words(argv, 3)
    configs = parse(
        argv[len(named) :],
        command="agentrl blame RUN EVAL_A EVAL_B",
        description="Ranks the trajectories that RUN trained between the versions of two evaluations by how"
        " far each one moved the held-out tasks as they changed from A to B: the inner product of its"
        " gradient with that of the tasks' score. Groups them by scorer, tool, version and task. A and B are"
        " ids, parts of ids or versions; `agentrl eval report` lists them.",
        shown=[RunConfig, ModelConfig, TrainConfig],
        extra=[BlameConfig],
    )
    if len(named) != 3:
        raise ConfigError(
            f"agentrl blame takes a run and two evaluations, and {len(named)} words are given",
            hint="`agentrl eval report --run_name RUN` lists the evaluations of a run",
        )
    flags = configs[BlameConfig]
    require_writable("--out", flags.out)
    require_writable("--csv", flags.csv)
    if flags.label is not None:
        check_label(label=flags.label, note="", by="blame", score=None)
    configs = configs.with_flags({"run_name": named[0]})

    from agentrl.observe.logging import setup

    setup(configs[RunConfig], "blame", console_level=30)
    return asyncio.run(_blame(configs, named[1], named[2]))


async def _blame(configs: Configs, a: str, b: str) -> int:
    from agentrl.base.processes import STOPPED, stop_on_signals
    from agentrl.lab.blame import blame, put_labels, show, to_json, write_files
    from agentrl.observe.progress import Parts, StoppedError
    from agentrl.observe.terminal import print_json, stdout_console
    from agentrl.store.client import open_existing

    flags = configs[BlameConfig]
    progress = Parts("blame", stop_on_signals())
    try:
        async with progress.lines():
            found = await blame(configs, a, b, progress)
    except StoppedError as stopped:
        progress.say(f"stopped in {stopped}: nothing is written")
        return STOPPED
    blamed = found.effects[: flags.top_of(len(found.effects))]
    write_files(found, blamed, flags)
    if flags.label is not None:
        async with await open_existing(configs[RunConfig]) as store:
            await put_labels(store, found, blamed, flags.label)
    if flags.json:
        print_json(to_json(found, blamed, flags))
    else:
        show(found, blamed, flags, stdout_console())
        run = configs[RunConfig].run_name
        if flags.out is not None:
            print(f"{flags.out}: {len(blamed)} ids; without them: agentrl whatif {run} --without {flags.out}")
        if flags.csv is not None:
            print(f"{flags.csv}: the effects of {len(found.effects)} trajectories")
        if flags.label is not None:
            print(f"{len(blamed)} labels: agentrl audit records --run_name {run} --label {flags.label}")
    return 0
