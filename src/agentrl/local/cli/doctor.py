"""``agentrl doctor``: checks this machine and the services of a run, and says how to fix each fault."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from agentrl.config.load import Configs, parse
from agentrl.config.schema import (
    AgentConfig,
    EngineConfig,
    JsonFlags,
    ModelConfig,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    ToolConfig,
)
from agentrl.local.doctor import (
    Check,
    check_agent_config,
    check_context,
    check_mongod,
    check_tools,
    limit_checks,
    machine_checks,
    model_checks,
    run_checks,
)
from agentrl.observe.progress import progress
from agentrl.observe.terminal import print_json, stdout_console, table

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def main(argv: list[str]) -> int:
    """Print the table; return 1 if a check failed, else 0."""
    configs = parse(
        argv,
        command="agentrl doctor",
        description="Checks this machine, and names the command that fixes each fault. With the flags of your"
        " run it also checks the database, the model, the tool servers and the engine.",
        shown=[RunConfig, ModelConfig, EngineConfig, PlacementConfig, SamplingConfig, ToolConfig],
        extra=[JsonFlags],
    )
    checks: list[Check] = []
    with progress("checking this machine and the services of the run") as work:
        for check in machine_checks(configs):
            checks.append(check)
            work.advance()
        checks += asyncio.run(_run_checks(configs))
    failed = sum(check.state == "fail" for check in checks)
    if configs[JsonFlags].json:
        print_json({"failed": failed, "checks": checks})
    else:
        stdout_console().print(render(checks))
    return 1 if failed else 0


async def _run_checks(configs: Configs) -> list[Check]:
    run = configs[RunConfig]
    return [
        *limit_checks(),
        check_mongod(run),
        *await run_checks(run, configs[EngineConfig].alive_seconds),
        *model_checks(configs[ModelConfig], configs[AgentConfig].tool_call_parser),
        check_context(configs),
        await check_agent_config(configs[SamplingConfig]),
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
