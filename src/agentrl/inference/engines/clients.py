"""Create the client of an engine by its name: SGLang's, vLLM's, or of a server that several runs share."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from agentrl.documents.images import Image
from agentrl.documents.model_call import ExpertShape
from agentrl.documents.run import EngineFigures
from agentrl.documents.sampling import LogprobsOf, SamplingParams, logprobs_of
from agentrl.errors import EngineError, ModelError
from agentrl.inference.client import (
    EngineClient,
    EngineLoad,
    MemoryPart,
    ModelInfo,
    PauseMode,
    StreamChunk,
    instance_of,
    load_seconds,
    metric,
    policy_version,
    version_spans,
    vocab_size_of,
)
from agentrl.inference.engine import EngineRefusedError, known_format
from agentrl.weights.folder import checksums, read_header, tensor_files

_FLUSH_TRIES, _FLUSH_SECONDS = 10, 0.2
_BLOCKS = re.compile(r'\b(block_size|num_gpu_blocks)="(\d+)"')
_PAUSE = {"abort": "abort", "retract": "keep", "in_place": "keep"}
_RENAMED = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}


def engine_client(
    engine: str,
    url: str,
    timeout: float = 120.0,
    *,
    vocab_size: int | None = None,
    instance: str | None = None,
    experts: ExpertShape | None = None,
) -> EngineClient:
    """Return the client for an engine of this name; the arguments are those of EngineClient."""
    if engine == "vllm":
        return VllmClient(url, timeout, vocab_size=vocab_size, instance=instance)
    return EngineClient(url, timeout, vocab_size=vocab_size, instance=instance, experts=experts)


class VllmClient(EngineClient):
    """The client of a vLLM server that runs in development mode and with ``--enable-scale-out``."""

    takes_live_weights = False

    _returns_masks = False

    async def health(self) -> bool:
        """Return whether the engine takes requests; vLLM itself reports healthy while it is paused."""
        if not await super().health():
            return False
        return not await self._is_paused()

    async def instance(self) -> str | None:
        """Return the instance name, which ends one of the names of the served model."""
        answer = await self._get("/v1/models")
        with known_format(self.url, answer):
            names = [str(model["id"]) for model in answer.get("data", ())]
        return next((found for name in names if (found := instance_of(name)) is not None), None)

    async def model_info(self) -> ModelInfo:
        """Return the served model and its policy version; ``model_path`` is that of the server's start."""
        answer = await self._get("/v1/models")
        with known_format(self.url, answer):
            model = answer["data"][0]
            path, length = str(model["root"]), model.get("max_model_len")
        version = await self._version_at_start()
        vocab_size = await asyncio.to_thread(vocab_size_of, path)
        return ModelInfo(model_path=path, version=version, vocab_size=vocab_size, context_length=length)

    async def server_info(self) -> dict[str, Any]:
        """Return vLLM's own description, with ``model_path`` added."""
        return {**await super().server_info(), "model_path": (await self.model_info()).model_path}

    async def load(self) -> EngineLoad:
        """Return the running and queued requests, from the metrics: ``/load`` also counts aborted ones."""
        # Its requests are counted there too: let a refusal pass, or the engine would look idle for ever.
        _, answer = await self._http.respond("GET", "/metrics")
        metrics = answer.decode("utf-8", "replace")
        with known_format(self.url, metrics):
            running, waiting, generated, preempted, queried, cached = (
                int(sum(metric(metrics, f"vllm:{name}")))
                for name in (
                    "num_requests_running", "num_requests_waiting", "generation_tokens_total",
                    "num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
                )
            )  # fmt: skip
            usage = metric(metrics, "vllm:kv_cache_usage_perc")
            figures = EngineFigures(
                at=time.monotonic(), running=running, waiting=waiting, kv_usage=max(usage, default=0.0),
                capacity=_capacity(metrics), generated=generated, computed=queried - cached,
                preempted=preempted,
            )  # fmt: skip
        return EngineLoad(requests=running + waiting, figures=figures if usage else None)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; ``retract`` keeps the KV cache until weights are loaded, which drops it."""
        await self._post(f"/pause?mode={_PAUSE[mode]}", {}, self._timeout)

    async def resume(self) -> None:
        """Continue after ``pause``."""
        await self._post("/resume", {})

    async def release_memory(self) -> None:
        """Drop the weights and the KV cache: vLLM's sleep of level 2."""
        await self._post("/sleep?level=2", {}, self._timeout)

    async def resume_memory(self, part: MemoryPart) -> None:
        """Allocate a part again; an update then loads the weights."""
        await self._post(f"/wake_up?tags={part}", {}, self._timeout)

    async def flush_cache(self) -> None:
        """Drop every cached prefix; retry, since vLLM frees the cache of a request shortly after its end."""
        for _ in range(_FLUSH_TRIES):
            if (await self._post("/reset_prefix_cache", {})).get("success", False):
                return
            await asyncio.sleep(_FLUSH_SECONDS)
        raise EngineRefusedError(f"engine {self.url} did not flush its cache: requests are running")

    async def abort(self, rid: str | None) -> None:
        """End request ``rid``, or all requests if it is None."""
        ids = {} if rid is None else {"request_ids": [f"generate-tokens-{rid}"]}
        await self._post("/abort_requests", ids)

    async def update_weights(self, path: str, version: int) -> None:
        """Load the weights in ``path``, after checking the files: vLLM crashes if it cannot load them."""
        info = await self.model_info()
        await asyncio.to_thread(_check_same_tensors, Path(info.model_path), Path(path))
        is_paused = await self._is_paused()
        if not is_paused:
            await self._post("/pause?mode=wait", {}, self._timeout)
        try:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            seconds = max(self._timeout, await asyncio.to_thread(load_seconds, path))
            await self._post("/collective_rpc", reload, seconds)
            await self.set_version(version)
            await self._post("/reset_prefix_cache?reset_running_requests=true", {})
        finally:
            if not is_paused:
                await self.resume()

    async def load_adapter(self, name: str, path: str) -> frozenset[str]:
        """Load the adapter in folder ``path`` as ``name``; return the names of all that are loaded."""
        body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        seconds = max(self._timeout, await asyncio.to_thread(load_seconds, path))
        await self._http.respond("POST", "/v1/load_lora_adapter", body, seconds)
        answer = await self._get("/v1/models")
        with known_format(self.url, answer):
            return frozenset(str(model["id"]) for model in answer["data"] if model.get("parent"))

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter."""
        await self._http.respond("POST", "/v1/unload_lora_adapter", {"lora_name": name}, self._timeout)

    def _request(
        self,
        ids_json: bytes,
        params: SamplingParams,
        rid: str,
        images: Sequence[Image] = (),
        routed_from: int | None = None,
    ) -> tuple[str, bytes]:
        if images:
            raise EngineRefusedError(
                f"engine {self.url} is vLLM, and images are sent to SGLang and the local engine only",
                hint="serve the model with --engine sglang",
            )
        sampling = {_RENAMED.get(name, name): value for name, value in params.to_request().items()}
        for name, vllms in (("json_schema", "json"), ("structural_tag", "structural_tag")):
            if (grammar := sampling.pop(name, None)) is not None:
                sampling["structured_outputs"] = {vllms: grammar}
        if sampling.get("ignore_eos"):
            sampling["stop_token_ids"] = []  # SGLang's ignore_eos ignores these too
        rest = {
            "request_id": rid,
            "sampling_params": {**sampling, "logprobs": 0, "detokenize": False},
            "stream": True,
            "stream_options": {"include_usage": True},
            **({} if self.adapter is None else {"model": self.adapter}),
        }
        return "/inference/v1/generate", b"".join((b'{"token_ids":', ids_json, b",", orjson.dumps(rest)[1:]))

    def _fields(self, event: Mapping[str, Any], have: int) -> StreamChunk:
        usage = event.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if not event["choices"]:
            return StreamChunk(prompt_tokens=usage.get("prompt_tokens"), cached_tokens=cached)
        choice = event["choices"][0]
        content = (choice["logprobs"] or {}).get("content") or ()
        return StreamChunk(
            ids=choice["token_ids"] or (),
            logprobs=[float(item["logprob"]) for item in content],
            spans=version_spans(choice.get("weight_versions"), self.url),
            finish_reason=choice["finish_reason"],
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=cached,
        )

    def _logprobs_of(self, params: SamplingParams) -> LogprobsOf:
        return logprobs_of("vllm", params.to_request())

    async def _version_at_start(self) -> int:
        """Return the served version: vLLM names versions only at the end of a stream."""
        answer = await self._get("/weight_info")
        with known_format(self.url, answer):
            return policy_version(answer["weight_version"], self.url)

    async def _is_paused(self) -> bool:
        answer = await self._get("/is_paused")
        with known_format(self.url, answer):
            return bool(answer["is_paused"])


def _capacity(metrics: str) -> int:
    """Return the tokens that vLLM's KV cache holds, over its data-parallel ranks; 0 if it does not say."""
    found = [dict(_BLOCKS.findall(line)) for line in metrics.splitlines() if "cache_config_info{" in line]
    return sum(int(each.get("block_size", 0)) * int(each.get("num_gpu_blocks", 0)) for each in found)


