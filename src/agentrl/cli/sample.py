"""``agentrl sample``: run a sampler. Start as many as you like, on any machine."""

from __future__ import annotations

import asyncio

from agentrl.config.load import parse
from agentrl.config.schema import (
    AgentConfig,
    ClaimConfig,
    EngineListConfig,
    GatewayConfig,
    GroupConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    ToolConfig,
    TraceConfig,
)
from agentrl.config.validate import require_trainable


def main(argv: list[str]) -> int:
    """Run a sampler until its work is done or a signal stops it."""
    configs = parse(
        argv,
        command="agentrl sample",
        description="Claims tasks of the run, runs and scores their trajectories, finalizes groups.",
        shown=[
            RunConfig,
            ModelConfig,
            TaskConfig,
            SamplingConfig,
            AgentConfig,
            ToolConfig,
            ClaimConfig,
            GroupConfig,
            EngineListConfig,
            GatewayConfig,
            TraceConfig,
        ],
        validate=require_trainable,
    )
    from agentrl.observe.logging import setup
    from agentrl.observe.tracing import tracing
    from agentrl.rollout.sample import sample

    setup(configs[RunConfig], "sample")
    with tracing(configs, "sample"):
        asyncio.run(sample(configs))
    return 0
