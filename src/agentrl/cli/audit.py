"""``agentrl audit``: look at a run in the terminal. Reads the database, never writes it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import RenderableType

from agentrl.config.examples import examples_text
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
_MATCHES_SHOWN = 10


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
    """Run ``agentrl audit PAGE …``."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{_USAGE}\n{examples_text('agentrl audit')}")
        return 0
    page, words = argv[0], argv[1:]
    if page == "record":
        return _audit_record(words)
    if page not in _PAGES:
        raise ConfigError(
            f"agentrl audit has no view {page!r}", hint="give one of: run, record, records, curve"
        )
    extra, description, read = _PAGES[page]
    configs = parse(
        words, command=f"agentrl audit {page}", description=description, shown=[RunConfig], extra=extra
    )
    _print(configs, lambda store: read(store, configs))
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
    _print(configs, lambda store: _record(store, wanted))
    return 0


def _print(configs: Configs, read: Callable[[Store], Awaitable[RenderableType | None]]) -> None:
    from agentrl.observe.terminal import stdout_console
    from agentrl.store.client import open_existing

    async def run() -> RenderableType | None:
        async with await open_existing(configs[RunConfig]) as store:
            return await read(store)

    page = asyncio.run(run())
    if page is not None:
        stdout_console().print(page)


async def _run(store: Store, configs: Configs) -> RenderableType:
    from agentrl.observe.audit.run import render_state

    state = await store.views.state()
    if state.empty:
        raise AgentRLError(
            f"run {store.run_name!r} is empty",
            hint="check --run_name; `agentrl tasks load FILE.jsonl` fills a new run",
        )
    return render_state(state, alive_seconds=configs[EngineConfig].alive_seconds)


async def _record(store: Store, wanted: str) -> RenderableType:
    from agentrl.observe.audit.record import render_trajectory

    found = await store.views.matching_trajectories(wanted, _MATCHES_SHOWN + 1)
    if len(found) > 1:
        raise _several(wanted, found)
    trajectory = await store.views.whole_trajectory(found[0]) if found else None
    if trajectory is None:
        raise ConfigError(
            f"run {store.run_name!r} has no Record whose id begins or ends with {wanted!r}",
            hint="`agentrl audit records` lists them",
        )
    return render_trajectory(trajectory)


def _several(wanted: str, found: list[str]) -> ConfigError:
    from agentrl.observe.terminal import clean

    ids = ", ".join(clean(record_id) for record_id in found[:_MATCHES_SHOWN])
    more = ", …" if len(found) > _MATCHES_SHOWN else ""
    return ConfigError(f"{wanted!r} fits several Records: {ids}{more}", hint="give more of the id")


async def _records(store: Store, configs: Configs) -> RenderableType:
    from agentrl.observe.audit.record import render_rows

    flags = configs[RecordsFlags]
    rows = await store.views.trajectories(status=flags.status, limit=flags.limit)
    if not rows:
        of_status = f" of status {flags.status}" if flags.status else ""
        raise AgentRLError(
            f"run {store.run_name!r} has no Record{of_status}", hint="`agentrl audit run` shows its state"
        )
    return render_rows(rows)


async def _curve(store: Store, configs: Configs) -> None:
    from agentrl.observe.audit.curve import plot_curve

    out = Path(configs[CurveFlags].out)
    plot_curve(store.run_name, await store.views.steps(), out)
    print(out)


_Page = Callable[["Store", Configs], Awaitable[RenderableType | None]]
_PAGES: dict[str, tuple[tuple[type, ...], str, _Page]] = {
    "run": ((), "The state of a run as tables.", _run),
    "records": ((RecordsFlags,), "The newest records of a run.", _records),
    "curve": ((CurveFlags,), "Plots reward and staleness over optimizer steps.", _curve),
}
