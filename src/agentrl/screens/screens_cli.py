"""The commands that show runs: ``agentrl status``, ``audit``, ``runs`` and ``dashboard``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import difflib
import re
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from agentrl.config.commands import examples_text
from agentrl.config.flags import names_in
from agentrl.config.load import CommandParser, Configs, group_of, leading_words, parse
from agentrl.config.run import DATABASE_FLAGS
from agentrl.config.schema import EngineConfig, JsonFlags, RunConfig, flag
from agentrl.errors import AgentRLError, ConfigError, StoreUnavailableError, did_you_mean

if TYPE_CHECKING:
    from rich.console import RenderableType

    from agentrl.screens.views.pipelines import TrajectoryRow
    from agentrl.store.client import Store
    from agentrl.store.mechanics.connection import Connection

_SHORTEST_INTERVAL = 0.2


@dataclass(frozen=True, kw_only=True)
class StatusFlags:
    """How the status is shown."""

    once: bool = flag(False, "print it once and end; the default where stdout is not a terminal")
    json: bool = flag(False, "print it once, as one JSON value")
    interval_seconds: float = flag(2.0, "time between two readings on a terminal", unit="seconds")

    def __post_init__(self) -> None:
        if not self.interval_seconds >= _SHORTEST_INTERVAL:
            raise ConfigError(
                f"--interval_seconds is {self.interval_seconds:g}",
                hint=f"give {_SHORTEST_INTERVAL:g} or more",
            )


class _Reading(NamedTuple):
    """One reading of the database: the value for JSON, and the screen."""

    value: Any
    screen: RenderableType


def status(argv: list[str]) -> int:
    """Show the runs of the server, or one run if it is named; live on a terminal until Ctrl-C."""
    named = leading_words(argv, 1)
    configs = parse(
        [*argv[len(named) :], *(["--run_name", *named] if named else [])],
        command="agentrl status [RUN]",
        description="Shows one run: what is wrong, last step, reward, rates, queues, samplers, engines,"
        " failures, disk. Without RUN or --run_name it lists the runs of the server.",
        shown=[RunConfig],
        extra=[StatusFlags],
    )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_show(configs))
    return 0


async def _show(configs: Configs) -> None:
    from agentrl.observe.terminal import print_json, stdout_console
    from agentrl.store.client import open_existing
    from agentrl.store.run_list import connect_server

    run, flags = configs[RunConfig], configs[StatusFlags]
    if "run_name" in configs.given:
        store = await open_existing(run)
        connection, read = store.connection, _run_reader(store, configs)
    else:
        connection = await connect_server(run)
        read = _runs_reader(connection, configs)
    try:
        if flags.json:
            print_json((await read()).value)
        elif flags.once or not sys.stdout.isatty():
            stdout_console().print((await read()).screen)
        else:
            await _watch(read, flags.interval_seconds)
    finally:
        await connection.close()


async def _watch(read: Callable[[], Awaitable[_Reading]], interval: float) -> None:
    """Show reading after reading; while the server does not answer, the last one under a red line."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from agentrl.observe.terminal import stdout_console

    console = stdout_console()
    screen = (await read()).screen
    try:
        with Live(screen, console=console, screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval)
                try:
                    screen = (await read()).screen
                    live.update(screen, refresh=True)
                except StoreUnavailableError as error:
                    why = Text(f"not up to date: {error.message}", style="bold red")
                    live.update(Group(why, screen), refresh=True)
    finally:
        console.print(screen)


def _run_reader(store: Store, configs: Configs) -> Callable[[], Awaitable[_Reading]]:
    from agentrl.llm.agent_config import read_prices
    from agentrl.screens.run_screens import render_run_status, status_json
    from agentrl.screens.snapshot import SnapshotReader, stated_alive_seconds

    reader = SnapshotReader(store, prices=read_prices(configs[RunConfig].prices))

    async def read() -> _Reading:
        run = await reader.read(stated_alive_seconds(configs))
        free = _free_space(Path(configs[RunConfig].output))
        return _Reading(status_json(run, output_free=free), render_run_status(run, output_free=free))

    return read


