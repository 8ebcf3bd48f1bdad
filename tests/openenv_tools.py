"""An OpenEnv server with a tool of MCP, run in the venv of OpenEnv: count to the number of the seed."""

from __future__ import annotations

import argparse
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import CallToolAction, MCPEnvironment, Observation, State, create_app


class Counter(MCPEnvironment):
    """Count up by a tool; the episode ends with a reward when the goal is reached."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("counter")

        @mcp.tool
        def add(number: int) -> str:
            """Add a number to the counter."""
            if number < 0:
                raise ValueError("it only counts up")
            self.value += number
            return f"the counter is at {self.value}"

        super().__init__(mcp)
        self.value, self.goal = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        """Begin at 0."""
        self.value, self.goal = 0, 3 + (seed or 0) % 2
        return Observation(metadata={"goal": self.goal})

    def step(self, action: Any, timeout_s: float | None = None, **more: Any) -> Observation:
        """Call the tool; 1 for the goal, 0 beyond it."""
        return self._judged(super().step(action, timeout_s=timeout_s, **more))

    async def step_async(self, action: Any, timeout_s: float | None = None, **more: Any) -> Observation:
        """Call the tool; 1 for the goal, 0 beyond it."""
        return self._judged(await super().step_async(action, timeout_s=timeout_s, **more))

    def _step_impl(self, action: Any, timeout_s: float | None = None, **more: Any) -> Observation:
        raise ValueError("it has tools only")

    def _judged(self, seen: Observation) -> Observation:
        if self.value >= self.goal > 0:
            seen.done, seen.reward = True, float(self.value == self.goal)
        return seen

    @property
    def state(self) -> State:
        """Nothing."""
        return State()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    app = create_app(Counter, CallToolAction, Observation, max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")
