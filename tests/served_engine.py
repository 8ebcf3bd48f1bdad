"""Serve a model folder by the local engine, in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.schema import EngineConfig, ModelConfig
from agentrl.inference.engines.clients import engine_client
from agentrl.inference.engines.commands import EngineProcess, engine_command, free_port


@dataclass(frozen=True)
class Served:
    """A running engine and the weights that it serves."""

    folder: Path
    url: str


@contextmanager
def serve_locally(folder: Path, *, max_total_tokens: int) -> Iterator[Served]:
    """Start an engine that serves version 0, and stop it at the end."""
    config = EngineConfig(engine="local", max_total_tokens=max_total_tokens)
    port = free_port(config.host)
    process = EngineProcess(engine_command(str(folder), ModelConfig(), config, port), folder / "engine.log")
    served = Served(folder, f"http://{config.host}:{port}")

    async def ready() -> None:
        async with engine_client("local", served.url, 60.0) as client:
            await process.wait_ready(client, 100.0)
            await client.set_version(0)

    try:
        asyncio.run(ready())
        yield served
    finally:
        asyncio.run(process.stop())