def _runs_reader(connection: Connection, configs: Configs) -> Callable[[], Awaitable[_Reading]]:
    from agentrl.observe.terminal import to_json
    from agentrl.screens.run_screens import render_runs
    from agentrl.store.run_list import Runs

    runs = Runs(connection)

    async def read() -> _Reading:
        rows = await runs.all(configs[EngineConfig].alive_seconds)
        value = {"server": connection.host, "runs": to_json(rows)}
        return _Reading(value, render_runs(connection.host, rows))

    return read


def _free_space(folder: Path) -> int | None:
    """Return the free bytes where ``folder`` is; None if this machine has no such folder."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


_USAGE = """\
usage: agentrl audit run | record ID | records | curve [METRIC …] [--run_name R] [--flag VALUE …]

  run        what is wrong, and tasks, records, failures, training data, engines, versions, steps
  record ID  one trajectory turn by turn; the beginning or the end of its id suffices
  records    trajectories by --step, --split, --task, --status, --failure, --tool, --text, --version,
             --min_score, --max_score, --label; --order, --limit
  curve      plots metrics over optimizer steps, reward and staleness by default: --out FILE.png

--json prints JSON. agentrl audit records --help lists all flags.
"""
_Answer = tuple[Any, "RenderableType"]
"""The value of --json, and the page."""
_MATCHES_SHOWN = 10
_METRICS_SHOWN = 30
_SEARCH_SECONDS = 120.0
"""Longest time of all pages of one search for a text or a tool."""


@dataclass(frozen=True, kw_only=True)
class RecordsFlags:
    """Which records to list. Several flags select the records that fit all of them."""

    step: int | None = flag(None, "only records that the committed step with this number trained")
    split: str | None = flag(None, "only records of this split: train, eval, …")
    task: str | None = flag(None, "only records of this task: its id in the task file, or SPLIT/EPOCH/ID")
    status: Literal[
        "created", "running", "completed", "scoring", "scored", "ready", "trained", "abandoned", "failed",
        "released",
    ] | None = flag(None, "only records of this status")  # fmt: skip
    failure: str | None = flag(None, "only failed attempts of this kind: engine, tool, scorer, timeout, …")
    tool: str | None = flag(None, "only records that called the tool of this name")
    text: str | None = flag(
        None, "only records with this text in the question, an answer, a message or a tool result"
    )
    version: int | None = flag(None, "only records with tokens of this policy version")
    min_score: float | None = flag(None, "lowest score")
    max_score: float | None = flag(None, "highest score")
    label: str | None = flag(None, "only records that a person gave this label")
    answer_seen_in: str | None = flag(
        None, "only records of which a result of this tool had the task's answer before the model wrote it"
    )
    order: Literal[
        "newest", "oldest", "highest_score", "lowest_score", "longest", "shortest", "most_turns"
    ] = flag("newest", "which records come first")
    limit: int = flag(20, "how many records")

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ConfigError(f"--limit is {self.limit}", hint="give --limit a value above 0")
        if self.min_score is not None and self.max_score is not None and self.min_score > self.max_score:
            raise ConfigError(
                f"--min_score {self.min_score:g} is above --max_score {self.max_score:g}",
                hint="exchange them",
            )

    @property
    def given(self) -> dict[str, Any]:
        """Return the filters that were given."""
        values = dataclasses.asdict(self)
        return {
            name: value for name, value in values.items()
            if name not in ("order", "limit") and value is not None
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CurveFlags:
    """Where the plot goes."""

    out: str = flag("curve.png", "file of the plot: .png, .svg or .pdf")


def audit(argv: list[str]) -> int:
    """Run ``agentrl audit PAGE …``."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{_USAGE}\n{examples_text('agentrl audit')}")
        return 0
    page = argv[0]
    if page not in _PAGES:
        raise ConfigError(f"agentrl audit has no view {page!r}", hint=did_you_mean(page, _PAGES))
    shape = _PAGES[page]
    names = leading_words(argv[1:], shape.names)
    configs = parse(
        argv[1 + len(names) :],
        command=f"agentrl audit {page}{shape.usage}",
        description=shape.description,
        shown=[RunConfig],
        extra=[*shape.flags, JsonFlags],
    )
    if page == "record" and not names:
        raise ConfigError(
            "agentrl audit record takes the id of a Record", hint="`agentrl audit records` lists them"
        )
    value, screen = asyncio.run(_read(configs, names, shape.read))
    if configs[JsonFlags].json:
        from agentrl.observe.terminal import print_json

        print_json(value)
    else:
        from agentrl.observe.terminal import stdout_console

        stdout_console().print(screen)
    return 0


