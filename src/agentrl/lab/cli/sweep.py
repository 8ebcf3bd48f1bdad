"""``agentrl sweep FILE``: what-ifs of one run with other settings and seeds, judged on held-out tasks.

    agentrl sweep losses.yml
    agentrl sweep losses.yml --parallel 2 --json > losses.json
    agentrl sweep losses.yml --state

All that it knows is in the runs' databases: the same command goes on after a kill, and with more settings.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.base.atomic_folder import replace_file
from agentrl.config.load import CommandParser, group_of
from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from agentrl.lab.sweep import Key, Race, Show, Standing, Sweep, SweepChild

_WIDE, _NARROW_COLUMNS = 120, 4
"""Columns of a terminal that holds the whole table, and those of the table that a narrower one shows."""


def main(argv: list[str]) -> int:
    """Run a sweep, or show where it is; 1 if a child failed, 130 if a signal stopped it."""
    return asyncio.run(_main(parser().parse_args(argv)))


def parser() -> CommandParser:
    """Return the parser."""
    command = CommandParser(
        prog="agentrl sweep",
        description="Trains the stored steps of a run again under several settings and seeds, evaluates each"
        " child on held-out tasks, and stops settings that are clearly worse. FILE names the run, the steps,"
        " the settings and the evaluation. The same command goes on after a kill.",
    )
    command.add_argument("file", metavar="FILE", type=Path, help="the sweep, YAML or JSON")
    command.add_argument(
        "--parallel",
        type=int,
        default=1,
        help="children at a time, each with as many of the visible GPUs (default: 1)",
    )
    command.add_argument("--state", action="store_true", help="show where the sweep is, and start nothing")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    command.add_argument(
        "--output_dir", type=Path, default=Path("output"),
        help="folder of the children's folders, of their logs and of NAME.json (default: output)",
    )  # fmt: skip
    command.add_database()
    return command


async def _main(arguments: argparse.Namespace) -> int:
    from agentrl.lab.sweep import SweepRunner, race, read_children, read_sweep, standings
    from agentrl.observe.terminal import print_json, stdout_console
    from agentrl.store.client import open_existing

    if arguments.parallel < 1:
        raise ConfigError(f"--parallel is {arguments.parallel}", hint="give 1 or more")
    sweep = await asyncio.to_thread(read_sweep, arguments.file)
    run = replace(group_of(RunConfig, arguments), run_name=sweep.run, output_dir=None)
    output, console = arguments.output_dir, stdout_console()
    shares = [{}] if arguments.state else await asyncio.to_thread(_shares, arguments.parallel)
    code = 0
    failed: dict[str, str] = {}
    async with await open_existing(run) as source:
        if not arguments.state:
            _make_folder(output)
            with _live_table(sweep) if sys.stdout.isatty() and not arguments.json else nullcontext() as show:
                runner = SweepRunner(source, sweep, run, output, shares, show)
                code, failed = await runner.run(), runner.failed
        children = await read_children(source, sweep)
    found = race(sweep, children, failed)
    listed = standings(sweep, children, found)
    value = _to_json(sweep, listed, found, failed)
    if not arguments.state:
        await asyncio.to_thread(_write, output / f"{sweep.run}_{sweep.name}.json", value)
    if arguments.json:
        print_json(value)
    else:
        console.print(_table(sweep, listed, failed, console.width))
    return code


def _shares(parallel: int) -> list[dict[str, str]]:
    """Return the environment of each child that runs at a time: its own GPUs, if there are any to divide."""
    from agentrl.local.placement import UnseenGpuError, find_gpus

    try:
        gpus = find_gpus(os.environ) if parallel > 1 else None
    except UnseenGpuError as error:
        print(f"no GPU is assigned to a child: {error.message}; {error.hint}", file=sys.stderr)
        gpus = None
    return gpus.split(parallel) if gpus is not None else [{} for _ in range(parallel)]


@contextmanager
def _live_table(sweep: Sweep) -> Iterator[Show]:
    """Return the function that shows the state in place; the table is gone at the end."""
    from rich.live import Live

    from agentrl.lab.sweep import standings
    from agentrl.observe.terminal import stdout_console

    console = stdout_console()
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def show(children: Mapping[Key, SweepChild], found: Race, failed: Mapping[str, str]) -> None:
            listed = standings(sweep, children, found)
            live.update(_table(sweep, listed, failed, console.width), refresh=True)

        yield show


def _table(sweep: Sweep, listed: Sequence[Standing], failed: Mapping[str, str], width: int) -> Table:
    """Return a row per setting, the best first; ``width`` is the terminal's."""
    from agentrl.lab.sweep import MEANS
    from agentrl.observe.terminal import MISSING, number, table

    rows = []
    for item in listed:
        score = MISSING if item.score is None else (
            f"{item.score.value:.3f} [{item.score.low:.3f}, {item.score.high:.3f}]"
        )  # fmt: skip
        behind = MISSING
        if item.against_best is not None:
            effect = item.against_best.effect
            behind = f"{0 - effect.value:+.3f} [{0 - effect.high:+.3f}, {0 - effect.low:+.3f}]"
        seeds = [f"{child.score:.3f}" for child in item.children if child.score is not None]
        means = [number(item.means.get(name)) for name in MEANS]
        rows.append(
            [
                item.setting.shown,
                _state(sweep, item, failed),
                score,
                behind,
                " ".join(seeds) or MISSING,
                *means,
            ]
        )
    steps = "all steps" if sweep.steps is None else f"steps {sweep.steps}"
    columns = ["setting", "seeds", "score", "against the best", "by seed", *MEANS]
    shown = len(columns) if width >= _WIDE else _NARROW_COLUMNS
    title = f"{sweep.name}: {steps} of {sweep.run}, trained again"
    return table(title, columns[:shown], [row[:shown] for row in rows], text=2)


def _state(sweep: Sweep, item: Standing, failed: Mapping[str, str]) -> str:
    from agentrl.lab.sweep import is_done

    done = sum(is_done(sweep, child) for child in item.children)
    if item.setting.id in failed:
        return "failed"
    if item.stopped_after is not None:
        return f"{done}/{len(item.children)}, stopped"
    current = next((child for child in item.children if child.range and not is_done(sweep, child)), None)
    text = f"{done}/{len(item.children)}"
    if current is None:
        return text
    return f"{text}, {'evaluating' if current.is_trained else f'step {current.steps}'}"


def _to_json(
    sweep: Sweep, listed: Sequence[Standing], found: Race, failed: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "name": sweep.name,
        "run": sweep.run,
        "steps": sweep.steps,
        "seeds": list(sweep.seeds),
        "is_finished": not found.missing and not failed,
        "settings": [{**item.to_json(), "failed": failed.get(item.setting.id)} for item in listed],
    }


def _make_folder(output: Path) -> None:
    """Make ``--output_dir`` with the folder of the logs. Raises ConfigError."""
    try:
        (output / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--output_dir {output} cannot be made: {error.strerror}", hint="give the path of a folder"
        ) from error


def _write(path: Path, value: Mapping[str, Any]) -> None:
    """Replace the file. Raises ConfigError for one that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(value, indent=2).encode())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}", hint="give another --output_dir"
        ) from error
