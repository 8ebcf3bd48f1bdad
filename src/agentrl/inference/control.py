"""Manage an inference engine over SGLang's HTTP API: health, identity, load, pauses, aborts and weights."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from agentrl.documents.model_call import ExpertShape
from agentrl.errors import ENGINES, EngineError, ModelError
from agentrl.inference.engine import EngineRefusedError, known_format
from agentrl.inference.http import CONTROL_SECONDS, EngineHttp
from agentrl.weights.folder import read_config, stored_bytes

_LOAD_RATE = 100e6
"""Bytes per second at which an engine reads weights, at least: a disk over a network of 1 Gbit/s."""

PauseMode = Literal["abort", "retract", "in_place"]
MemoryPart = Literal["weights", "kv_cache"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model that an engine serves.

    ``vocab_size`` is None if the engine does not report it. ``context_length`` is the largest number of
    tokens of a prompt and its continuation; None if unknown.
    """

    model_path: str
    version: int
    vocab_size: int | None
    context_length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The running and queued requests of an engine, and the tokens in them; 0 tokens if it reports none."""

    requests: int
    tokens: int = 0


class EngineControl:
    """The calls that manage one engine. Methods raise EngineError with the url, the status and the answer."""

    takes_live_weights = True
    """Whether weights may come from the trainer's memory, without a disk."""

    def __init__(
        self,
        url: str,
        timeout: float = 120.0,
        *,
        vocab_size: int | None = None,
        instance: str | None = None,
        experts: ExpertShape | None = None,
    ) -> None:
        """Create the client of the engine at ``url``.

        ``timeout`` limits the time between two tokens of a generation, the time until the first one, and the
        time of a weight update, in seconds; large weights may take longer (``load_seconds``). With
        ``vocab_size`` None, the engine is asked for it. With an ``instance``, prompts are sent only to a
        server that has this instance name. With ``experts``, the policy's routing is asked for.
        """
        self._http = EngineHttp(url)
        self.url = self._http.url
        self._timeout = timeout
        self._vocab_size = vocab_size
        self._unverified = instance
        self._instance = instance
        self._experts = experts

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def health(self) -> bool:
        """Return whether the engine takes requests; False while it is paused, starting or unreachable."""
        try:
            await self._http.respond("GET", "/health")
        except EngineError:
            return False
        return True

    async def model_info(self) -> ModelInfo:
        """Return the served model, its policy version and its context length."""
        info, server = await asyncio.gather(self._get("/model_info"), self.server_info())
        path = str(info.get("model_path", ""))
        vocab_size = info.get("vocab_size")
        if not isinstance(vocab_size, int):
            vocab_size = await asyncio.to_thread(vocab_size_of, path)
        # SGLang refuses a prompt of max_req_input_len tokens, which is a little below its context.
        length = server.get("max_req_input_len") or server.get("context_length")
        return ModelInfo(
            model_path=path,
            version=policy_version(info.get("weight_version"), self.url),
            vocab_size=vocab_size,
            context_length=length if isinstance(length, int) else None,
        )

    async def server_info(self) -> dict[str, Any]:
        """Return the engine's own description, unchanged."""
        return await self._get("/server_info")

    async def instance(self) -> str | None:
        """Return the instance name that ``agentrl serve`` gave the server; None if it has none."""
        info = await self.server_info()
        given = info.get("instance")
        return str(given) if given else instance_of(str(info.get("served_model_name", "")))

    async def check_instance(self, expected: str | None) -> None:
        """Raise EngineError unless the server's instance name is ``expected``; None accepts any server."""
        if expected is None:
            return
        try:
            instance = await self.instance()
        except EngineRefusedError:
            instance = None  # a server of another kind
        if instance != expected:
            raise EngineError(
                f"{self.url} is answered by another server ({instance or 'unnamed'}), not by the engine that"
                f" was started there ({expected})",
                hint="end that server, or choose another --port",
            )

    async def load(self) -> EngineLoad:
        """Return the running and queued requests and their tokens."""
        # Ask for /v1/loads: SGLang 0.5.23 has no /get_load.
        answer = await self._get("/v1/loads?include=core")
        with known_format(self.url, answer):
            ranks = answer.get("loads", [])
            requests = (rank.get("num_running_reqs", 0) + rank.get("num_waiting_reqs", 0) for rank in ranks)
            tokens = (rank.get("num_total_tokens", 0) for rank in ranks)
            return EngineLoad(requests=int(sum(requests)), tokens=int(sum(tokens)))

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; new requests wait.

        ``retract`` drops the KV cache of running requests, which is recomputed on resume; ``in_place`` keeps
        it; ``abort`` ends the requests with the tokens generated so far.
        """
        await self._post("/pause_generation", {"mode": mode}, self._timeout)

    async def resume(self) -> None:
        """Continue after ``pause``."""
        await self._post("/continue_generation", {})

    async def release_memory(self) -> None:
        """Give the memory of the weights and the KV cache back; the engine is paused and runs no request."""
        await self._post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, self._timeout)

    async def resume_memory(self, part: MemoryPart) -> None:
        """Allocate a part again: ``weights``, whose values an update then loads, and then ``kv_cache``."""
        await self._post("/resume_memory_occupation", {"tags": [part]}, self._timeout)

    async def flush_cache(self) -> None:
        """Drop every cached prefix. Raises EngineRefusedError while requests are running."""
        await self._post("/flush_cache", {})

    async def abort(self, rid: str | None) -> None:
        """End request ``rid``, or all if it is None; they return their tokens, finish reason ``abort``."""
        await self._post("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    async def update_weights(self, path: str, version: int) -> None:
        """Load the weights in folder ``path`` as policy ``version``.

        Unless it is paused, the engine first finishes the running requests. On EngineError it keeps serving
        the old weights.
        """
        # Drop cached prefixes: behind keys and values of the old weights, logprobs are off by up to 0.36.
        body = {"model_path": path, "weight_version": str(version), "flush_cache": True}
        seconds = max(self._timeout, await asyncio.to_thread(load_seconds, path))
        await self._update_call("/update_weights_from_disk", body, seconds, f"the weights in {path}")

    async def prepare_delta(self, files: Sequence[Path], base: int) -> None:
        """Let the local engine read what deltas change in the weights of version ``base``, which it serves.

        Running requests go on. Raises EngineRefusedError if it cannot change single elements of its weights.
        """
        body = {"files": [str(file) for file in files], "base_version": str(base)}
        await self._update_call("/prepare_weight_delta", body, self._timeout)

    async def apply_delta(self, version: int) -> None:
        """Serve ``version``, whose deltas were prepared. On EngineError the engine keeps its weights."""
        await self._update_call("/apply_weight_delta", {"weight_version": str(version)}, self._timeout)

    async def load_adapter(self, name: str, path: str) -> frozenset[str]:
        """Load the adapter in folder ``path`` as ``name``; return the names of all that are loaded.

        Running requests go on. An adapter of this name is replaced: it may be of an earlier run.
        """
        body = {"lora_name": name, "lora_path": path}
        seconds = max(self._timeout, await asyncio.to_thread(load_seconds, path))
        try:
            answer = await self._post("/load_lora_adapter", body, seconds)
        except EngineRefusedError as error:
            if "already loaded" not in error.message:
                raise
            await self.unload_adapter(name)
            answer = await self._post("/load_lora_adapter", body, seconds)
        return frozenset(answer.get("loaded_adapters") or (name,))

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; its running requests finish with it."""
        await self._post("/unload_lora_adapter", {"lora_name": name}, self._timeout)

    async def begin_update(self) -> None:
        """Begin an update whose parts arrive by calls; end one that an earlier process has begun."""
        try:
            await self._update_call("/begin_weight_update", {})
        except EngineRefusedError:
            await self._update_call("/end_weight_update", {})
            await self._update_call("/begin_weight_update", {})

    async def end_update(self) -> None:
        """Serve what has arrived since ``begin_update``."""
        await self._update_call("/end_weight_update", {}, self._timeout)

    async def load_memory(self, file: str, name: str, version: int) -> None:
        """Add the weights in a memory file of the trainer to an update; for the local engine."""
        body = {"file": file, "name": name, "weight_version": str(version)}
        await self._update_call("/update_weights_from_tensor", body, self._timeout)

    async def load_pickled(self, bucket: bytes, ranks: int, version: int, count: int) -> None:
        """Add a ``flattened_bucket`` of ``count`` bytes to an update; each rank of SGLang gets it."""
        body = {
            "serialized_named_tensors": [base64.b64encode(bucket).decode("ascii")] * ranks,
            "load_format": "flattened_bucket", "weight_version": str(version), "flush_cache": True,
        }  # fmt: skip
        await self._update_call("/update_weights_from_tensor", body, self._timeout + count / _LOAD_RATE)

    async def join_group(self, name: str, host: str, port: int, backend: str) -> None:
        """Join the process group ``name`` of the trainer, rank 0, and this engine."""
        body = {
            "group_name": name, "master_address": host, "master_port": port, "rank_offset": 1,
            "world_size": 2, "backend": backend,
        }  # fmt: skip
        await self._update_call("/init_weights_update_group", body, self._timeout)

    async def receive(self, group: str, bucket: Sequence[tuple[str, str, list[int]]], version: int) -> None:
        """Add a bucket to an update, which the trainer sends: the name, dtype and shape of its tensors."""
        names, dtypes, shapes = zip(*bucket, strict=True)
        body = {
            "group_name": group, "names": names, "dtypes": dtypes, "shapes": shapes,
            "load_format": "flattened_bucket", "weight_version": str(version), "flush_cache": True,
        }  # fmt: skip
        await self._update_call("/update_weights_from_distributed", body, self._timeout)

    async def _update_call(
        self, path: str, body: Mapping[str, Any], timeout: float = CONTROL_SECONDS, what: str | None = None
    ) -> None:
        answer = await self._post(path, body, timeout)
        if not answer.get("success", False):
            raise EngineRefusedError(f"engine {self.url} refused {what or path}: {answer.get('message')}")

    async def set_version(self, version: int) -> None:
        """Set the policy version of the served weights."""
        await self._post("/update_weight_version", {"new_version": str(version)})

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._http.call("GET", path)

    async def _post(
        self, path: str, body: Mapping[str, Any], timeout: float = CONTROL_SECONDS
    ) -> dict[str, Any]:
        return await self._http.call("POST", path, body, timeout)


def instance_of(name: str) -> str | None:
    """Return the instance from a served model's name, ``NAME@INSTANCE``; None if there is none."""
    return name.rpartition("@")[2] if "@" in name else None


def load_seconds(folder: str | None) -> float:
    """Return how long the weights in ``folder`` may take to load: their bytes at 100 MB/s; 0 if unknown."""
    if folder is None:
        return 0.0
    try:
        return stored_bytes(Path(folder)) / _LOAD_RATE
    except (OSError, ModelError):
        return 0.0


def vocab_size_of(folder: str) -> int | None:
    """Return ``vocab_size`` from the config in a model folder; None if it cannot be read here."""
    try:
        config = read_config(Path(folder))
    except ModelError:
        return None
    # Look into text_config too: the configuration of a vision model has the size only there.
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def policy_version(name: Any, url: str) -> int:
    """Return the number of a weight version; SGLang names the initial weights ``default``, which is 0."""
    if name in ("default", None):
        return 0
    try:
        return int(name)
    except (TypeError, ValueError) as error:
        raise EngineError(
            f"engine {url} reports weight version {name!r}, which is not a policy version",
            hint="start it by `agentrl serve`",
            outage=ENGINES,
        ) from error
