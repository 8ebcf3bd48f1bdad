"""``agentrl try`` runs one trajectory of a task, prints it, and keeps nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from agentrl.config.load import leading_words, parse
from agentrl.config.schema import (
    AgentConfig,
    ContainerConfig,
    EngineConfig,
    EngineListConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    ToolConfig,
    TraceConfig,
    flag,
)
from agentrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TryConfig:
    """Which task to try, and on which engine."""

    line: int | None = flag(None, "line of the task in the file (default: its first task)")
    prompt: bool = flag(False, "print the first prompt as the model reads it, and call no engine")
    oracle: bool = flag(
        False, "run the tests of Harbor tasks untouched and after their own solutions, and call no engine"
    )


def main(argv: list[str]) -> int:
    """Run one trajectory of a task: JSON, a task's id in the run, or a task file. Return 1 if it fails."""
    wanted = leading_words(argv, 1)
    configs = parse(
        argv[len(wanted) :],
        command="agentrl try TASK",
        description="Runs one trajectory of TASK and prints it; nothing is kept. TASK is a JSON object, the"
        " id of a task of the run, or a task file or folder. The trial has a database of its own on the"
        " server of the run, which is dropped at the end.",
        shown=[
            RunConfig,
            ModelConfig,
            SamplingConfig,
            AgentConfig,
            ToolConfig,
            ContainerConfig,
            EngineListConfig,
            TraceConfig,
        ],
        extra=[TryConfig],
    )
    if not wanted:
        raise ConfigError(
            "agentrl try takes a task",
            hint='give its JSON, e.g. \'{"query": "1+1?", "answer": "2", "scorer": "exact"}\'; or a'
            " task's id, or a task file",
        )
    from agentrl.local.try_task import run_solutions, try_task
    from agentrl.observe.tracing import tracing

    flags = configs[TryConfig]
    if flags.oracle:
        return asyncio.run(run_solutions(configs, wanted[0], line=flags.line))
    with tracing(configs, "try"):
        url = configs[EngineConfig].engine_url
        return asyncio.run(try_task(configs, wanted[0], line=flags.line, engine_url=url, prompt=flags.prompt))
