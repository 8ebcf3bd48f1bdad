"""Open the configured tools for one trajectory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.config.schema import ToolConfig
from agentrl.tools.pool import ToolPool
from agentrl.tools.tool import ToolSession, TrajectoryInfo


@asynccontextmanager
async def open_tools(
    config: ToolConfig, *servers: str, trajectory: str = "train/0/t/0"
) -> AsyncIterator[ToolSession]:
    """Open a pool, and a session of one trajectory with ``servers``; without names, with all."""
    async with (
        ToolPool(config) as pool,
        pool.session(TrajectoryInfo(id=trajectory, servers=servers or None)) as tools,
    ):
        yield tools
