"""The weights and the adapters that the local engine serves: SGLang's calls that load them.

Weights come from a folder; or, between ``/begin_weight_update`` and ``/end_weight_update``, from the
trainer's memory or over a process group. They replace the served ones once they are whole and fit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from agentrl.device_lease import return_freed_memory
from agentrl.errors import AgentRLError, ModelError
from agentrl.inference.engines.local.model import LocalModel
from agentrl.inference.engines.local.patch import Patch
from agentrl.inference.engines.local.requests import BadRequestError, read_json
from agentrl.inference.engines.local.worker import Worker
from agentrl.weights.memory_file import StoredTensor, open_memory_file, unflatten
from agentrl.weights.weight_group import broadcast, connect, join_group

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

    def __init__(self, worker: Worker, model: LocalModel) -> None:
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