async def _read(
    configs: Configs, names: list[str], read: Callable[[Store, Configs, list[str]], Awaitable[_Answer]]
) -> _Answer:
    from agentrl.store.client import open_existing

    async with await open_existing(configs[RunConfig]) as store:
        return await read(store, configs, names)


async def _run(store: Store, configs: Configs, names: list[str]) -> _Answer:
    from agentrl.llm.agent_config import read_prices
    from agentrl.screens.run_screens import render_tables, tables_json
    from agentrl.screens.snapshot import SnapshotReader, stated_alive_seconds
    from agentrl.screens.views.counts import Details

    reader = SnapshotReader(store, prices=read_prices(configs[RunConfig].prices))
    run = await reader.read(stated_alive_seconds(configs))
    if run.empty:
        raise AgentRLError(
            f"run {store.run_name!r} is empty",
            hint="check --run_name; `agentrl tasks load FILE.jsonl` fills a new run",
        )
    details = await Details(store.connection).read()
    return tables_json(run, details), render_tables(run, details)


async def _record(store: Store, configs: Configs, names: list[str]) -> _Answer:
    from agentrl.observe.terminal import clean
    from agentrl.screens.trajectory_page import render_trajectory
    from agentrl.screens.views.read import Views

    wanted, views = names[0], Views(store.connection)
    found = await views.matching_trajectories(wanted, _MATCHES_SHOWN + 1)
    if len(found) > 1:
        ids = ", ".join(clean(record_id) for record_id in found[:_MATCHES_SHOWN])
        more = ", …" if len(found) > _MATCHES_SHOWN else ""
        raise ConfigError(f"{wanted!r} fits several Records: {ids}{more}", hint="give more of the id")
    trajectory = await views.whole_trajectory(found[0]) if found else None
    if trajectory is None:
        raise ConfigError(
            f"run {store.run_name!r} has no Record whose id begins or ends with {wanted!r}",
            hint="`agentrl audit records` lists them",
        )
    return trajectory, render_trajectory(trajectory)


async def _records(store: Store, configs: Configs, names: list[str]) -> _Answer:
    from agentrl.screens.trajectory_page import render_rows

    flags = configs[RecordsFlags]
    rows, is_complete = await _search(store, flags)
    if not rows:
        words = " ".join(f"--{name} {value}" for name, value in flags.given.items())
        given = f" with {words}" if words else ""
        looked = "" if is_complete else f" among those searched in {_SEARCH_SECONDS:.0f} s"
        raise AgentRLError(
            f"run {store.run_name!r} has no Record{given}{looked}",
            hint="`agentrl audit run` shows its state; `agentrl audit records` its newest Records",
        )
    order = flags.order.replace("_", " ")
    return rows, render_rows(rows, order=order, with_step=flags.step is not None)


