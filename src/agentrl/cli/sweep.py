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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.load import CommandParser, group_of
from agentrl.config.run import DATABASE_FLAGS
from agentrl.config.schema import RunConfig
from agentrl.errors import AgentRLError, ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from agentrl.evaluation.sweep import Child, Key, Race, Standing
    from agentrl.evaluation.sweep_file import HeldOut, Sweep
    from agentrl.store.client import Store

_STOPPED = 130
_READ_SECONDS = 2.0
_GRACE_SECONDS = 120.0
"""How long a child may finish its step and its checkpoint after a signal."""
_WIDE, _NARROW_COLUMNS = 120, 4
"""Columns of a terminal that holds the whole table, and those of the table that a narrower one shows."""
_SAMPLING_ROLES = ("serve", "sample")
_NOT_OF_EVAL = frozenset({
    "run_name", "output_dir", "log_dir", "colocate", "num_generations", "train_file", "eval_file",
    "engine_url", "host", "port", *DATABASE_FLAGS,
})  # fmt: skip
"""Flags of the parent's engines and samplers that an evaluation of a child does not take over."""


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
    command.add_argument("--parallel", type=int, default=1, help="children at a time (default: 1)")
    command.add_argument("--state", action="store_true", help="show where the sweep is, and start nothing")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    command.add_argument(
        "--output_dir", type=Path, default=Path("output"),
        help="folder of the children's folders, of their logs and of NAME.json (default: output)",
    )  # fmt: skip
    for name, default in zip(DATABASE_FLAGS, (None, ".agentrl/mongo", 30.0), strict=True):
        command.add_flags(RunConfig, name, default=default)
    return command


async def _main(arguments: argparse.Namespace) -> int:
    from agentrl.evaluation.sweep import race, read_children, standings
    from agentrl.evaluation.sweep_file import read_sweep
    from agentrl.observe.terminal import print_json, stdout_console
    from agentrl.store.client import open_existing

    if arguments.parallel < 1:
        raise ConfigError(f"--parallel is {arguments.parallel}", hint="give 1 or more")
    sweep = await asyncio.to_thread(read_sweep, arguments.file)
    flags = argparse.Namespace(**vars(arguments) | {"run_name": sweep.run, "output_dir": None})
    code, running = 0, None
    async with await open_existing(group_of(RunConfig, flags)) as source:
        if not arguments.state:
            running = _Running(source, sweep, arguments)
            code = await running.run()
        children = await read_children(source, sweep, running.children if running is not None else None)
    failed = {} if running is None else running.failed
    found = race(sweep, children, failed)
    listed = standings(sweep, children, found)
    value = _to_json(sweep, listed, found, failed)
    if running is not None:
        path = arguments.output_dir / f"{sweep.run}_{sweep.name}.json"
        await asyncio.to_thread(_write, path, value)
    if arguments.json:
        print_json(value)
    else:
        console = stdout_console()
        console.print(_table(sweep, listed, failed, console.width))
    return code


