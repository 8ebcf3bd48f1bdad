"""HTTP API of the local engine: the part of SGLang's API that AgentRL uses, its weights included.

Weights come from a folder; or, between ``/begin_weight_update`` and ``/end_weight_update``, from the
trainer's memory or over a process group. They replace the served ones once they are whole and fit.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
import orjson
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer
from torch import Tensor

from agentrl.base.concurrency import end_tasks
from agentrl.base.device_lease import return_freed_memory
from agentrl.documents.images import image_of_url
from agentrl.documents.sampling import SamplingParams, logprobs_of
from agentrl.errors import AgentRLError, ImageError, ModelError, first_line
from agentrl.local.engine.linears import LoadedAdapter, Patch
from agentrl.local.engine.model import LocalModel, read_request_images
from agentrl.local.engine.scheduler import (
    GenerationRequest,
    PauseMode,
    RowSampler,
    Scheduler,
    StopStrings,
    read_params,
    read_stops,
)
from agentrl.weights.live import StoredTensor, broadcast, connect, join_group, open_memory_file, unflatten


class BadRequestError(Exception):
    """The request is not valid; the answer has status 400."""


async def bad_request(_: Request, error: Exception) -> JSONResponse:
    """Answer a BadRequestError."""
    return JSONResponse({"error": {"message": str(error)}}, status_code=400)


async def refusal(_: Request, error: Exception) -> JSONResponse:
    """Answer an AgentRLError: what is served stays as it was."""
    return JSONResponse({"success": False, "message": first_line(error)}, status_code=400)


async def read_json(request: Request, **needed: type) -> dict[str, Any]:
    """Return the body, a JSON object; ``needed`` are the types of fields that it must have.

    Raises BadRequestError.
    """
    try:
        body = orjson.loads(await request.body())
    except ValueError as error:
        raise BadRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    if not all(isinstance(body.get(name), kind) for name, kind in needed.items()):
        fields = " and ".join(f"{name} ({kind.__name__})" for name, kind in needed.items())
        raise BadRequestError(f"{request.url.path} needs {fields}")
    return body


def read_ids(body: Mapping[str, Any], vocab_size: int, context_length: int) -> list[int]:
    """Return the prompt: ids of the vocabulary that leave a token of the context. Raises BadRequestError."""
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids or any(type(item) is not int for item in ids):
        raise BadRequestError("generate needs input_ids: a list of at least one integer")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise BadRequestError(f"input_ids are outside the vocabulary of {vocab_size} ids")
    if len(ids) >= context_length:
        raise BadRequestError(
            f"a prompt of {len(ids)} tokens and one more do not fit the context of {context_length}"
        )
    return ids


def read_routed_from(body: Mapping[str, Any], prompt_tokens: int) -> int | None:
    """Return the first token whose experts are wanted; None if none are."""
    if not body.get("return_routed_experts"):
        return None
    start = body.get("routed_experts_start_len", 0)
    if type(start) is not int or not 0 <= start <= prompt_tokens:
        raise BadRequestError(f"routed_experts_start_len is {start!r}, outside [0, {prompt_tokens}]")
    return start


log = logging.getLogger(__name__)

T = TypeVar("T")


class EngineWorker:
    """Owns a scheduler in a thread, which runs its steps, and calls between them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        """Other threads read it; they change it by ``call``."""
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._swap: tuple[Callable[[Scheduler], None], Future[None]] | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread after its current step; abort all requests."""
        self._calls.put(None)
        self._thread.join(timeout)

    def call(self, function: Callable[[Scheduler], T]) -> Future[T]:
        """Return at once, with a future of what ``function`` returns in the thread."""
        done: Future[T] = Future()
        self._calls.put(lambda: self._settle(done, function))
        return done

    async def run(self, function: Callable[[Scheduler], T]) -> T:
        """Return what ``function`` returns between two steps of the scheduler."""
        return await asyncio.wrap_future(self.call(function))

    async def swap(self, change: Callable[[Scheduler], None]) -> None:
        """Change the served weights: at once while paused, else when the running requests have ended."""
        done: Future[None] = Future()

        def schedule() -> None:
            if self._swap is not None:
                done.set_exception(ModelError("another weight update is in progress"))
                return
            self.scheduler.draining = True
            self._swap = (change, done)

        self._calls.put(schedule)
        await asyncio.wrap_future(done)

    def _run(self) -> None:
        scheduler = self.scheduler
        while True:
            # Block only without work: with some, calls are taken between two steps.
            calls = [] if scheduler.has_work else [self._calls.get()]
            while not self._calls.empty():
                calls.append(self._calls.get())
            for call in calls:
                if call is None:
                    scheduler.abort(None)
                    return
                call()
            if self._swap is not None and (scheduler.paused or not scheduler.running):
                function, done = self._swap
                self._swap, scheduler.draining = None, False
                self._settle(done, function)
            if scheduler.has_work:
                try:
                    scheduler.step()
                except Exception as error:
                    log.exception("a forward pass failed; its requests end")
                    scheduler.fail_all(error)

    def _settle(self, done: Future[T], function: Callable[[Scheduler], T]) -> None:
        try:
            done.set_result(function(self.scheduler))
        except Exception as error:  # noqa: BLE001 - passed to the caller
            done.set_exception(error)


_MEMORY = ("kv_cache", "weights")


@dataclass(slots=True)
class _Update:
    """The weights that have arrived since ``/begin_weight_update``."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    version: str | None = None


