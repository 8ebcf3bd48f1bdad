"""The commands that change a stored run or train it again: fork, retract, whatif, sweep and blame.

    agentrl whatif math --steps 40-60 --loss_calculater GSPO
    agentrl whatif math math_slow --learning_rate 1e-7
    agentrl whatif --compare math_gspo,math_cispo --out losses.html
    agentrl sweep losses.yml --parallel 2 --json > losses.json
    agentrl sweep losses.yml --state

A what-if needs the database and the checkpoints of the parent, no engine and no sampler. The child is a run
with a database and a folder of its own, which reads the data of the parent where they lie. All that a sweep
knows is in the runs' databases: the same command goes on after a kill, and with more settings.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentrl.base.atomic_folder import replace_file
from agentrl.config.flags import flag_words, names_in, require_writable
from agentrl.config.load import CommandParser, Configs, group_of, leading_words, parse
from agentrl.config.schema import (
    ClaimConfig,
    CriticConfig,
    GroupConfig,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TaskConfig,
    TraceConfig,
    TrainConfig,
)
from agentrl.documents.record import check_label
from agentrl.errors import ConfigError, quoted
from agentrl.lab.flags import BlameConfig, WhatIfConfig, check_flags

if TYPE_CHECKING:
    from rich.table import Table

    from agentrl.documents.run import PolicyVersion, RunSettings
    from agentrl.lab.sweep import Key, Race, Show, Standing, Sweep, SweepChild

_OWN: Final = {"run_name", "output_dir", "log_dir", "recipe"}
"""Flags of the parent that its child must not repeat: those of its recipe are given one by one."""


def fork(argv: list[str]) -> int:
    """Begin the child and print how it is started."""
    return asyncio.run(begin_fork(fork_parser().parse_args(argv)))


def fork_parser() -> CommandParser:
    """Return the parser of ``agentrl fork``."""
    command = CommandParser(
        prog="agentrl fork",
        description="Begins the run NEW with the weights, the optimizer and the data order that RUN had after"
        " a stored step. Nothing that RUN sampled or trained is copied. Samplers, engines and the trainer of"
        " NEW are started as ever, with the flags of RUN or with others.",
    )
    command.add_argument("run_name", metavar="RUN", help="the parent; it may be running")
    command.add_argument("new_name", metavar="NEW", help="the name of the new run")
    command.add_argument("--from_step", type=int, help="a step with a checkpoint; default: the newest one")
    command.add_argument("--output_dir", help="RUN's output folder (default: its trainers', or output/RUN)")
    command.add_database()
    return command


async def begin_fork(arguments: argparse.Namespace) -> int:
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
        work = Fork(store.connection)
        found = await work.checkpoint(Path(arguments.output_dir) if arguments.output_dir else None, step)
        step, folder = found.state.step, found.folder.resolve()
        last = [item for item in await store.steps.find(after=step - 1) if item.step == step]
        for made in (await store.settings.of_steps(last)).values():
            flags["train"] = made
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


def retract(argv: list[str]) -> int:
    """Parse ``argv``, and withdraw."""
    return asyncio.run(withdraw_from_run(retract_parser().parse_args(argv)))


def retract_parser() -> CommandParser:
    """Return the parser of ``agentrl retract``."""
    command = CommandParser(
        prog="agentrl retract",
        description="Withdraws trajectories: deletes them everywhere in the run, says which steps and weights"
        " trained them, and leaves tombstones without content. Stop the trainer first. Without a selection it"
        " finishes a call that was killed.",
    )
    command.add_argument("run_name", metavar="RUN", help="the run")
    command.add_argument(
        "--scorer", action="append", default=[], help="what this scorer scored; may be repeated"
    )
    command.add_argument(
        "--task", action="append", default=[],
        help="a task as a whole, in every epoch, with query and answer: its _id, or its id in the file; may"
        " be repeated",
    )  # fmt: skip
    command.add_argument(
        "--record", action="append", default=[],
        help="one trajectory, with all attempts at it; may be repeated",
    )  # fmt: skip
    command.add_argument("--because", default="", help="why; it is kept, so name no content")
    command.add_argument(
        "--rebuild", action="store_true",
        help="go back to the last checkpoint before the first step that trained any of it, and delete later"
        " weights; the next trainer trains these steps again without it",
    )  # fmt: skip
    command.add_argument(
        "--archive", action="append", default=[], metavar="DIR",
        help="take it out of this export of the run too, or of those below this folder (agentrl db export,"
        " with and without --hf); may be repeated",
    )  # fmt: skip
    command.add_argument("--family", action="store_true", help="withdraw it from the run's children too")
    command.add_argument("--output_dir", help="the run's output folder (that of its trainer)")
    command.add_argument("--dry_run", action="store_true", help="say what would go, change nothing")
    command.add_argument("--yes", action="store_true", help="do not ask")
    command.add_database()
    command.add_flags(RunConfig, "log_dir")
    command.add_flags(ClaimConfig, "lease_seconds")
    command.add_flags(TaskConfig, "import_modules", "allowed_modules")
    return command


async def withdraw_from_run(arguments: argparse.Namespace) -> int:
    """Withdraw, and print what and where it went; return the exit code."""
    from agentrl.lab.retract import RetractFlags
    from agentrl.lab.retract import retract as withdraw
    from agentrl.observe.terminal import confirm

    groups = (RunConfig, ClaimConfig, TaskConfig, RetractFlags)
    return await withdraw(Configs([group_of(group, arguments) for group in groups]), confirm)


_NAMES = 2
"""Words of ``agentrl whatif`` before the flags: the parent and the child."""


def whatif(argv: list[str]) -> int:
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
        shown=(RunConfig, LossConfig, CriticConfig, GroupConfig, OptimConfig, MemoryConfig, TraceConfig),
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
    from agentrl.lab.whatif_run import train_again

    child = train_again(names[0], names[1] if len(names) == _NAMES else None, configs)
    from agentrl.distributed.mesh import is_first_rank

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


_WIDE, _NARROW_COLUMNS = 120, 4
"""Columns of a terminal that holds the whole table of a sweep, and of the table that a narrower one shows."""


def sweep(argv: list[str]) -> int:
    """Run a sweep, or show where it is; 1 if a child failed, 130 if a signal stopped it."""
    return asyncio.run(_sweep(sweep_parser().parse_args(argv)))


def sweep_parser() -> CommandParser:
    """Return the parser of ``agentrl sweep``."""
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


async def _sweep(arguments: argparse.Namespace) -> int:
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
            try:
                (output / "logs").mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"--output_dir {output} cannot be made: {error.strerror}",
                    hint="give the path of a folder",
                ) from error
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


def _write(path: Path, value: Mapping[str, Any]) -> None:
    """Replace the file. Raises ConfigError for one that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(value, indent=2).encode())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}", hint="give another --output_dir"
        ) from error


def blame(argv: list[str]) -> int:
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
    from agentrl.evaluation.report import find
    from agentrl.observe.progress import Parts, StoppedError
    from agentrl.observe.terminal import print_json, stdout_console
    from agentrl.store.client import open_existing

    async with await open_existing(configs[RunConfig]) as store:
        for named in (a, b):
            await find(store, named)
    from agentrl.lab.blame import blame, put_labels, show, to_json, write_files  # torch: after wrong names

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
            without = f"agentrl whatif {run} --without {quoted(flags.out)}"
            print(f"{flags.out}: {len(blamed)} ids; without them: {without}")
        if flags.csv is not None:
            print(f"{flags.csv}: the effects of {len(found.effects)} trajectories")
        if flags.label is not None:
            label = quoted(flags.label)
            print(f"{len(blamed)} labels: agentrl audit records --run_name {run} --label {label}")
    return 0
