"""``agentrl fork RUN NEW --from_step N``: a run that begins at a stored checkpoint of another."""

from __future__ import annotations

import argparse
import asyncio
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agentrl.config.flags import flag_words
from agentrl.config.load import CommandParser, group_of
from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.documents.run import PolicyVersion, RunSettings

_OWN: Final = {"run_name", "output_dir", "log_dir"}
"""Flags of the parent that its child must not repeat."""


def main(argv: list[str]) -> int:
    """Begin the child and print how it is started."""
    return asyncio.run(fork(parser().parse_args(argv)))


def parser() -> CommandParser:
    """Return the parser."""
    command = CommandParser(
        prog="agentrl fork",
        description="Begins the run NEW with the weights, the optimizer and the data order that RUN had after"
        " a stored step. Nothing that RUN sampled or trained is copied. Samplers, engines and the trainer of"
        " NEW are started as ever, with the flags of RUN or with others.",
    )
    command.add_argument("run_name", metavar="RUN", help="the parent; it may be running")
    command.add_argument("new_name", metavar="NEW", help="the name of the new run")
    command.add_argument("--from_step", type=int, help="a step with a checkpoint; default: the newest one")
    command.add_argument("--output_dir", help="RUN's output folder (default: its trainer's, or output/RUN)")
    command.add_database()
    return command


async def fork(arguments: argparse.Namespace) -> int:
    """Check everything, make the child's database, and print its commands."""
    from agentrl.documents.run import PARENT, Relative
    from agentrl.lab.fork import Fork
    from agentrl.observe.progress import progress
    from agentrl.store.client import open_connection, open_existing

    new, step = arguments.new_name, arguments.from_step
    if step is not None and step < 1:
        raise ConfigError(f"--from_step is {step}", hint="give a step with a checkpoint, 1 or more")
    if new == arguments.run_name:
        raise ConfigError(f"{new} is the parent and cannot be the new run", hint="give another name")
    run = replace(group_of(RunConfig, arguments), output_dir=None)
    named = await open_connection(replace(run, run_name=new))  # refuses a name that differs in case only
    await named.close()
    await asyncio.to_thread(_require_empty, Path(replace(run, run_name=new).output))
    async with await open_existing(run) as store:
        flags = await store.settings.resolved()
        stored = flags["train"].values.get("output_dir") if "train" in flags else None
        parent_output = Path(arguments.output_dir or stored or run.output)
        work = Fork(store.connection)
        found = await work.checkpoint(parent_output, step)
        step, folder = found.state.step, found.folder.resolve()
        weights = await asyncio.to_thread(_weights_of, folder / "model")
        begun = Relative(id=PARENT, run=run.run_name, kind="fork", step=step, checkpoint=str(folder))
        with progress(f"forking run {run.run_name}, tasks") as bar:
            result = await work.begin(new, begun, weights, on_documents=bar.advance)
    print(
        f"{new} begins after step {step} of {run.run_name}, with policy version {result.version} from"
        f" {folder}\n{result.inherited:,} tasks are trained, {result.waiting:,} wait to be sampled"
    )
    for role in ("serve", "sample", "train"):
        if role in flags:
            print(f"  {command_of(flags[role], role, new)}")
    return 0


def _require_empty(output: Path) -> None:
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty, and the new run writes there", hint="give another name")


def _weights_of(model: Path) -> PolicyVersion:
    """Return the version that a checkpoint's model is; the store numbers it."""
    from agentrl.documents.run import PolicyVersion
    from agentrl.weights.folder import checksums, is_adapter

    adapter = is_adapter(model)
    return PolicyVersion(
        id=0, step=0, location=str(model), files=checksums(model), train_step=None,
        encoding="adapter" if adapter else "full", base=0 if adapter else None,
    )  # fmt: skip


def command_of(settings: RunSettings, role: str, run_name: str) -> str:
    """Return the command line that gives a process of ``role`` the flags of the parent's.

    A trainer also gets the precision that the parent's has measured.
    """
    measured = {"autocast_bf16": settings.values.get("autocast_bf16", "auto")} if role == "train" else {}
    flags = measured | dict(settings.given_values)
    words = flag_words({name: value for name, value in flags.items() if name not in _OWN})
    return shlex.join(["agentrl", role, "--run_name", run_name, *words])
