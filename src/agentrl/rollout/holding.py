"""Hold a trajectory while an engine or a tool server that it calls is down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.documents.images import Image
from agentrl.documents.sampling import SamplingParams
from agentrl.errors import ENGINES, tool_server
from agentrl.inference.engine import EncodedIds, Engine, Generation, Progress, WrappedEngine
from agentrl.rollout.outages import Clock, Outages
from agentrl.rollout.tool_calls import Tools
from agentrl.tools.base import Schema, ToolResult


class EngineWatch:
    """Receives the router's reports: whether any engine generates."""

    def __init__(self, outages: Outages) -> None:
        self._outages = outages

    def engines_awaited(self) -> None:
        """Record that the first engine has not come up yet."""
        self._outages.not_up_yet(ENGINES)

    def engines_down(self, why: str) -> None:
        """Record that a model call found no engine that works."""
        self._outages.failed(ENGINES, why)

    def engines_up(self) -> None:
        """Record that an engine has generated."""
        self._outages.succeeded(ENGINES)


class HeldEngine(WrappedEngine):
    """The engine of one trajectory; a model call waits while the engines are down."""

    def __init__(self, engine: Engine, outages: Outages, clock: Clock) -> None:
        super().__init__(engine)
        self._outages = outages
        self._clock = clock

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        progress: Progress | None = None,
        images: Sequence[Image] = (),
        encoded: EncodedIds | None = None,
    ) -> Generation:
        """Sample a continuation of ``input_ids``."""
        return await self._outages.hold(
            lambda: self.engine.generate(input_ids, params, progress, images, encoded), self._clock
        )


class HeldTools:
    """The tools of one trajectory; a call waits while its server is down."""

    def __init__(self, tools: Tools, outages: Outages, clock: Clock) -> None:
        self._tools = tools
        self._outages = outages
        self._clock = clock

    async def list(self) -> Sequence[Schema]:
        """Return the function schemas of the tools offered."""
        return await self._outages.hold(self._tools.list, self._clock)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run one tool. A successful result shows that its server is up."""
        result = await self._outages.hold(lambda: self._tools.call(name, arguments), self._clock)
        if not result.error:
            self._outages.succeeded(tool_server(result.server))
        return result

    async def rewards(self) -> dict[str, dict[str, Any]]:
        """Return the rewards that tools give, by tool."""
        return await self._outages.hold(self._tools.rewards, self._clock)
