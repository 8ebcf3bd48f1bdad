"""``agentrl audit``: look at a run in the terminal. Reads the database, never writes it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import RenderableType

from agentrl.config.load import Configs, parse
from agentrl.config.schema import EngineConfig, RunConfig, flag
from agentrl.errors import AgentRLError, ConfigError

if TYPE_CHECKING:
    from agentrl.store.client import Store

_USAGE = """\
usage: agentrl audit run | record ID | records | curve [--run_name R] [--flag VALUE …]

  run        the run's state: tasks, records, failures, training data, engines, versions, steps
  record ID  one trajectory turn by turn; the beginning or the end of its id suffices
  records    the newest records: --status, --limit
  curve      plots reward and staleness over steps: --out FILE.png

agentrl audit run --help lists the flags that name the database.
"""


@dataclass(frozen=True, kw_only=True)
class RecordsFlags:
    """Which records to list."""

    status: (
        Literal[
            "created", "running", "completed", "scoring", "scored", "ready", "abandoned", "failed", "released"
        ]
        | None
    ) = flag(None, "only records of this status")
    limit: int = flag(20, "how many records")

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ConfigError(f"--limit is {self.limit}", hint="give --limit a value above 0")


@dataclass(frozen=True, kw_only=True)
class CurveFlags:
    """Where the plot goes."""

    out: str = flag("curve.png", "file of the plot: .png, .svg or .pdf")


def main(argv: list[str]) -> int:
    """Run ``agentrl audit VIEW …``."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    view, words = argv[0], argv[1:]
    if view == "record":
        return _audit_record(words)
    if view not in _VIEWS:
        raise ConfigError(
            f"agentrl audit has no view {view!r}", hint="give one of: run, record, records, curve"
        )
    extra, description, show = _VIEWS[view]
    configs = parse(
        words, command=f"agentrl audit {view}", description=description, shown=[RunConfig], extra=extra
    )
    _show(configs, lambda store: show(store, configs))
    return 0


def _audit_record(words: list[str]) -> int:
    wanted = words.pop(0) if words and not words[0].startswith("-") else None
    configs = parse(
        words,
        command="agentrl audit record ID",
        description="One trajectory turn by turn. ID may be the beginning or the end of a Record's id.",
        shown=[RunConfig],
    )
    if wanted is None:
        raise ConfigError(
            "agentrl audit record takes the id of a Record", hint="`agentrl audit records` lists them"
        )
    _show(configs, lambda store: _record(store, wanted))
    return 0


def _show(configs: Configs, read: Callable[[Store], Awaitable[RenderableType | None]]) -> None:
    from agentrl.observe.tables import stdout_console
    from agentrl.store.client import open_existing

    async def run() -> RenderableType | None:
        async with await open_existing(configs[RunConfig]) as store:
            with store.reading("reading the run"):
                return await read(store)

    page = asyncio.run(run())
    if page is not None:
        stdout_console().print(page)


async def _run(store: Store, configs: Configs) -> RenderableType:
    from agentrl.observe.audit.run import read_state, render_state

    state = await read_state(store)
    if state.empty:
        raise AgentRLError(
            f"run {store.run_name!r} is empty",
            hint="mind --run_name; `agentrl tasks load FILE.jsonl` fills a new run",
        )
    return render_state(state, alive_seconds=configs[EngineConfig].alive_seconds)


async def _record(store: Store, wanted: str) -> RenderableType:
    from agentrl.observe.audit.record import find_record, render_record, trained_at

    record = await find_record(store, wanted)
    calls = await store.dispatches.of_record(record.id)
    failures = await store.records.failures(record.task, record.traj_id)
    return render_record(record, calls, await trained_at(store, record.id), failures)


async def _records(store: Store, configs: Configs) -> RenderableType:
    from agentrl.observe.audit.list import quarantined, read_records, render_records

    flags = configs[RecordsFlags]
    records = await read_records(store, flags.status, flags.limit)
    if not records:
        of_status = f" of status {flags.status}" if flags.status else ""
        raise AgentRLError(
            f"run {store.run_name!r} has no Record{of_status}", hint="`agentrl audit run` shows its state"
        )
    return render_records(records, await quarantined(store, records))


async def _curve(store: Store, configs: Configs) -> None:
    from agentrl.observe.audit.curve import plot_curve

    out = Path(configs[CurveFlags].out)
    plot_curve(store.run_name, await store.training.steps(), out)
    print(out)


_View = Callable[["Store", Configs], Awaitable[RenderableType | None]]
_VIEWS: dict[str, tuple[tuple[type, ...], str, _View]] = {
    "run": ((), "The state of a run as tables.", _run),
    "records": ((RecordsFlags,), "The newest records of a run.", _records),
    "curve": ((CurveFlags,), "Plots reward and staleness over optimizer steps.", _curve),
}
