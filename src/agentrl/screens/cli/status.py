"""``agentrl status``: what runs now, on one screen. Reads the database, never writes it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from agentrl.config.load import Configs, leading_words, parse
from agentrl.config.schema import EngineConfig, RunConfig, flag
from agentrl.errors import ConfigError, StoreUnavailableError

if TYPE_CHECKING:
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


def main(argv: list[str]) -> int:
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
    from rich.live import Live

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
    from agentrl.screens.snapshot import SnapshotReader, stated_alive_seconds
    from agentrl.screens.status_screen import render_run_status, status_json

    reader = SnapshotReader(store)

    async def read() -> _Reading:
        run = await reader.read(stated_alive_seconds(configs))
        free = _free_space(Path(configs[RunConfig].output))
        return _Reading(status_json(run, output_free=free), render_run_status(run, output_free=free))

    return read


def _runs_reader(connection: Connection, configs: Configs) -> Callable[[], Awaitable[_Reading]]:
    from agentrl.observe.terminal import to_json
    from agentrl.screens.status_screen import render_runs
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