async def _search(store: Store, flags: RecordsFlags) -> tuple[list[TrajectoryRow], bool]:
    """Return up to ``--limit`` rows, and whether every Record was searched or the limit reached."""
    from agentrl.observe.progress import progress
    from agentrl.screens.views.read import (
        MAX_PAGE,
        Bounds,
        TrajectoryFilter,
        TrajectoryOrder,
        TrajectorySearch,
    )

    fields = {name: value for name, value in flags.given.items() if not name.endswith("_score")}
    wanted = TrajectoryFilter(score=Bounds(flags.min_score, flags.max_score), **fields)
    rows: list[TrajectoryRow] = []
    after, until = None, time.monotonic() + _SEARCH_SECONDS
    with progress("searching trajectories") as bar:
        while True:
            page = await TrajectorySearch(store.connection).page(
                wanted, order=TrajectoryOrder(flags.order), after=after,
                limit=min(MAX_PAGE, flags.limit - len(rows)),
            )  # fmt: skip
            rows += page.rows
            after = page.after
            bar.advance(page.searched or len(page.rows))
            if after is None or len(rows) >= flags.limit:
                return rows, True
            if time.monotonic() >= until:
                return rows, False


async def _curve(store: Store, configs: Configs, names: list[str]) -> _Answer:
    from rich.text import Text

    from agentrl.observe.plotting import committed_values, metric_names, plot_curve, plot_metrics

    steps = await store.steps.metrics()
    known = metric_names(steps)
    for name in names:
        if name not in known:
            raise _unknown_metric(store.run_name, name, known)
    if configs[JsonFlags].json:
        return committed_values(store.run_name, steps, names or known), Text()
    out = Path(configs[CurveFlags].out)
    if names:
        plot_metrics(store.run_name, steps, names, out)
    else:
        plot_curve(store.run_name, steps, out)
    return None, Text(str(out))


def _unknown_metric(run_name: str, name: str, known: Sequence[str]) -> AgentRLError:
    if not known:
        return AgentRLError(
            f"run {run_name!r} has no committed optimizer step with a metric",
            hint=f"`agentrl audit run --run_name {run_name}` shows how far it is",
        )
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    more = ", …" if len(known) > _METRICS_SHOWN else ""
    return ConfigError(
        f"run {run_name!r} has no metric {name!r}",
        hint=f"did you mean {' or '.join(nearest)}?"
        if nearest
        else f"give one of: {', '.join(known[:_METRICS_SHOWN])}{more}",
    )


@dataclass(frozen=True)
class _Page:
    """One view: its flags, the number of names that it takes, and how it is read."""

    description: str
    read: Callable[[Store, Configs, list[str]], Awaitable[_Answer]]
    flags: tuple[type, ...] = ()
    names: int = 0
    usage: str = ""


_PAGES: dict[str, _Page] = {
    "run": _Page("What is wrong with a run, and its state as tables.", _run),
    "record": _Page(
        "One trajectory turn by turn. ID may be the beginning or the end of a Record's id.",
        _record, names=1, usage=" ID",
    ),
    "records": _Page(
        "The Records of a run that fit every given filter. `agentrl audit records --step 5` lists those that"
        " made step 5.",
        _records, (RecordsFlags,),
    ),
    "curve": _Page(
        "Plots metrics over optimizer steps: METRIC is any stored metric, such as reward, entropy, kl_k3 or"
        " seconds_data. Without METRIC: reward and staleness.",
        _curve, (CurveFlags,), names=20, usage=" [METRIC …]",
    ),
}  # fmt: skip


_ACTIONS: Final = ("rm", "rename", "tag", "note")
_CHANGE: Final = re.compile(r"\+.*|-(?!h$)[^-].*", re.DOTALL)
"""A word that adds or removes a tag."""


def runs(argv: list[str]) -> int:
    """List the runs, or run one subcommand; its handler's result is the exit code."""
    action = next((word for word in argv if word in _ACTIONS), None)
    changes = [word for word in argv if _CHANGE.fullmatch(word)] if action == "tag" else []
    arguments = runs_parser().parse_args([word for word in argv if word not in changes])
    arguments.changes = changes
    return int(asyncio.run(arguments.handler(arguments)))


