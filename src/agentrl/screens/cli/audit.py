"""``agentrl audit``: look at a run in the terminal. Reads the database, never writes it."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import RenderableType
from rich.text import Text

from agentrl.config.commands import examples_text
from agentrl.config.load import Configs, leading_words, parse
from agentrl.config.schema import JsonFlags, RunConfig, flag
from agentrl.errors import AgentRLError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from agentrl.screens.views.pipelines import TrajectoryRow
    from agentrl.store.client import Store

_USAGE = """\
usage: agentrl audit run | record ID | records | curve [METRIC …] [--run_name R] [--flag VALUE …]

  run        what is wrong, and tasks, records, failures, training data, engines, versions, steps
  record ID  one trajectory turn by turn; the beginning or the end of its id suffices
  records    trajectories by --step, --split, --task, --status, --failure, --tool, --text, --version,
             --min_score, --max_score, --label; --order, --limit
  curve      plots metrics over optimizer steps, reward and staleness by default: --out FILE.png

--json prints JSON. agentrl audit records --help lists all flags.
"""
_Answer = tuple[Any, RenderableType]
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


def main(argv: list[str]) -> int:
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
    from agentrl.screens.snapshot import SnapshotReader, stated_alive_seconds
    from agentrl.screens.tables import render_tables, tables_json
    from agentrl.screens.views.counts import Details

    reader = SnapshotReader(store)
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
    from agentrl.screens.views.trajectories import (
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
