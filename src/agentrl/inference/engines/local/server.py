"""HTTP API of the local engine: the part of SGLang's API that AgentRL uses."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, get_args

import numpy as np
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

from agentrl.concurrency import end_tasks
from agentrl.documents.images import image_of_url
from agentrl.documents.sampling import SamplingParams, logprobs_of
from agentrl.errors import AgentRLError, ImageError
from agentrl.inference.engines.local.adapters import LoadedAdapter
from agentrl.inference.engines.local.model import LocalModel
from agentrl.inference.engines.local.requests import (
    BadRequestError,
    bad_request,
    read_ids,
    read_json,
    read_routed_from,
    refusal,
)
from agentrl.inference.engines.local.sampling import RowSampler, StopStrings, read_params, read_stops
from agentrl.inference.engines.local.scheduler import GenerationRequest, PauseMode, Scheduler
from agentrl.inference.engines.local.vision import read_request_images
from agentrl.inference.engines.local.weights import LoadedWeights
from agentrl.inference.engines.local.worker import Worker

Json = dict[str, Any]

STREAM_INTERVAL = 16
"""Tokens per event of a stream; the first token is sent at once."""

_PAUSE_MODES = get_args(PauseMode)


class LocalServer:
    """Translates HTTP requests into calls of the worker."""

    def __init__(
        self,
        worker: Worker,
        model: LocalModel,
        context_length: int,
        instance: str | None = None,
        tokenizer: Callable[[], Tokenizer] | None = None,
    ) -> None:
        """``tokenizer`` is called for requests with stop strings only."""
        self._worker = worker
        self._scheduler = worker.scheduler
        self._weights = LoadedWeights(worker, model)
        self._context_length = context_length
        self._instance = instance
        self._tokenizer = tokenizer

    def app(self) -> Starlette:
        """Return the application; the worker starts and stops with it."""
        routes = [
            Route("/generate", self.generate, methods=["POST"]),
            Route("/health", self.health),
            Route("/health_generate", self.health),
            Route("/model_info", self.model_info),
            Route("/server_info", self.server_info),
            Route("/v1/loads", self.loads),
            Route("/flush_cache", self.flush_cache, methods=["GET", "POST"]),
            Route("/pause_generation", self.pause, methods=["POST"]),
            Route("/continue_generation", self.resume, methods=["POST"]),
            Route("/abort_request", self.abort, methods=["POST"]),
            *self._weights.routes(),
        ]
        handlers: Any = {BadRequestError: bad_request, AgentRLError: refusal}
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=handlers)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._worker.start()
        yield
        await asyncio.to_thread(self._worker.stop)
        self._weights.close()

    async def generate(self, request: Request) -> Response:
        """Generate, with ``stream`` as events; abort the request if the client disconnects."""
        body = await read_json(request)
        loop = asyncio.get_running_loop()
        parts: asyncio.Queue[Json] = asyncio.Queue()

        def report(generation: GenerationRequest) -> None:
            loop.call_soon_threadsafe(parts.put_nowait, self._answer(generation, body))

        generation = self._generation(body, report)
        if body.get("image_data"):
            await asyncio.to_thread(self._add_images, generation, body["image_data"])
        await self._worker.run(lambda scheduler: scheduler.submit(generation))
        if body.get("stream"):
            return StreamingResponse(self._events(generation, parts), media_type="text/event-stream")
        answer = await self._whole(request, generation, parts)
        error = answer.get("error")
        return JSONResponse(answer, status_code=200 if error is None else error["code"])

    async def _whole(
        self, request: Request, generation: GenerationRequest, parts: asyncio.Queue[Json]
    ) -> Json:
        """Return the answer of a request without ``stream``."""
        finished = asyncio.create_task(parts.get())
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not finished.done():
                self._worker.call(lambda scheduler: scheduler.abort(generation.rid))
            return await finished
        finally:
            await end_tasks(gone, finished)

    async def _events(
        self, generation: GenerationRequest, parts: asyncio.Queue[Json]
    ) -> AsyncIterator[bytes]:
        """Yield the parts of a generation as server-sent events; the server closes this on a disconnect."""
        is_last = False
        try:
            while not is_last:
                part = await parts.get()
                is_last = "error" in part or part["meta_info"]["finish_reason"] is not None
                yield b"data: " + orjson.dumps(part) + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            if not is_last:
                self._worker.call(lambda scheduler: scheduler.abort(generation.rid))

    async def health(self, _: Request) -> Response:
        """Return 200 while requests are processed, 503 while paused."""
        return Response(status_code=503 if self._scheduler.paused else 200)

    async def model_info(self, _: Request) -> Response:
        """Return the served model."""
        return JSONResponse(
            {
                "model_path": self._weights.model.folder,
                "is_generation": True,
                "weight_version": self._scheduler.version,
                "vocab_size": self._weights.model.vocab_size,
            }
        )

    async def server_info(self, _: Request) -> Response:
        """Return the engine's settings and load."""
        return JSONResponse(
            {
                "engine": "local",
                "instance": self._instance,
                "model_path": self._weights.model.folder,
                "weight_version": self._scheduler.version,
                "dtype": str(self._weights.model.dtype).removeprefix("torch."),
                "device": str(self._weights.model.device),
                "context_length": self._context_length,
                "paused": self._scheduler.paused,
                "running_requests": len(self._scheduler.running),
                "waiting_requests": len(self._scheduler.waiting),
            }
        )

    async def loads(self, _: Request) -> Response:
        """Return the number of running and waiting requests."""
        scheduler = self._scheduler
        rank = {
            "dp_rank": 0,
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.waiting),
            "num_total_tokens": scheduler.tokens,
        }
        return JSONResponse({"loads": [rank]})

    async def flush_cache(self, _: Request) -> Response:
        """Drop cached prefixes; return 400 while requests are running."""
        flushed = await self._worker.run(Scheduler.flush)
        text = "Cache flushed." if flushed else "Requests are running: the cache was not flushed."
        return Response(text, status_code=200 if flushed else 400, media_type="text/plain")

    async def pause(self, request: Request) -> Response:
        """Pause in one of the three modes."""
        mode = (await read_json(request)).get("mode", "abort")
        if mode not in _PAUSE_MODES:
            raise BadRequestError(f"unknown pause mode {mode!r}; choose one of {', '.join(_PAUSE_MODES)}")
        await self._worker.run(lambda scheduler: scheduler.pause(mode))
        return JSONResponse({"status": "ok", "message": "Generation is paused."})

    async def resume(self, _: Request) -> Response:
        """Continue after a pause."""
        try:
            await self._worker.run(Scheduler.resume)
        except AgentRLError as error:
            raise BadRequestError(str(error)) from error
        return JSONResponse({"status": "ok", "message": "Generation continues."})

    async def abort(self, request: Request) -> Response:
        """End one request or all."""
        body = await read_json(request)
        rid = body.get("rid")
        if not body.get("abort_all") and not rid:
            raise BadRequestError("abort_request needs rid, or abort_all true")
        chosen = None if body.get("abort_all") else str(rid)
        await self._worker.run(lambda scheduler: scheduler.abort(chosen))
        return Response(status_code=200)

    def _generation(
        self, body: Mapping[str, Any], report: Callable[[GenerationRequest], None]
    ) -> GenerationRequest:
        model = self._weights.model
        ids = read_ids(body, model.vocab_size, self._context_length)
        adapter = self._adapter(body.get("lora_path"))
        params, options, stop_strings = self._sampling(body.get("sampling_params") or {})
        limit = min(params.max_new_tokens, self._context_length - len(ids))
        tokens = np.zeros(len(ids) + limit, dtype=np.int32)
        tokens[: len(ids)] = ids
        kept: list[list[int]] | None = [] if body.get("return_sampling_mask") and params.truncates else None
        stop_ids = frozenset() if options["ignore_eos"] else model.eos_ids | set(params.stop_token_ids)
        return GenerationRequest(
            rid=str(body.get("rid") or uuid.uuid4().hex),
            tokens=tokens,
            prompt_tokens=len(ids),
            sampler=RowSampler(params, np.random.default_rng(options["sampling_seed"]), kept=kept),
            stop_ids=stop_ids,
            finish=report,
            stop_strings=stop_strings,
            progress=report if body.get("stream") else None,
            progress_tokens=STREAM_INTERVAL,
            routed_from=read_routed_from(body, len(ids)),
            adapter=adapter,
        )

    def _adapter(self, name: Any) -> LoadedAdapter | None:
        """Return the adapter that a request names. Raises BadRequestError if it is not loaded."""
        if name is None:
            return None
        loaded = self._scheduler.adapters
        if not isinstance(name, str) or name not in loaded:
            raise BadRequestError(
                f"lora_path {name!r} names no loaded adapter; loaded: {', '.join(loaded) or 'none'}"
            )
        return loaded[name]

    def _sampling(self, values: Any) -> tuple[SamplingParams, dict[str, Any], StopStrings | None]:
        """Return the parameters, the options and the stop strings of a request. Raises BadRequestError."""
        try:
            params, options = read_params(values)
            stops = read_stops(options["stop"])
            if stops and self._tokenizer is None:
                raise ValueError("the local engine has no tokenizer for the sampling parameter stop")
            return (
                params,
                options,
                StopStrings(self._tokenizer(), stops) if stops and self._tokenizer else None,
            )
        except (ValueError, TypeError, AgentRLError) as error:
            raise BadRequestError(str(error)) from error

    def _add_images(self, generation: GenerationRequest, data: Any) -> None:
        """Read the images of a request: a list of ``data:`` URLs, one for each run of image tokens."""
        vision, reader = self._weights.model.vision, self._weights.model.pixels
        if vision is None or reader is None:
            raise BadRequestError("image_data: the served model reads text only")
        if not isinstance(data, list) or not all(isinstance(url, str) for url in data):
            raise BadRequestError("image_data must be a list of data: URLs")
        count = generation.prompt_tokens
        try:
            images = [image_of_url(url, where=f"image_data[{i}]") for i, url in enumerate(data)]
            prompt = generation.tokens[:count].tolist()
            generation.tokens[:count], generation.images = read_request_images(prompt, images, vision, reader)
        except ImageError as error:
            raise BadRequestError(str(error)) from error

    def _answer(self, generation: GenerationRequest, body: Json) -> Json:
        """Return the tokens since the last part, and what holds for the whole generation."""
        reason = generation.finish_reason
        if reason is not None and "status_code" in reason:
            return {"error": {"message": reason["message"], "code": reason["status_code"]}}
        first = generation.reported
        generation.reported = len(generation.logprobs)
        ids = generation.output_ids[first:]
        meta: Json = {
            "id": generation.rid,
            "finish_reason": reason,
            "prompt_tokens": generation.prompt_tokens,
            "completion_tokens": generation.reported,
            "cached_tokens": generation.cached_tokens or 0,
            "weight_version": generation.spans[-1]["version"]
            if generation.spans
            else self._scheduler.version,
            "weight_versions": [dict(span) for span in generation.spans],
            "num_retractions": generation.retractions,
        }
        if reason is not None and generation.routing is not None:
            meta["routed_experts"] = base64.b64encode(generation.routing.tobytes()).decode()
        if body.get("return_logprob"):
            rows = zip(generation.logprobs[first:], ids, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in rows]
            meta["logprobs_of"] = logprobs_of("local", generation.sampler.params.to_request())
        if (kept := generation.sampler.kept) is not None:
            meta["output_token_sampling_mask"] = kept[first : generation.reported]
            meta["output_token_sampling_logprobs"] = generation.logprobs[first : generation.reported]
        return {"output_ids": ids, "meta_info": meta}


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
