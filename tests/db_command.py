"""``agentrl db`` as the tests call it: inside a running event loop, and with the check of all invariants."""

from __future__ import annotations

from dataclasses import replace

from agentrl.config.schema import RunConfig
from agentrl.lab import cli_db
from agentrl.lab.check.checks import Checks
from agentrl.lab.cli_db import check_options
from agentrl.store.client import Store


async def agentrl_db(run: RunConfig, *words: str) -> int:
    """Run ``agentrl db WORDS`` on the run's database; returns the exit code."""
    where = ("--run_name", run.run_name, "--db_connection_string", str(run.db_connection_string))
    arguments = cli_db.parser().parse_args([*words, *where])
    return int(await arguments.handler(run, arguments))


async def violations(store: Store) -> list[str]:
    """What ``agentrl db check`` finds wrong with the run."""
    arguments = cli_db.parser().parse_args(["check", "--run_name", "any"])
    report = await Checks(store.connection).run(replace(check_options(arguments), settle_seconds=0.0))
    return [str(violation) for violation in report.violations]