def runs_parser() -> CommandParser:
    """Return the parser of ``agentrl runs``; ``handler`` of a subcommand is a coroutine function."""
    outer = CommandParser(
        prog="agentrl runs",
        description="Lists the runs of a MongoDB server; tags, notes, renames and deletes them.",
    )
    outer.add_database()
    outer.add_argument("--json", action="store_true", help="print the list as one JSON value")
    outer.set_defaults(handler=list_runs)
    actions = outer.add_subparsers(dest="action", metavar="SUBCOMMAND", parser_class=CommandParser)
    remove = actions.add_parser("rm", help="delete runs that have ended")
    remove.add_argument("run_name", metavar="RUN", nargs="+", help="the runs to delete")
    remove.add_argument("--folders", action="store_true", help="delete their output folders too")
    remove.add_argument("--yes", action="store_true", help="do not ask")
    rename = actions.add_parser("rename", help="rename a run that has ended, and its output folder")
    rename.add_argument("run_name", metavar="RUN", help="the run")
    rename.add_argument("new_name", metavar="NEW", help="its new name")
    tag = actions.add_parser(
        "tag", help="add and remove tags", usage="agentrl runs tag RUN [+TAG | -TAG] … [--flag VALUE …]"
    )
    tag.add_argument("run_name", metavar="RUN")
    note = actions.add_parser("note", help="note what a run is for")
    note.add_argument("run_name", metavar="RUN")
    note.add_argument("text", metavar="TEXT", help="the note; an empty one removes it")
    for action, handler in ((remove, rm_runs), (rename, rename_run), (tag, tag_run), (note, note_run)):
        action.add_database(default=argparse.SUPPRESS)  # a flag before the subcommand keeps its value
        action.set_defaults(handler=handler)
    return outer


def _run_config(arguments: argparse.Namespace, name: str = RunConfig.run_name) -> RunConfig:
    return group_of(RunConfig, argparse.Namespace(**vars(arguments) | {"run_name": name}))


async def list_runs(arguments: argparse.Namespace) -> int:
    """Print a row per run, those with the latest activity first."""
    from agentrl.observe.terminal import print_json, stdout_console, to_json
    from agentrl.screens.run_screens import render_run_list
    from agentrl.store.run_list import Runs, connect_server

    connection = await connect_server(_run_config(arguments))
    try:
        runs = await Runs(connection).all(EngineConfig().alive_seconds)
    finally:
        await connection.close()
    if arguments.json:
        print_json({"server": connection.host, "runs": to_json(runs)})
    else:
        stdout_console().print(render_run_list(connection.host, runs))
    return 0


async def rm_runs(arguments: argparse.Namespace) -> int:
    """Delete each named run once its database and its folder have been named and the answer is yes."""
    for name in dict.fromkeys(arguments.run_name):
        run = _run_config(arguments, name)
        if not await _remove_unfinished(run, arguments):
            await _remove(run, arguments)
    return 0


async def _remove_unfinished(run: RunConfig, arguments: argparse.Namespace) -> bool:
    """Return whether the database holds what an import or a fork left, and no run; delete it if asked."""
    from agentrl.lab.manage_runs import RunAdmin
    from agentrl.observe.terminal import confirm
    from agentrl.store.client import open_connection

    connection = await open_connection(run)
    try:
        admin = RunAdmin(connection)
        if not await admin.is_unfinished():
            return False
        what = f"the unfinished database {run.run_name} on MongoDB at {connection.host}"
        if not arguments.yes and not await asyncio.to_thread(confirm, what):
            print(f"{run.run_name} is kept")
            return True
        await admin.delete_unfinished()
    finally:
        await connection.close()
    print(f"deleted {what}")
    return True