def _check_same_tensors(served: Path, offered: Path) -> None:
    """Raise EngineRefusedError unless ``offered`` holds tensors of the names and shapes in ``served``."""
    if not offered.is_dir():
        raise EngineRefusedError(f"there is no folder {offered} to load weights from")
    there, wanted = _tensors(offered), _tensors(served)
    for name, shape in wanted.items():
        if there.get(name) != shape:
            raise EngineRefusedError(
                f"{offered} does not fit the served model: {name} is {there.get(name)}, not {shape}"
            )


def _tensors(folder: Path) -> dict[str, list[int]]:
    """Return {name: shape} of every tensor, from the headers of the safetensors files."""
    shapes: dict[str, list[int]] = {}
    for file in tensor_files(folder):
        try:
            header = read_header(file)
        except ModelError as error:
            raise EngineRefusedError(error.message) from error
        shapes |= {name: entry["shape"] for name, entry in header.items()}
    if not shapes:
        raise EngineRefusedError(f"{folder} holds no *.safetensors")
    return shapes


_GONE_SECONDS = 60.0
"""How long the engine may be unreachable before it counts as ended."""


class AttachedEngine:
    """A running server, in the place of an ``EngineProcess``. It is never paused or ended from here."""

    def __init__(self, url: str, instance: str | None) -> None:
        self.url = url
        self.instance = instance
        self.pid = os.getpid()
        """Of the process that registers the engine: this one."""
        self._seen = time.monotonic()

    @classmethod
    async def find(cls, client: EngineClient, folder: str, seconds: float) -> AttachedEngine:
        """Wait until the server is healthy; check that it serves the weights in ``folder``, unchanged.

        Raises EngineError after ``seconds``, and for another model.
        """
        deadline = time.monotonic() + seconds
        while not await client.health():
            if time.monotonic() > deadline:
                raise EngineError(
                    f"no engine is ready at --engine_url {client.url} after {seconds:g} s",
                    hint="start it, or leave --engine_url out: `agentrl serve` then starts one",
                )
            await asyncio.sleep(1.0)
        info = await client.model_info()
        if info.version != 0:
            raise EngineError(
                f"the engine {client.url} serves whole weights that a run publishes, version {info.version}",
                hint="share an engine that serves its base model and adapters only",
            )
        difference = await asyncio.to_thread(_difference, Path(info.model_path), Path(folder))
        if difference is not None:
            raise EngineError(
                f"the engine {client.url} serves {info.model_path}, not the model in {folder}: {difference}",
                hint="give the engine's model by --model_name_or_path, or another --engine_url",
            )
        return cls(client.url, await client.instance())

    async def wait_ready(self, client: EngineClient, seconds: float) -> None:
        """Return at once: ``find`` has waited."""

    async def stop(self) -> None:
        """Leave the engine as it is."""

    async def check(self, client: EngineClient) -> None:
        """Raise EngineError once another server answers, or none has for a minute."""
        if await client.health():
            await client.check_instance(self.instance)
            self._seen = time.monotonic()
        elif time.monotonic() - self._seen > _GONE_SECONDS:
            raise EngineError(
                f"the engine {self.url} has not answered for {_GONE_SECONDS:g} s",
                hint="start it again; then start `agentrl serve` again",
            )


def _difference(served: Path, wanted: Path) -> str | None:
    """Return how the model in ``served`` differs from that in ``wanted``; None if they are the same."""
    if served.resolve() == wanted.resolve():
        return None
    if not served.is_dir():
        return "its folder is not on this machine, so that it cannot be compared"
    names = {"config.json", *(path.name for path in tensor_files(wanted))}
    ours, theirs = (
        {file.name: file.sha256 for file in checksums(folder) if file.name in names}
        for folder in (wanted, served)
    )
    differing = sorted(name for name in names if ours.get(name) != theirs.get(name))
    return f"{', '.join(differing)} differ" if differing else None
