"""HTTP API of the local engine: the part of SGLang's API that AgentRL uses."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar, get_args

import numpy as np
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

from agentrl.documents.images import image_of_url
from agentrl.documents.sampling import logprobs_of
from agentrl.errors import AgentRLError, ImageError
from agentrl.inference.engines.local.model import LocalModel
from agentrl.inference.engines.local.sampling import RowSampler, StopStrings, read_params, read_stops
from agentrl.inference.engines.local.scheduler import GenerationRequest, PauseMode, Scheduler, Worker
from agentrl.inference.engines.local.vision import read_request_images

Json = dict[str, Any]
T = TypeVar("T")

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
        self._model = model
        self._context_length = context_length
        self._instance = instance
        self._tokenizer = tokenizer
        self._updating = asyncio.Lock()

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
            Route("/update_weights_from_disk", self.update_weights, methods=["POST"]),
            Route("/update_weight_version", self.update_weight_version, methods=["POST"]),
            Route("/load_lora_adapter", self.load_adapter, methods=["POST"]),
            Route("/unload_lora_adapter", self.unload_adapter, methods=["POST"]),
        ]
        handlers: Any = {_BadRequestError: _bad_request}
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=handlers)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._worker.start()
        yield
        await asyncio.to_thread(self._worker.stop)

    async def _in_thread(self, function: Callable[[Scheduler], T]) -> T:
        """Return what ``function`` returns between two steps of the scheduler."""
        return await asyncio.wrap_future(self._worker.call(function))

    async def generate(self, request: Request) -> Response:
        """Generate, with ``stream`` as events; abort the request if the client disconnects."""
        body = await _json(request)
        loop = asyncio.get_running_loop()
        parts: asyncio.Queue[Json] = asyncio.Queue()

        def report(generation: GenerationRequest) -> None:
            loop.call_soon_threadsafe(parts.put_nowait, self._answer(generation, body))

        generation = self._generation(body, report)
        if body.get("image_data"):
            await asyncio.to_thread(self._add_images, generation, body["image_data"])
        await self._in_thread(lambda scheduler: scheduler.submit(generation))
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
            gone.cancel()
            finished.cancel()

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
                "model_path": self._model.folder,
                "is_generation": True,
                "weight_version": self._scheduler.version,
                "vocab_size": self._model.vocab_size,
            }
        )

    async def server_info(self, _: Request) -> Response:
        """Return the engine's settings and load."""
        return JSONResponse(
            {
                "engine": "local",
                "instance": self._instance,
                "model_path": self._model.folder,
                "weight_version": self._scheduler.version,
                "dtype": str(self._model.dtype).removeprefix("torch."),
                "device": str(self._model.device),
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
        flushed = await self._in_thread(Scheduler.flush)
        text = "Cache flushed." if flushed else "Requests are running: the cache was not flushed."
        return Response(text, status_code=200 if flushed else 400, media_type="text/plain")

    async def pause(self, request: Request) -> Response:
        """Pause in one of the three modes."""
        mode = (await _json(request)).get("mode", "abort")
        if mode not in _PAUSE_MODES:
            raise _BadRequestError(f"unknown pause mode {mode!r}; choose one of {', '.join(_PAUSE_MODES)}")
        await self._in_thread(lambda scheduler: scheduler.pause(mode))
        return JSONResponse({"status": "ok", "message": "Generation is paused."})

    async def resume(self, _: Request) -> Response:
        """Continue after a pause."""
        await self._in_thread(Scheduler.resume)
        return JSONResponse({"status": "ok", "message": "Generation continues."})

    async def abort(self, request: Request) -> Response:
        """End one request or all."""
        body = await _json(request)
        rid = body.get("rid")
        if not body.get("abort_all") and not rid:
            raise _BadRequestError("abort_request needs rid, or abort_all true")
        chosen = None if body.get("abort_all") else str(rid)
        await self._in_thread(lambda scheduler: scheduler.abort(chosen))
        return Response(status_code=200)

    async def update_weights(self, request: Request) -> JSONResponse:
        """Load other weights of the same shape; if they cannot be used, return 400 and keep the old ones."""
        body = await _json(request)
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str):
            raise _BadRequestError("update_weights_from_disk needs model_path")
        flush = bool(body.get("flush_cache", True))
        async with self._updating:
            try:
                model = await asyncio.to_thread(self._model.updated, path)
                if body.get("abort_all_requests"):
                    await self._in_thread(lambda scheduler: scheduler.abort(None))
                name = self._scheduler.version if version is None else str(version)
                await asyncio.wrap_future(self._worker.swap(model, name, flush=flush))
            except AgentRLError as error:
                answer = {"success": False, "message": str(error), "num_paused_requests": 0}
                return JSONResponse(answer, status_code=400)
            self._model = model
        paused = len(self._scheduler.running) + len(self._scheduler.waiting) if self._scheduler.paused else 0
        return JSONResponse({"success": True, "message": "Weights loaded.", "num_paused_requests": paused})

    async def update_weight_version(self, request: Request) -> Response:
        """Set the version of the served weights."""
        version = (await _json(request)).get("new_version")
        if not isinstance(version, str):
            raise _BadRequestError("update_weight_version needs new_version, a string")
        await self._in_thread(lambda scheduler: setattr(scheduler, "version", version))
        message = f"Weight version is {version}."
        return JSONResponse({"success": True, "message": message, "new_version": version})

    async def load_adapter(self, request: Request) -> JSONResponse:
        """Load the adapter in folder ``lora_path`` for requests that name ``lora_name``."""
        body = await _json(request)
        name, path = body.get("lora_name"), body.get("lora_path")
        if not isinstance(name, str) or not isinstance(path, str):
            raise _BadRequestError("load_lora_adapter needs lora_name and lora_path")
        async with self._updating:
            try:
                adapter = await asyncio.to_thread(self._model.read_adapter, name, path)
                await self._in_thread(lambda scheduler: scheduler.load_adapter(adapter))
            except AgentRLError as error:
                return self._adapters(str(error))
        return self._adapters()

    async def unload_adapter(self, request: Request) -> JSONResponse:
        """Refuse requests that name ``lora_name`` from now on; those that run finish with it."""
        name = str((await _json(request)).get("lora_name"))
        try:
            await self._in_thread(lambda scheduler: scheduler.unload_adapter(name))
        except AgentRLError as error:
            return self._adapters(str(error))
        return self._adapters()

    def _adapters(self, error: str | None = None) -> JSONResponse:
        loaded = {adapter.name: adapter.path for adapter in self._scheduler.adapters.values()}
        answer: Json = {"success": error is None, "loaded_adapters": loaded}
        if error is not None:
            answer["error_message"] = error
        return JSONResponse(answer, status_code=200 if error is None else 400)

    def _generation(
        self, body: Mapping[str, Any], report: Callable[[GenerationRequest], None]
    ) -> GenerationRequest:
        ids = body.get("input_ids")
        if not isinstance(ids, list) or not ids or any(type(item) is not int for item in ids):
            raise _BadRequestError("generate needs input_ids: a list of at least one integer")
        if min(ids) < 0 or max(ids) >= self._model.vocab_size:
            raise _BadRequestError(f"input_ids are outside the vocabulary of {self._model.vocab_size} ids")
        if len(ids) >= self._context_length:
            raise _BadRequestError(
                f"a prompt of {len(ids)} tokens and one more do not fit the context of {self._context_length}"
            )
        adapter = None
        if (lora := body.get("lora_path")) is not None:
            adapter = self._scheduler.adapters.get(lora) if isinstance(lora, str) else None
            if adapter is None:
                loaded = ", ".join(self._scheduler.adapters) or "none"
                raise _BadRequestError(f"lora_path {lora!r} names no loaded adapter; loaded: {loaded}")
        try:
            params, options = read_params(body.get("sampling_params") or {})
            stops = read_stops(options["stop"])
            if stops and self._tokenizer is None:
                raise ValueError("the local engine has no tokenizer for the sampling parameter stop")
            stop_strings = StopStrings(self._tokenizer(), stops) if stops and self._tokenizer else None
        except (ValueError, TypeError, AgentRLError) as error:
            raise _BadRequestError(str(error)) from error
        limit = min(params.max_new_tokens, self._context_length - len(ids))
        tokens = np.zeros(len(ids) + limit, dtype=np.int32)
        tokens[: len(ids)] = ids
        kept: list[list[int]] | None = [] if body.get("return_sampling_mask") and params.truncates else None
        stop_ids = frozenset() if options["ignore_eos"] else self._model.eos_ids | set(params.stop_token_ids)
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
            routed_from=_routed_from(body, len(ids)),
            adapter=adapter,
        )

    def _add_images(self, generation: GenerationRequest, data: Any) -> None:
        """Read the images of a request: a list of ``data:`` URLs, one for each run of image tokens."""
        vision, reader = self._model.vision, self._model.pixels
        if vision is None or reader is None:
            raise _BadRequestError("image_data: the served model reads text only")
        if not isinstance(data, list) or not all(isinstance(url, str) for url in data):
            raise _BadRequestError("image_data must be a list of data: URLs")
        count = generation.prompt_tokens
        try:
            images = [image_of_url(url, where=f"image_data[{i}]") for i, url in enumerate(data)]
            prompt = generation.tokens[:count].tolist()
            generation.tokens[:count], generation.images = read_request_images(prompt, images, vision, reader)
        except ImageError as error:
            raise _BadRequestError(str(error)) from error

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


class _BadRequestError(Exception):
    """The request is not valid; the answer has status 400."""


def _routed_from(body: Mapping[str, Any], prompt_tokens: int) -> int | None:
    """Return the first token whose experts are wanted; None if none are."""
    if not body.get("return_routed_experts"):
        return None
    start = body.get("routed_experts_start_len", 0)
    if type(start) is not int or not 0 <= start <= prompt_tokens:
        raise _BadRequestError(f"routed_experts_start_len is {start!r}, outside [0, {prompt_tokens}]")
    return start


async def _bad_request(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": {"message": str(error)}}, status_code=400)


async def _json(request: Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.body())
    except ValueError as error:
        raise _BadRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _BadRequestError("the body must be a JSON object")
    return body


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
