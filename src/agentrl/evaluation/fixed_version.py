"""Keep tokens of other policy versions out of an evaluation."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agentrl.documents.images import Image
from agentrl.documents.model_call import PartialGeneration
from agentrl.documents.sampling import SamplingParams
from agentrl.errors import EngineError
from agentrl.inference.generation import Generation, Progress
from agentrl.rollout.worker import ResumableEngine, Router

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
    ) -> AsyncIterator[ResumableEngine]:
        """Open a session of one trajectory, as the router does."""
        async with self._router.session(traj_id, group, partial) as engine:
            yield _FixedVersionEngine(engine, self._version)


class _FixedVersionEngine:
    """The engine of one trajectory."""

    def __init__(self, engine: ResumableEngine, version: int) -> None:
        self._engine = engine
        self._version = version

    @property
    def context_length(self) -> int | None:
        """Return the largest number of tokens of a prompt and its continuation; None if it is unknown."""
        return self._engine.context_length

    @property
    def partial(self) -> PartialGeneration | None:
        """Return the tokens of an unfinished call."""
        return self._engine.partial

    @partial.setter
    def partial(self, value: PartialGeneration | None) -> None:
        self._engine.partial = value

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        progress: Progress | None = None,
        images: Sequence[Image] = (),
    ) -> Generation:
        """Sample a continuation of ``input_ids``. Raises EngineError if no engine stays at the version."""
        for _ in range(_ATTEMPTS):
            more = () if progress is None else (progress,)
            shown: dict[str, Any] = {"images": images} if images else {}
            generation = await self._engine.generate(input_ids, params, *more, **shown)
            others = {span.version for span in generation.versions} - {self._version}
            if not others:
                return generation
            self._engine.partial = None
            logger.warning("a model call with tokens of version %s is repeated", sorted(others))
        raise EngineError(
            f"{_ATTEMPTS} model calls in a row had tokens of another version than {self._version}",
            hint="give --eval_engine own",
        )
