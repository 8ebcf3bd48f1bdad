"""``agentrl gateway``: serve model APIs in front of rollouts."""

from __future__ import annotations

import asyncio

from agentrl.config.load import parse
from agentrl.config.schema import (
    AgentConfig,
    EngineListConfig,
    GatewayConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TraceConfig,
)


def main(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT."""
    configs = parse(
        argv,
        command="agentrl gateway",
        description="Serves model APIs for the trajectories of samplers that name it by --gateway_url.",
        shown=[
            RunConfig,
            ModelConfig,
            GatewayConfig,
            AgentConfig,
            SamplingConfig,
            EngineListConfig,
            TraceConfig,
        ],
    )
    from agentrl.gateway.serve import serve_gateway
    from agentrl.observe.logging import setup
    from agentrl.observe.tracing import tracing

    setup(configs[RunConfig], "gateway")
    with tracing(configs, "gateway"):
        asyncio.run(serve_gateway(configs))
    return 0
