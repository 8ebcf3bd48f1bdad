"""``agentrl db`` as the tests call it: inside a running event loop, and with the check of all invariants."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from agentrl.config.schema import RunConfig
from agentrl.lab import db_cli
from agentrl.lab.check.checks import Checks
from agentrl.lab.check.reading import Report
from agentrl.store.client import Store

Db = Callable[..., Awaitable[str]]
"""The fixture ``db``: words of ``agentrl db`` → what it printed."""

_ARGUMENTS = db_cli.parser().parse_args(["check", "--run_name", "any", "--settle_seconds", "0"])


async def agentrl_db(run: RunConfig, *words: str) -> int:
    """Run ``agentrl db WORDS`` on the run's database; returns the exit code."""
    where = ("--run_name", run.run_name, "--db_connection_string", str(run.db_connection_string))
    arguments = db_cli.parser().parse_args([*words, *where])
    return int(await arguments.handler(run, arguments))


async def check(store: Store, **options: Any) -> Report:
    """Return what ``agentrl db check`` reports; ``options`` are fields of CheckOptions."""
    return await Checks(store.connection).run(replace(db_cli.check_options(_ARGUMENTS), **options))


async def violations(store: Store, **options: Any) -> list[str]:
    """Return what ``agentrl db check`` finds wrong with the run."""
    return [str(violation) for violation in (await check(store, **options)).violations]
