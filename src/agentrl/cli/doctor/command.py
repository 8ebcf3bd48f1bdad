"""``agentrl doctor``: checks this machine and the services of a run, and says how to fix each fault."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from agentrl.cli.doctor.check import Check
from agentrl.cli.doctor.machine import machine_checks
from agentrl.cli.doctor.model import check_context, model_checks
from agentrl.cli.doctor.services import check_agent_config, check_database, check_mongod, check_tools
from agentrl.config.load import Configs, parse
from agentrl.config.schema import (
    AgentConfig,
    EngineConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    ToolConfig,
)
from agentrl.observe.terminal import stdout_console, table

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def main(argv: list[str]) -> int:
    """Print the table; return 1 if a check failed, else 0."""
    configs = parse(
        argv,
        command="agentrl doctor",
        description="Checks this machine, and names the command that fixes each fault. With the flags of your"
        " run it also checks the database, the model, the tool servers and the engine.",
        shown=[RunConfig, ModelConfig, EngineConfig, ToolConfig],
    )
    checks = [*machine_checks(configs[RunConfig], configs[EngineConfig]), *asyncio.run(_run_checks(configs))]
    stdout_console().print(render(checks))
    return 1 if any(check.state == "fail" for check in checks) else 0


async def _run_checks(configs: Configs) -> list[Check]:
    return [
        check_mongod(configs[RunConfig]),
        await check_database(configs[RunConfig]),
        *model_checks(configs[ModelConfig], configs[AgentConfig].tool_call_parser),
        check_context(configs),
        check_agent_config(configs[SamplingConfig]),
        await check_tools(configs[ToolConfig]),
    ]


def render(checks: Sequence[Check]) -> RenderableType:
    """Return a table with a row per check: its state, what was found, and how to fix it."""
    rows = [
        [Text(check.state, _STYLES[check.state]), check.name, check.found, check.hint] for check in checks
    ]
    failed = sum(check.state == "fail" for check in checks)
    title = f"{failed} of {len(checks)} checks failed" if failed else "no check failed"
    return table(title, ["", "check", "found", "how to fix it"], rows, text=4)
