"""``agentrl try TASK``: run one trajectory end to end and print it turn by turn; keep nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from agentrl.config.load import parse
from agentrl.config.schema import (
    AgentConfig,
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
    engine_url: str | None = flag(None, "an engine's URL (default: a live engine of the run)")


def main(argv: list[str]) -> int:
    """Run one trajectory of a task: JSON, a task's id in the run, or a task file. Return 1 if it fails."""
    words = list(argv)
    wanted = words.pop(0) if words and not words[0].startswith("-") else None
    configs = parse(
        words,
        command="agentrl try TASK",
        description="Runs one trajectory of TASK and prints it; nothing is kept. TASK is a JSON object, the"
        " id of a task of the run, or a task file. The trial has a database of its own on the server of the"
        " run, which is dropped at the end.",
        shown=[
            RunConfig,
            ModelConfig,
            SamplingConfig,
            AgentConfig,
            ToolConfig,
            EngineListConfig,
            TraceConfig,
        ],
        extra=[TryConfig],
    )
    if wanted is None:
        raise ConfigError(
            "agentrl try takes a task",
            hint='give its JSON, e.g. \'{"query": "1+1?", "answer": "2", "scorer": "exact"}\'; or a'
            " task's id, or a task file",
        )
    from agentrl.observe.tracing import tracing
    from agentrl.rollout.try_task import try_task

    flags = configs[TryConfig]
    with tracing(configs, "try"):
        return asyncio.run(
            try_task(configs, wanted, line=flags.line, engine_url=flags.engine_url, prompt=flags.prompt)
        )