async def _remove(run: RunConfig, arguments: argparse.Namespace) -> None:
    from agentrl.lab.manage_runs import RunAdmin
    from agentrl.observe.terminal import confirm
    from agentrl.store.client import open_existing

    async with await open_existing(run) as store:
        admin = RunAdmin(store.connection)
        await admin.require_ended(EngineConfig().alive_seconds)
        folder = await admin.output_folder() if arguments.folders else None
        what = f"database {run.run_name} on MongoDB at {store.host}"
        if folder is not None:
            what += f" and folder {folder}"
        if not arguments.yes and not await asyncio.to_thread(confirm, what):
            print(f"{run.run_name} is kept")
            return
        await admin.delete(folder, EngineConfig().alive_seconds)
    print(f"deleted {what}")
    if arguments.folders and folder is None:
        print(f"{run.run_name}: this machine has no output folder of it")


async def rename_run(arguments: argparse.Namespace) -> int:
    """Rename the run, or finish a renaming that was killed."""
    from agentrl.lab import manage_runs
    from agentrl.observe.progress import progress

    old, new = arguments.run_name, arguments.new_name
    with progress(f"renaming run {old}, documents") as work:
        folders = await manage_runs.rename_run(
            _run_config(arguments, old), new, EngineConfig().alive_seconds, on_documents=work.advance
        )
    print(f"{old} → {new}" + "".join(f", folder {folder}" for folder in folders if folder.exists()))
    return 0


async def tag_run(arguments: argparse.Namespace) -> int:
    """Change the tags if any are named, and print those that the run has then."""
    from agentrl.lab.manage_runs import RunAdmin
    from agentrl.store.client import open_existing

    changes: list[str] = arguments.changes
    add, remove = ([word[1:] for word in changes if word[0] == sign] for sign in "+-")
    async with await open_existing(_run_config(arguments, arguments.run_name)) as store:
        tags = await RunAdmin(store.connection).tag(add, remove)
    print(f"{arguments.run_name}: {', '.join(tags) or 'no tags'}")
    return 0


async def note_run(arguments: argparse.Namespace) -> int:
    """Store the note."""
    from agentrl.lab.manage_runs import RunAdmin
    from agentrl.store.client import open_existing

    async with await open_existing(_run_config(arguments, arguments.run_name)) as store:
        await RunAdmin(store.connection).note(arguments.text)
    print(f"{arguments.run_name}: {'noted' if arguments.text.strip() else 'no note'}")
    return 0


@dataclass(frozen=True, kw_only=True)
class DashboardFlags:
    """Where the pages are, and who may read them."""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int | None = flag(None, "port (default: 8900, or the next free one)")
    token_file: str | None = flag(
        None, "file with the token of the login link (default: a new one, which is printed)"
    )
    allowed_hosts: str = flag("", "further host names of this machine, separated by commas")


def dashboard_parser() -> CommandParser:
    """Return the parser of ``agentrl dashboard``."""
    command = CommandParser(
        prog="agentrl dashboard",
        description="Web pages about the runs of a MongoDB server. They read, and their forms write"
        " labels, tags and notes, and rename and delete runs, as far as the database user may.",
    )
    command.add_flags(RunConfig, *DATABASE_FLAGS, "prices")
    command.add_flags(DashboardFlags)
    return command


def dashboard(argv: list[str]) -> int:
    """Serve web pages about the runs of a MongoDB server until SIGINT or SIGTERM."""
    arguments = dashboard_parser().parse_args(argv)
    from agentrl.screens.dashboard.serve import serve as serve_pages

    flags = group_of(DashboardFlags, arguments)
    asyncio.run(
        serve_pages(
            group_of(RunConfig, arguments),
            _announce,
            host=flags.host,
            port=flags.port,
            token_file=None if flags.token_file is None else Path(flags.token_file),
            hosts=tuple(names_in(flags.allowed_hosts)),
        )
    )
    return 0


def _announce(address: str) -> None:
    print(f"dashboard: {address}\nopen this link to log in; Ctrl-C ends it", flush=True)
