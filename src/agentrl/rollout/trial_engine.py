"""Give a trajectory that is only tried its engine: one by its URL, those of a run, or none but its prompt."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from agentrl.chat.chat_format import ChatFormat
from agentrl.config.load import Configs
from agentrl.config.schema import EngineConfig, ModelConfig, SamplingConfig
from agentrl.documents.images import Image
from agentrl.documents.model_call import PartialGeneration
from agentrl.documents.sampling import SamplingParams
from agentrl.errors import ConfigError, FailureError
from agentrl.inference.engine import EncodedIds, Generation, Progress, Router
from agentrl.inference.engines.clients import engine_client
from agentrl.rollout.setup import live_engines, max_model_len, model_folder, open_router
from agentrl.store.client import Store


class _Client(Protocol):
    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        rid: str,
        *,
        images: Sequence[Image] = (),
        encoded: EncodedIds | None = None,
    ) -> Generation: ...


@dataclass
class OneEngine:
    """One engine, which is its own router."""

    client: _Client
    context_length: int | None = None
    partial: PartialGeneration | None = None
    """Always None: nothing is resumed."""

    @asynccontextmanager
    async def session(
        self, traj_id: str, group: str | None = None, partial: PartialGeneration | None = None
    ) -> AsyncIterator[OneEngine]:
        """Return the engine."""
        yield self

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        progress: Progress | None = None,
        images: Sequence[Image] = (),
        encoded: EncodedIds | None = None,
    ) -> Generation:
        """Sample a continuation of ``input_ids``; ``progress`` receives all its tokens at the end."""
        rid = f"{uuid.uuid4().hex}-try"
        generation = await self.client.generate(input_ids, params, rid, images=images, encoded=encoded)
        if progress is not None:
            progress(0, generation.output_ids)
        return generation


class _PromptShownError(FailureError):
    """The prompt is known, and no engine is called."""

    kind = "prompt"


@dataclass
class PromptOnly:
    """A client of no engine: it keeps the first prompt and generates nothing."""

    ids: list[int] | None = None

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        rid: str,
        *,
        images: Sequence[Image] = (),
        encoded: EncodedIds | None = None,
    ) -> Generation:
        """Keep the prompt. Raises _PromptShownError."""
        self.ids = self.ids or list(input_ids)
        raise _PromptShownError("no engine is called: only the prompt is shown")


@asynccontextmanager
async def trial_router(
    configs: Configs, store: Store | None, url: str | None, chat_format: ChatFormat
) -> AsyncIterator[Router]:
    """Open the engine at ``--engine_url``, or the live engines of the run."""
    sampling, engine = configs[SamplingConfig], configs[EngineConfig]
    folder = await model_folder(store, configs[ModelConfig])
    if url is not None:
        async with engine_client(engine.engine, url, sampling.engine_timeout_seconds) as client:
            yield OneEngine(client, max_model_len(configs[ModelConfig], folder))
        return
    if store is None:
        raise ConfigError("no engine is named", hint="give --engine_url, or --run_name of a run with engines")
    router = open_router(lambda: live_engines(store, engine), configs, chat_format, folder)
    try:
        yield router
    finally:
        await router.close()
