"""Serve a reward model with SGLang's ``/classify``: one forward pass for all requests that wait."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl.base.concurrency import end_tasks
from agentrl.config.schema import ModelConfig
from agentrl.data.forest import forest_from_sequences, merge_prefixes
from agentrl.local.engine.server import BadRequestError, bad_request, read_ids, read_json
from agentrl.model.attention import build_executor
from agentrl.model.load import disable_dropout
from agentrl.model.norms import fuse_norms
from agentrl.model.reward_head import check_reward_model, forest_rewards, load_reward_model
from agentrl.weights.folder import stored_dtype

logger = logging.getLogger(__name__)

_ENDLESS = 2**31


class RewardServer:
    """Answers requests for the reward of a sequence of ids."""

    def __init__(
        self,
        folder: str,
        *,
        dtype: torch.dtype | None,
        device: torch.device,
        max_requests: int,
        max_tokens: int,
        max_model_len: int | None = None,
        instance: str | None = None,
        version: str = "default",
    ) -> None:
        """Load the model; ``max_requests`` and ``max_tokens`` limit a forward pass. Raises ModelError.

        A CPU computes in float32 unless ``dtype`` is given, another device in the dtype of the folder.
        """
        own = torch.float32 if device.type == "cpu" else getattr(torch, stored_dtype(Path(folder)))
        model: Any = load_reward_model(Path(folder), ModelConfig(), dtype or own)
        disable_dropout(model)
        fuse_norms(model)
        self._model = model.to(device).eval()
        check_reward_model(model)
        config = model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None) or _ENDLESS
        self.context_length: int = min(context, max_model_len or context, max_tokens)
        self._vocab_size: int = config.vocab_size
        self._executor = build_executor(model, trains=False)
        self._limits = max_requests, max_tokens
        self._about = {"model_path": folder, "weight_version": version, "instance": instance}
        self._waiting: deque[tuple[list[int], asyncio.Future[float]]] = deque()
        self._arrived = asyncio.Event()

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route("/classify", self.classify, methods=["POST"]),
            Route("/health", self.health),
            Route("/model_info", self.info),
            Route("/server_info", self.info),
        ]
        handlers: Any = {BadRequestError: bad_request}
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=handlers)

    async def classify(self, request: Request) -> JSONResponse:
        """Return the reward of ``input_ids``, one sequence, as SGLang returns an embedding of one number."""
        ids = read_ids(await read_json(request), self._vocab_size, _ENDLESS)
        if not 2 <= len(ids) <= self.context_length:
            raise BadRequestError(
                f"input_ids has {len(ids)} tokens; a reward needs 2 to {self.context_length}, the context"
            )
        reward: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((ids, reward))
        self._arrived.set()
        value = await reward
        if not math.isfinite(value):
            # Refuse it by name: JSON has no NaN, and a failure of the server would count as an outage.
            raise BadRequestError(f"the model's reward for these {len(ids)} tokens is {value}")
        meta = {"id": uuid.uuid4().hex, "prompt_tokens": len(ids), **self._about}
        return JSONResponse({"embedding": [value], "meta_info": meta})

    async def health(self, _: Request) -> Response:
        """Return 200."""
        return Response()

    async def info(self, _: Request) -> JSONResponse:
        """Return what is served."""
        about = {"engine": "local", "is_generation": False, "context_length": self.context_length}
        return JSONResponse({**about, **self._about})

    @torch.inference_mode()
    def rewards(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the reward of each sequence of ids, computing the beginnings that they share once."""
        marks = [[place == len(ids) - 1 for place in range(len(ids))] for ids in sequences]
        forest = merge_prefixes(forest_from_sequences(sequences, marks))
        found = forest_rewards(self._model, self._executor(forest), forest)
        order = torch.from_numpy(forest.row).to(found.device)
        return torch.empty_like(found).index_copy_(0, order, found).tolist()

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        working = asyncio.create_task(self._work())
        yield
        await end_tasks(working)

    async def _work(self) -> None:
        """Compute what waits, batch by batch."""
        while True:
            await self._arrived.wait()
            batch = self._next_batch()
            if not batch:
                self._arrived.clear()
                continue
            try:
                found = await asyncio.to_thread(self.rewards, [ids for ids, _ in batch])
            except Exception as error:
                logger.exception("a forward pass failed; its requests end")
                for _, reward in batch:
                    if not reward.done():
                        reward.set_exception(error)
                continue
            for (_, reward), value in zip(batch, found, strict=True):
                if not reward.done():
                    reward.set_result(value)

    def _next_batch(self) -> list[tuple[list[int], asyncio.Future[float]]]:
        """Take the requests that fit into a forward pass."""
        batch: list[tuple[list[int], asyncio.Future[float]]] = []
        most, tokens = self._limits
        while self._waiting and len(batch) < most:
            ids, reward = self._waiting[0]
            if not reward.done() and len(ids) > tokens:
                break
            self._waiting.popleft()
            if not reward.done():
                batch.append((ids, reward))
                tokens -= len(ids)
        return batch
