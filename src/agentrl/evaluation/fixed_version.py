"""Keep tokens of other policy versions out of an evaluation."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from agentrl.documents.images import Image
from agentrl.documents.model_call import PartialGeneration
from agentrl.documents.sampling import SamplingParams
from agentrl.errors import EngineError
from agentrl.inference.engine import EncodedIds, Engine, Generation, Progress, Router, WrappedEngine

logger = logging.getLogger(__name__)

_ATTEMPTS = 5


class FixedVersionRouter:
    """The engines of one version: a model call during which an engine loads another one is repeated."""

    def __init__(self, router: Router, version: int) -> None:
        self._router = router
        self._version = version

    @asynccontextmanager
    async def session(
        self, traj_id: str, group: str | None = None, partial: PartialGeneration | None = None
    ) -> AsyncIterator[Engine]:
        """Open a session of one trajectory, as the router does."""
        async with self._router.session(traj_id, group, partial) as engine:
            yield _FixedVersionEngine(engine, self._version)


class _FixedVersionEngine(WrappedEngine):
    """The engine of one trajectory."""

    def __init__(self, engine: Engine, version: int) -> None:
        super().__init__(engine)
        self._version = version

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        progress: Progress | None = None,
        images: Sequence[Image] = (),
        encoded: EncodedIds | None = None,
    ) -> Generation:
        """Sample a continuation of ``input_ids``. Raises EngineError if no engine stays at the version."""
        for _ in range(_ATTEMPTS):
            generation = await self.engine.generate(input_ids, params, progress, images, encoded)
            others = {span.version for span in generation.versions} - {self._version}
            if not others:
                return generation
            self.engine.partial = None
            logger.warning("a model call with tokens of version %s is repeated", sorted(others))
        raise EngineError(
            f"{_ATTEMPTS} model calls in a row had tokens of another version than {self._version}",
            hint="give --eval_engine own",
        )