class LoadedWeights:
    """The served model, and the calls that replace it or its adapters.

    A call that raises AgentRLError is answered with status 400, and leaves what is served as it was.
    """

    def __init__(self, worker: EngineWorker, model: LocalModel) -> None:
        self.model = model
        self._worker = worker
        self._updating = asyncio.Lock()
        self._update: _Update | None = None
        self._groups: dict[str, Any] = {}
        self._patch: Patch | None = None
        """What changes the served weights to those of the next version."""

    def routes(self) -> list[Route]:
        """Return the routes of these calls."""
        calls = {
            "/update_weights_from_disk": self.update_from_disk,
            "/update_weight_version": self.update_version,
            "/prepare_weight_delta": self.prepare_delta,
            "/apply_weight_delta": self.apply_delta,
            "/begin_weight_update": self.begin_update,
            "/update_weights_from_tensor": self.update_from_memory,
            "/init_weights_update_group": self.join_group,
            "/update_weights_from_distributed": self.update_from_group,
            "/end_weight_update": self.end_update,
            "/release_memory_occupation": self.release_memory,
            "/resume_memory_occupation": self.resume_memory,
            "/load_lora_adapter": self.load_adapter,
            "/unload_lora_adapter": self.unload_adapter,
        }
        return [Route(path, call, methods=["POST"]) for path, call in calls.items()]

    def close(self) -> None:
        """Leave all groups."""
        self._groups.clear()

    async def update_from_disk(self, request: Request) -> JSONResponse:
        """Load other weights of the same shape."""
        body = await read_json(request, model_path=str)
        async with self._updating:
            model = await asyncio.to_thread(self.model.updated, body["model_path"])
            if body.get("abort_all_requests"):
                await self._worker.run(lambda scheduler: scheduler.abort(None))
            flush = bool(body.get("flush_cache", True))
            await self._replace(model, body.get("weight_version"), flush)
        scheduler = self._worker.scheduler
        paused = len(scheduler.running) + len(scheduler.waiting) if scheduler.paused else 0
        return JSONResponse({"success": True, "message": "Weights loaded.", "num_paused_requests": paused})

    async def _replace(self, model: LocalModel, version: Any, flush: bool) -> None:
        name = self._worker.scheduler.version if version is None else str(version)
        self._patch = None
        await self._worker.swap(lambda scheduler: scheduler.replace_model(model, name, flush=flush))
        self.model = model

    async def prepare_delta(self, request: Request) -> JSONResponse:
        """Read what the deltas in ``files``, oldest first, change in the weights of ``base_version``.

        Requests go on. Raises ModelError if these are not the served weights, or cannot be changed in place.
        """
        body = await read_json(request, files=list, base_version=str)
        base, files = body["base_version"], [Path(file) for file in body["files"]]
        async with self._updating:
            served = self._worker.scheduler.version
            if served != base:
                raise ModelError(f"the deltas change version {base}, and version {served} is served")
            try:
                self._patch = await asyncio.to_thread(self.model.read_patch, files)
            except OSError as error:
                raise ModelError(str(error)) from error
        return _success()

    async def apply_delta(self, request: Request) -> JSONResponse:
        """Serve ``weight_version``, for which ``prepare_delta`` has read the changed elements."""
        version = (await read_json(request, weight_version=str))["weight_version"]
        async with self._updating:
            patch, self._patch = self._patch, None
            if patch is None:
                raise ModelError("no delta of the served weights is prepared")
            await self._worker.swap(lambda scheduler: scheduler.patch_model(patch, version))
        return _success()

    async def update_version(self, request: Request) -> Response:
        """Set the version of the served weights."""
        version = (await read_json(request, new_version=str))["new_version"]
        await self._worker.run(lambda scheduler: setattr(scheduler, "version", version))
        message = f"Weight version is {version}."
        return JSONResponse({"success": True, "message": message, "new_version": version})

    async def begin_update(self, _: Request) -> JSONResponse:
        """Expect parts of new weights; those of an update that was not ended are dropped."""
        self._update = _Update()
        return _success()

    async def update_from_memory(self, request: Request) -> JSONResponse:
        """Take the weights in the memory file ``file`` of the trainer, called ``name``; nothing is unpickled.

        SGLang's ``serialized_named_tensors`` are refused: they are pickles.
        """
        body = await read_json(request, file=str, name=str)
        return await self._take(body, lambda: open_memory_file(body["file"], body["name"]).named())

    async def join_group(self, request: Request) -> JSONResponse:
        """Join a group of two as rank 1; the trainer is rank 0."""
        body = await read_json(request)
        try:
            name, backend = str(body["group_name"]), body.get("backend", "nccl")
            host, port = str(body["master_address"]), int(body["master_port"])
            if (body["rank_offset"], body["world_size"]) != (1, 2) or backend not in ("gloo", "nccl"):
                raise ValueError("rank_offset is 1, world_size 2, and backend gloo or nccl")
        except (KeyError, TypeError, ValueError) as error:
            raise BadRequestError(f"init_weights_update_group: {error}") from error
        try:
            group = await asyncio.to_thread(lambda: join_group(connect(host, port), name, 1, backend))
        except RuntimeError as error:
            raise ModelError(str(error)) from error
        self._groups[name] = group
        return _success("The group is joined.")

    async def update_from_group(self, request: Request) -> JSONResponse:
        """Receive one flat bucket of tensors from rank 0 of a group."""
        body = await read_json(request)
        name = str(body.get("group_name"))
        group = self._groups.get(name)
        if group is None or body.get("load_format") != "flattened_bucket":
            raise BadRequestError("a joined group_name and load_format flattened_bucket are needed")
        try:
            parts = _bucket(body["names"], body["dtypes"], body["shapes"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadRequestError(f"names, dtypes and shapes describe no bucket: {error}") from error

        def receive() -> dict[str, Tensor]:
            flat = torch.empty(parts[-1].end, dtype=torch.uint8, device=self.model.device)
            try:
                broadcast(group, flat)
            except RuntimeError:
                self._groups.pop(name, None)  # the other end gives it up too
                raise
            return {part.name: unflatten(part, flat[part.begin : part.end]) for part in parts}

        return await self._take(body, receive)

    async def _take(self, body: dict[str, Any], read: Callable[[], dict[str, Tensor]]) -> JSONResponse:
        """Add what ``read`` returns to the update that has begun; drop the update if it fails."""
        async with self._updating:
            if self._update is None:
                raise ModelError("call /begin_weight_update first")
            try:
                self._update.tensors |= await asyncio.to_thread(read)
            except (AgentRLError, RuntimeError) as error:
                self._update = None
                raise ModelError(str(error)) from error
            self._update.version = body.get("weight_version") or self._update.version
        return _success()

    async def end_update(self, _: Request) -> JSONResponse:
        """Serve the weights that have arrived. Raises ModelError if they do not fit."""
        update, self._update = self._update, None
        if update is None:
            raise ModelError("no weight update has begun")
        if not update.tensors:
            return _success("Nothing has arrived: the weights stay.")
        async with self._updating:
            model = await asyncio.to_thread(self.model.updated_from, update.tensors)
            await self._replace(model, update.version, flush=True)
        return _success()

    async def release_memory(self, request: Request) -> JSONResponse:
        """Give the memory of weights and KV cache back to the system. ModelError while requests run."""
        tags = await _memory_tags(request)
        async with self._updating:
            await self._worker.run(lambda scheduler: scheduler.release_memory(tags))
            self._patch = None
            await asyncio.to_thread(return_freed_memory)
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()
        return JSONResponse({})

    async def resume_memory(self, request: Request) -> JSONResponse:
        """Allocate the KV cache again. The next update brings the weights."""
        if "kv_cache" in await _memory_tags(request):
            await self._worker.run(lambda scheduler: scheduler.cache.allocate())
        return JSONResponse({})

    async def load_adapter(self, request: Request) -> JSONResponse:
        """Load the adapter in folder ``lora_path`` for requests that name ``lora_name``."""
        body = await read_json(request, lora_name=str, lora_path=str)
        async with self._updating:
            try:
                adapter = await asyncio.to_thread(
                    self.model.read_adapter, body["lora_name"], body["lora_path"]
                )
                await self._worker.run(lambda scheduler: scheduler.load_adapter(adapter))
            except AgentRLError as error:
                return self._adapters(str(error))
        return self._adapters()

    async def unload_adapter(self, request: Request) -> JSONResponse:
        """Refuse requests that name ``lora_name`` from now on; those that run finish with it."""
        name = str((await read_json(request)).get("lora_name"))
        try:
            await self._worker.run(lambda scheduler: scheduler.unload_adapter(name))
        except AgentRLError as error:
            return self._adapters(str(error))
        return self._adapters()

    def _adapters(self, error: str | None = None) -> JSONResponse:
        loaded = {adapter.name: adapter.path for adapter in self._worker.scheduler.adapters.values()}
        if error is None:
            return JSONResponse({"success": True, "loaded_adapters": loaded})
        answer = {"success": False, "loaded_adapters": loaded, "error_message": error}
        return JSONResponse(answer, status_code=400)


async def _memory_tags(request: Request) -> list[str]:
    """Return the parts of memory that a request names, ``kv_cache`` and ``weights``; all without a list."""
    tags = (await read_json(request)).get("tags") or list(_MEMORY)
    if not isinstance(tags, list) or not set(tags) <= set(_MEMORY):
        raise BadRequestError(f"tags is {tags!r}; name some of {', '.join(_MEMORY)}")
    return tags


def _bucket(names: list[str], dtypes: list[str], shapes: list[list[int]]) -> list[StoredTensor]:
    """Return where each tensor lies in a flat bucket. Raises ValueError for an empty one."""
    parts: list[StoredTensor] = []
    end = 0
    for name, kind, shape in zip(names, dtypes, shapes, strict=True):
        dtype = getattr(torch, kind)
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        parts.append(StoredTensor(name, dtype, tuple(shape), begin, end))
    if not parts:
        raise ValueError("it is empty")
    return parts


def _success(message: str = "Success") -> JSONResponse:
    return JSONResponse({"success": True, "message": message})


Json = dict[str, Any]

STREAM_INTERVAL = 16
"""Tokens per event of a stream; the first token is sent at once."""

_PAUSE_MODES = get_args(PauseMode)


class LocalEngineServer:
    """Translates HTTP requests into calls of the worker."""

    def __init__(
        self,
        worker: EngineWorker,
        model: LocalModel,
        context_length: int,
        instance: str | None,
        tokenizer: Callable[[], Tokenizer],
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
            Route("/metrics", self.metrics),
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
        """Return the running and waiting requests, and how much of the KV cache they hold."""
        scheduler = self._scheduler
        rank = {
            "dp_rank": 0,
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.waiting),
            "num_total_tokens": scheduler.tokens,
            "max_total_num_tokens": scheduler.cache.max_tokens,
            "token_usage": scheduler.cache.usage,
        }
        return JSONResponse({"loads": [rank]})

    async def metrics(self, _: Request) -> Response:
        """Return the counters that SGLang has under the same names, in Prometheus' text format."""
        scheduler = self._scheduler
        return Response(
            f'sglang:realtime_tokens_total{{mode="decode"}} {scheduler.generated}\n'
            f'sglang:realtime_tokens_total{{mode="prefill_compute"}} {scheduler.computed}\n'
            f"sglang:num_retracted_requests_total {scheduler.retracted}\n",
            media_type="text/plain; version=0.0.4",
        )

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
            return params, options, StopStrings(self._tokenizer(), stops) if stops else None
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
