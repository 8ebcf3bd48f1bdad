"""``agentrl doctor``: says what is missing on this machine for a run, and the command that mends it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from agentrl.cli.doctor.machine import Check, machine_checks
from agentrl.cli.doctor.run import (
    check_agent_config,
    check_database,
    check_mongod,
    check_tools,
    model_checks,
)
from agentrl.config.load import Configs, parse
from agentrl.config.schema import AgentConfig, EngineConfig, ModelConfig, RunConfig, SamplingConfig
from agentrl.observe.terminal import stdout_console, table

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def main(argv: list[str]) -> int:
    """Print the table; 1 where a check failed, else 0."""
    configs = parse(
        argv,
        command="agentrl doctor",
        description="Says what is missing on this machine, and the command that mends it. Give it the flags"
        " of your run: the database, the model, the tool servers and the engine are checked too.",
        shown=[RunConfig, ModelConfig, EngineConfig, AgentConfig],
    )
    checks = [*machine_checks(configs[RunConfig], configs[EngineConfig]), *asyncio.run(_run_checks(configs))]
    stdout_console().print(render(checks))
    return 1 if any(check.state == "fail" for check in checks) else 0


async def _run_checks(configs: Configs) -> list[Check]:
    return [
        check_mongod(configs[RunConfig]),
        await check_database(configs[RunConfig]),
        *model_checks(configs[ModelConfig]),
        check_agent_config(configs[SamplingConfig]),
        await check_tools(configs[AgentConfig]),
    ]


def render(checks: Sequence[Check]) -> RenderableType:
    """A row per check: its state, what was found, and what mends it."""
    rows = [
        [Text(check.state, _STYLES[check.state]), check.name, check.found, check.hint] for check in checks
    ]
    failed = sum(check.state == "fail" for check in checks)
    title = f"{failed} of {len(checks)} checks failed" if failed else "nothing is missing"
    return table(title, ["", "check", "found", "what mends it"], rows, text=4)