class _Running:
    """Runs the children of a sweep, round after round."""

    def __init__(self, source: Store, sweep: Sweep, arguments: argparse.Namespace) -> None:
        self._source = source
        self._sweep = sweep
        self._parallel: int = arguments.parallel
        self._output: Path = arguments.output_dir
        self._is_live = sys.stdout.isatty() and not arguments.json
        self._database = _database_words(arguments)
        self._environment = dict(os.environ)
        if arguments.db_connection_string is not None:  # not on the command line, which others can read
            self._environment["MONGO_URI"] = arguments.db_connection_string
        if self._parallel > 1:
            threads = max(1, len(os.sched_getaffinity(0)) // self._parallel)
            self._environment.setdefault("OMP_NUM_THREADS", str(threads))
        self._steps = ""
        self._of_eval: Mapping[str, Any] = {}
        self.children: dict[Key, Child] = {}
        self.failed: dict[str, str] = {}
        """Setting's id → why one of its children failed; the setting takes no further part."""

    async def run(self) -> int:
        """Run what is missing; return 0, 1 if a child failed, 130 if a signal stopped it."""
        from agentrl.evaluation.sweep import race, read_children, standings
        from agentrl.observe.terminal import stdout_console
        from agentrl.processes import stop_on_signals

        if self._sweep.eval is not None:
            self._of_eval = await _eval_flags(self._source, self._sweep.eval)
            await _check_tasks(self._of_eval)
        self.children = await read_children(self._source, self._sweep)
        self._steps = self._sweep.steps or await self._all_steps()
        stop = stop_on_signals()
        active: dict[Key, asyncio.Task[None]] = {}
        with ExitStack() as stack:
            live = None
            if self._is_live:
                from rich.live import Live

                console = stdout_console()
                live = stack.enter_context(Live(console=console, transient=True, auto_refresh=False))
            try:
                while not stop.is_set():
                    self.children = await read_children(self._source, self._sweep, self.children)
                    found = race(self._sweep, self.children, self.failed)
                    for child in found.missing:
                        key = child.setting.id, child.seed
                        if key not in active and len(active) < self._parallel:
                            active[key] = asyncio.create_task(self._complete(child))
                    if not active:
                        return 1 if self.failed else 0
                    if live is not None:
                        listed = standings(self._sweep, self.children, found)
                        shown = _table(self._sweep, listed, self.failed, live.console.width)
                        live.update(shown, refresh=True)
                    stopping = asyncio.create_task(stop.wait())
                    await asyncio.wait(
                        {*active.values(), stopping},
                        timeout=_READ_SECONDS,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    stopping.cancel()
                    for key in [key for key, task in active.items() if task.done()]:
                        self._end(key, active.pop(key))
                return _STOPPED
            finally:
                for task in active.values():
                    task.cancel()
                await asyncio.gather(*active.values(), return_exceptions=True)

    async def _all_steps(self) -> str:
        """Return the steps of the children that are begun, else all: the parent may go on meanwhile."""
        for child in self.children.values():
            if child.range:
                return f"{child.range[0]}-{child.range[-1]}"
        steps = await self._source.steps.find()
        if not steps:
            raise ConfigError(
                f"run {self._sweep.run!r} has no trained step",
                hint="agentrl runs lists the runs and their steps",
            )
        return f"1-{steps[-1].step}"

    def _end(self, key: Key, task: asyncio.Task[None]) -> None:
        """Take over how a child's commands ended. Raises what is no AgentRLError."""
        error = task.exception()
        if error is None:
            return
        if not isinstance(error, AgentRLError):
            raise error
        self.failed[key[0]] = error.message
        self._say(f"{self.children[key].name} failed: {error.message}")

    async def _complete(self, child: Child) -> None:
        """Train and evaluate a child. Raises AgentRLError, which says why a command failed."""
        from agentrl.evaluation.sweep import is_done, read_children
        from agentrl.evaluation.sweep_file import flag_words, launch_words

        sweep, agentrl = self._sweep, [sys.executable, "-m", "agentrl"]
        here = [
            "--output_dir", str(self._output / child.name), "--log_dir", str(self._output / "logs"),
            *self._database,
        ]  # fmt: skip
        if not child.is_trained:
            order = {"order_seed": child.seed, "steps": self._steps, **child.setting.flags}
            launch = launch_words(sweep, agentrl)
            self._say(f"{child.name}: training, {child.setting.shown}, seed {child.seed}")
            await self._process(
                child.name, [*launch, "whatif", sweep.run, child.name, *here, *flag_words(order)]
            )
        if sweep.eval is not None:
            self._say(f"{child.name}: evaluating")
            words = [*flag_words(self._of_eval), "--eval_label", sweep.eval.label, "--json"]
            await self._process(child.name, [*agentrl, "eval", "--run_name", child.name, *here, *words])
        key = child.setting.id, child.seed
        found = (await read_children(self._source, sweep, self.children))[key]
        if not is_done(sweep, found):
            what = "its evaluation has no result" if found.is_trained else "it has trained no step to the end"
            raise AgentRLError(f"its commands ended, and {what}", hint=f"see {self._log(child.name)}")

    async def _process(self, name: str, command: Sequence[str]) -> None:
        from agentrl.processes import exit_reason, start_child, stop_child

        process = start_child(command, log=self._log(name), env=self._environment, is_guarded=True)
        try:
            await asyncio.to_thread(process.wait)
        finally:
            if process.poll() is None:
                await asyncio.shield(asyncio.to_thread(stop_child, process, _GRACE_SECONDS))
        if process.returncode:
            raise AgentRLError(exit_reason(self._log(name)), hint=f"see {self._log(name)}")

    def _log(self, name: str) -> Path:
        return self._output / "logs" / f"{name}_sweep.log"

    def _say(self, text: str) -> None:
        if not self._is_live:
            print(text, file=sys.stderr, flush=True)


async def _eval_flags(source: Store, held_out: HeldOut) -> dict[str, Any]:
    """Return the flags of an evaluation: the file's, and those of the parent's engines and samplers."""
    roles = {item.role: item for item in await source.settings.resolved()}
    found: dict[str, Any] = {}
    if "train" in roles:
        found["model_name_or_path"] = roles["train"].values.get("model_name_or_path")
    for role in _SAMPLING_ROLES:
        if role in roles:
            found |= dict(roles[role].given_values)
    shared = {name: value for name, value in found.items() if name not in _NOT_OF_EVAL and value is not None}
    own = {"eval_file": held_out.file, "eval_samples": held_out.samples, "eval_engine": "own"}
    return shared | own | held_out.flags


async def _check_tasks(flags: Mapping[str, Any]) -> None:
    """Raise TaskFileError or ConfigError for an evaluation that would fail after the training."""
    from agentrl.config.load import parse
    from agentrl.evaluation.identity import read_file
    from agentrl.evaluation.sweep_file import flag_words

    words = ["--num_generations", "1", *flag_words(flags)]
    await read_file(parse(words, command="agentrl eval", description="", shown=()), "eval")


def _database_words(arguments: argparse.Namespace) -> list[str]:
    return [
        word for name in DATABASE_FLAGS if name != "db_connection_string"
        for word in (f"--{name}", str(getattr(arguments, name)))
    ]  # fmt: skip


def _table(sweep: Sweep, listed: Sequence[Standing], failed: Mapping[str, str], width: int) -> Table:
    """Return a row per setting, the best first; ``width`` is the terminal's."""
    from agentrl.evaluation.sweep import MEANS
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
    from agentrl.evaluation.sweep import is_done

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


def _write(path: Path, value: Mapping[str, Any]) -> None:
    """Replace the file. Raises ConfigError for one that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(value, indent=2), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}", hint="give another --output_dir"
        ) from error
