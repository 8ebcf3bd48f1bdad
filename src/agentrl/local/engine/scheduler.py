"""Continuous batching of the local engine: choose the tokens of each forward pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.errors import ModelError
from agentrl.local.engine.linears import LoadedAdapter, Patch
from agentrl.local.engine.model import CacheSlot, Chunk, KVCache, LocalModel, RequestImages
from agentrl.local.engine.token_sampling import RowSampler, StopStrings, sample

log = logging.getLogger(__name__)

PauseMode = Literal["abort", "retract", "in_place"]

_FIRST_ROWS = 256


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """One generation.

    The scheduler's thread calls ``finish`` once, after the last token, and ``progress`` after the first token
    and then after every ``progress_tokens`` tokens.
    """

    rid: str
    tokens: NDArray[np.int32]
    """int32[prompt + max_new_tokens]: prompt, then generated tokens; the first ``length`` are valid."""
    prompt_tokens: int
    sampler: RowSampler
    stop_ids: frozenset[int]
    finish: Callable[[GenerationRequest], None]
    stop_strings: StopStrings | None = None
    progress: Callable[[GenerationRequest], None] | None = None
    progress_tokens: int = 1
    reported: int = 0
    """Number of generated tokens that ``progress`` and ``finish`` have passed on."""
    length: int = 0
    logprobs: list[float] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    cached_tokens: int | None = None
    slot: CacheSlot | None = None
    retractions: int = 0
    images: RequestImages | None = None
    adapter: LoadedAdapter | None = None
    """Every token is sampled with it, also when it is unloaded meanwhile."""
    finish_reason: dict[str, Any] | None = None
    routed_from: int | None = None
    """The first token whose experts are wanted."""
    routing: NDArray[np.int32] | None = None
    """The experts [n, layers, k] of the tokens from there to the last but one, at the end."""

    def __post_init__(self) -> None:
        self.length = self.prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        """The generated ids."""
        return [int(item) for item in self.tokens[self.prompt_tokens : self.length]]

    def append(self, token: int, logprob: float, version: str) -> None:
        """Add a generated token; set ``finish_reason`` if it is the last one."""
        index = self.length - self.prompt_tokens
        self.tokens[self.length] = token
        self.length += 1
        self.logprobs.append(logprob)
        self.sampler.record(token)
        if not self.spans or self.spans[-1]["version"] != version:
            self.spans.append({"version": version, "start": index, "end": index})
        self.spans[-1]["end"] = index + 1
        if token in self.stop_ids:
            self.finish_reason = {"type": "stop", "matched": token}
        elif self.stop_strings and (stop := self.stop_strings.completed_by(self.output_ids)) is not None:
            self.finish_reason = {"type": "stop", "matched": stop}
        elif self.length == len(self.tokens):
            self.finish_reason = {"type": "length", "length": index + 1}


class Scheduler:
    """Runs requests on one model and one KV cache. Not thread-safe: one thread owns it.

    Every step computes one token of each decoding request and up to ``chunk_tokens`` prompt tokens. A request
    whose prefix is being computed for another request waits for it and then copies it.
    """

    def __init__(
        self,
        model: LocalModel,
        cache: KVCache,
        *,
        version: str,
        max_running: int,
        chunk_tokens: int = 256,
        max_adapters: int = 16,
    ) -> None:
        self.model = model
        self.cache = cache
        self.version = version
        self.paused = False
        self.draining = False
        self._max_running = max_running
        self._chunk_tokens = chunk_tokens
        self._max_adapters = max_adapters
        self.adapters: dict[str, LoadedAdapter] = {}
        """Those that new requests may name."""
        self.waiting: list[GenerationRequest] = []
        self.running: list[GenerationRequest] = []

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def abort(self, rid: str | None) -> int:
        """End request ``rid``, or all if it is None, with the tokens so far; return how many were ended."""
        chosen = [r for r in (*self.running, *self.waiting) if rid is None or r.rid == rid]
        for request in chosen:
            request.finish_reason = {"type": "abort", "message": "aborted by request"}
            self._end(request)
        return len(chosen)

    def pause(self, mode: PauseMode) -> None:
        """Stop generating; ``retract`` moves running requests back to the queue, ``abort`` ends all."""
        self.paused = True
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            for request in reversed(self.running.copy()):
                self._retract(request)

    def resume(self) -> None:
        """Continue after ``pause``. Raises ModelError while the weights or the KV cache are released."""
        if not (self.model.is_loaded and self.cache.keys):
            raise ModelError(
                "the engine has released its memory",
                hint="send /resume_memory_occupation, then /update_weights_from_disk",
            )
        self.paused = False

    def release_memory(self, tags: Collection[str]) -> None:
        """Drop the KV cache (``kv_cache``) and the weights (``weights``); ModelError while requests run."""
        if self.running or not self.paused:
            raise ModelError("memory can be released only while the engine is paused and no request runs")
        if "kv_cache" in tags:
            self.cache.free()
        if "weights" in tags:
            self.model.unload()

    def flush(self) -> bool:
        """Drop cached prefixes; do nothing and return False while requests are running."""
        if not self.running:
            self.cache.drop_idle()
        return not self.running

    def replace_model(self, model: LocalModel, version: str, *, flush: bool = False) -> None:
        """Use other weights from the next step on; the KV cache of running requests stays unchanged.

        Raises ModelError if ``flush`` is set and requests that are paused ``in_place`` still use the cache.
        """
        if flush:
            self._require_flush()
        for adapter in {*self.adapters.values(), *(r.adapter for r in (*self.running, *self.waiting))}:
            if adapter is not None:
                model.adapt(adapter)
        self.model, self.version = model, version

    def patch_model(self, patch: Patch, version: str) -> None:
        """Change the served weights in place. Raises ModelError as ``replace_model`` with ``flush`` does."""
        self._require_flush()
        patch.apply()
        self.version = version

    def _require_flush(self) -> None:
        if not self.flush():
            raise ModelError(
                "the cache cannot be flushed: requests that are paused in place use it",
                hint="pause with mode retract, or send flush_cache false",
            )

    def load_adapter(self, adapter: LoadedAdapter) -> None:
        """Let requests name ``adapter``. Raises ModelError if the name is taken, or too many are loaded."""
        if adapter.name in self.adapters:
            raise ModelError(f"an adapter {adapter.name} is already loaded", hint="unload it first")
        if len(self.adapters) >= self._max_adapters:
            raise ModelError(
                f"{len(self.adapters)} adapters are loaded, which is the limit: {', '.join(self.adapters)}",
                hint="unload one, or start the engine with a larger --max_adapters",
            )
        self.model.adapt(adapter)
        self.adapters[adapter.name] = adapter

    def unload_adapter(self, name: str) -> None:
        """Refuse ``name`` from now on; its requests run to their end. ModelError for an unknown name."""
        adapter = self.adapters.pop(name, None)
        if adapter is None:
            raise ModelError(f"there is no adapter {name}; loaded: {', '.join(self.adapters) or 'none'}")
        self.cache.drop_idle(adapter)

    @property
    def tokens(self) -> int:
        """The number of tokens in the running and waiting requests."""
        return sum(request.length for request in (*self.running, *self.waiting))

    @property
    def has_work(self) -> bool:
        """Return whether ``step`` has something to compute."""
        return not self.paused and bool(self.running or (self.waiting and not self.draining))

    def step(self) -> None:
        """Admit waiting requests, run one forward pass, append the sampled tokens, end finished requests."""
        if not self.draining:
            self._admit()
        chunks, samplers = self._plan()
        if not chunks:
            return
        with torch.inference_mode():
            logits = self.model.forward([chunk for _, chunk in chunks], self.cache)
            ready = [request for request, chunk in chunks if chunk.wants_logits]
            tokens, logprobs = sample(logits, samplers) if ready else ([], [])
        for _, chunk in chunks:
            chunk.slot.computed = chunk.start + len(chunk.token_ids)
        for request, token, logprob in zip(ready, tokens, logprobs, strict=True):
            request.append(token, logprob, self.version)
            if request.finish_reason is not None:
                self._end(request)
            elif request.progress is not None and (len(request.logprobs) - 1) % request.progress_tokens == 0:
                request.progress(request)

    def fail_all(self, error: BaseException) -> None:
        """End every request after a failed forward pass; drop the caches of the running ones."""
        for request in (*self.running, *self.waiting):
            request.finish_reason = {"type": "abort", "message": f"engine error: {error}", "status_code": 500}
            if request.slot is not None:
                request.slot.computed = 0
            self._end(request)

    def _admit(self) -> None:
        for request in self.waiting.copy():
            if len(self.running) >= self._max_running:
                return
            prompt = request.tokens[: request.length]
            match = self.cache.match(prompt, request.adapter)
            if match.pending > match.length:
                continue
            rows = min(request.length + _FIRST_ROWS, len(request.tokens))
            slot = self.cache.acquire(prompt, match, rows, request.adapter)
            if slot is None:
                return
            request.slot = slot
            if request.cached_tokens is None:
                request.cached_tokens = slot.computed
            self.waiting.remove(request)
            self.running.append(request)

    def _plan(self) -> tuple[list[tuple[GenerationRequest, Chunk]], list[RowSampler]]:
        """Return the next chunk of each running request: decoding ones first, then prompts."""
        planned: list[tuple[GenerationRequest, Chunk]] = []
        budget = self._chunk_tokens
        for request in sorted(self.running, key=lambda r: r.length - _slot(r).computed > 1):
            slot = request.slot
            if slot is None or not self._reserve_rows(request):
                continue
            missing = request.length - slot.computed
            count = missing if missing == 1 else min(missing, budget)
            if count == 0:
                continue
            if missing > 1:
                budget -= count
            ids = request.tokens[slot.computed : slot.computed + count]
            planned.append((request, Chunk(slot, slot.computed, ids, count == missing, request.images)))
        kept = [(request, chunk) for request, chunk in planned if request.slot is chunk.slot]
        kept.sort(key=lambda item: "" if item[0].adapter is None else item[0].adapter.name)
        return kept, [request.sampler for request, chunk in kept if chunk.wants_logits]

    def _reserve_rows(self, request: GenerationRequest) -> bool:
        """Get cache rows for the request's tokens; retract later requests if the cache is full."""
        while not self.cache.grow(_slot(request), request.length):
            victim = self.running[-1]
            log.warning("KV cache full: request %s waits and is recomputed", victim.rid)
            self._retract(victim)
            if victim is request:
                return False
        return True

    def _retract(self, request: GenerationRequest) -> None:
        """Move a running request to the head of the queue; its KV cache stays as a reusable prefix."""
        slot = _slot(request)
        self.cache.release(slot, request.tokens)
        request.slot = None
        request.retractions += 1
        self.running.remove(request)
        self.waiting.insert(0, request)

    def _end(self, request: GenerationRequest) -> None:
        if request.slot is not None:
            if request.routed_from is not None:
                last = request.length - 1
                request.routing = self.cache.chosen_experts(request.slot, request.routed_from, last)
            self.cache.release(request.slot, request.tokens)
            request.slot = None
            self.running.remove(request)
            adapter = request.adapter
            if adapter is not None and self.adapters.get(adapter.name) is not adapter:  # unloaded meanwhile
                self.cache.drop_idle(adapter)
        else:
            self.waiting.remove(request)
        request.finish(request)


def _slot(request: GenerationRequest) -> CacheSlot:
    if request.slot is None:
        raise RuntimeError(f"request {request.rid} is not running")
    return request.slot
