"""``agentrl serve``: run one inference engine that follows the published weights."""

from __future__ import annotations

import asyncio

from agentrl.config.load import parse
from agentrl.config.schema import EngineConfig, ModelConfig, RunConfig


def main(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT. Raises EngineError if the engine ends by itself."""
    configs = parse(
        argv,
        command="agentrl serve",
        description="Runs one inference engine that follows the weights that the trainer publishes.",
        shown=[RunConfig, ModelConfig, EngineConfig],
    )
    from agentrl.inference.serve import serve
    from agentrl.observe.logging import setup

    setup(configs[RunConfig], "engine")
    asyncio.run(serve(configs.only(RunConfig, ModelConfig, EngineConfig)))
    return 0
