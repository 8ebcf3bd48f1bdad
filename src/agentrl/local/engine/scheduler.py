"""Continuous batching of the local engine: choose the tokens of each forward pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from agentrl.documents.sampling import SamplingParams
from agentrl.errors import ModelError
from agentrl.local.engine.linears import LoadedAdapter, Patch
from agentrl.local.engine.model import CacheSlot, Chunk, KVCache, LocalModel, RequestImages

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
        self.generated = 0
        """Tokens that were sampled since the start."""
        self.computed = 0
        """Tokens of prompts that were computed: those that no cached prefix had."""
        self.retracted = 0
        """Requests whose rows another one took."""
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
        self.generated += len(ready)
        self.computed += sum(len(chunk.token_ids) for _, chunk in chunks) - len(ready)
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
            # Wait for the running request that computes this prefix: copying it then is cheaper.
            if match.pending > match.length:
                continue
            rows = min(request.length + _FIRST_ROWS, len(request.tokens))
            slot = self.cache.acquire(prompt, match, rows, request.adapter)
            # Admit no later one instead: short requests would keep a long one waiting for ever.
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
        # Put the rows of one adapter side by side: they are one product then.
        kept.sort(key=lambda item: "" if item[0].adapter is None else item[0].adapter.name)
        return kept, [request.sampler for request, chunk in kept if chunk.wants_logits]

    def _reserve_rows(self, request: GenerationRequest) -> bool:
        """Get cache rows for the request's tokens; retract later requests if the cache is full."""
        while not self.cache.grow(_slot(request), request.length):
            victim = self.running[-1]
            log.warning("KV cache full: request %s waits and is recomputed", victim.rid)
            self._retract(victim)
            self.retracted += 1
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


_PARAMS = {item.name for item in fields(SamplingParams)} - {"extra"}
_BLOCK = 256
_WIDTHS = (64, 1024)
_SPARE_TOKENS = 8
"""Further tokens to decode: the first ones may be parts of a character."""


@dataclass(slots=True)
class RowSampler:
    """The sampling state of one request: parameters, random generator, counts of generated tokens."""

    params: SamplingParams
    rng: np.random.Generator
    counts: dict[int, int] = field(default_factory=dict)
    """{token: how often it was generated}; kept only if a penalty needs it."""
    kept: list[list[int]] | None = None
    """The ids that each token was drawn from, if the request asks for them and truncates."""

    @property
    def greedy(self) -> bool:
        """Return whether the temperature is 0: the most likely token is chosen."""
        return self.params.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Return whether tokens that were already generated are penalized."""
        params = self.params
        return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)

    def record(self, token: int) -> None:
        """Count a generated token."""
        if self.penalized:
            self.counts[token] = self.counts.get(token, 0) + 1


def sample(logits: Tensor, samplers: Sequence[RowSampler]) -> tuple[list[int], list[float]]:
    """Sample one token per row of float32 logits [n, vocab], which are overwritten; return ids and logprobs.

    The logprobs are those of the sampled distribution: penalized logits divided by the temperature,
    renormalized over the tokens that ``top_k``, ``top_p`` and ``min_p`` allow. Those of a greedy row are at
    temperature 1. Each row inverts the cumulative distribution in float64 at one uniform random number, so
    that a row depends only on its own seed.
    """
    for row, sampler in enumerate(samplers):
        if sampler.penalized and sampler.counts:
            _penalize(logits[row], sampler)
    temperatures = torch.tensor([s.params.temperature or 1.0 for s in samplers], device=logits.device)
    logits.div_(temperatures[:, None])
    normalizer = logits.logsumexp(dim=-1)
    tokens = logits.argmax(dim=-1)
    plain = [row for row, s in enumerate(samplers) if not s.greedy and not s.params.truncates]
    cut = [row for row, s in enumerate(samplers) if s.params.truncates]
    if plain:
        probs = (_rows(logits, plain) - normalizer[plain, None]).exp_()
        tokens[plain] = _draw(probs, [samplers[row] for row in plain])
    if cut:
        probs = (_rows(logits, cut) - normalizer[cut, None]).exp_()
        tokens[cut], kept = _draw_truncated(probs, [samplers[row] for row in cut])
        normalizer[cut] += kept.log()
    logprobs = (logits.gather(-1, tokens[:, None])[:, 0] - normalizer).clamp_(max=0.0)
    return tokens.tolist(), logprobs.tolist()


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _penalize(row: Tensor, sampler: RowSampler) -> None:
    """Apply the presence, frequency and repetition penalties of SGLang to logits [vocab] in place."""
    params = sampler.params
    ids = torch.tensor(list(sampler.counts), device=row.device)
    counts = torch.tensor(list(sampler.counts.values()), device=row.device, dtype=row.dtype)
    values = row[ids] - params.presence_penalty - params.frequency_penalty * counts
    factor = params.repetition_penalty
    row[ids] = torch.where(values < 0, values * factor, values / factor)


def _draw(probs: Tensor, samplers: Sequence[RowSampler]) -> Tensor:
    """Draw one index per row in proportion to ``probs`` [n, m]; never one with probability 0.

    The cumulative distribution is inverted in two stages: over blocks, then within one block.
    """
    padding = -probs.shape[-1] % _BLOCK
    blocks = F.pad(probs, (0, padding)).view(len(probs), -1, _BLOCK)
    uniform = torch.tensor(
        [[sampler.rng.random()] for sampler in samplers], dtype=torch.float64, device=probs.device
    )
    mass = blocks.sum(dim=-1, dtype=torch.float64)
    block, rest = _invert(mass, uniform * mass.sum(dim=-1, keepdim=True))
    rows = torch.arange(len(probs), device=probs.device)
    index, _ = _invert(blocks[rows, block].double(), rest)
    return block * _BLOCK + index


def _invert(mass: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index [n] whose cumulative ``mass`` [n, m] exceeds ``target`` [n, 1], and the rest.

    The rest [n, 1] is the target minus the mass before the index. If rounding puts the target above the total
    mass, the last index with any mass is returned.
    """
    cumulative = mass.cumsum(dim=-1)
    above = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    index = torch.minimum(above, last)
    return index[:, 0], target - (cumulative - mass).gather(-1, index)


def _draw_truncated(probs: Tensor, samplers: Sequence[RowSampler]) -> tuple[Tensor, Tensor]:
    """Draw from what ``top_k``, then ``top_p``, then ``min_p`` leave of ``probs`` [n, vocab].

    Returns the indices [n] and the remaining probability [n]; adds to each sampler's ``kept``. Sorting the
    vocabulary is slow and the most likely tokens nearly always suffice, so wider ranges are examined only for
    the rows that need them.
    """
    vocab = probs.shape[-1]
    tokens = torch.empty(len(probs), dtype=torch.long, device=probs.device)
    mass = torch.empty(len(probs), dtype=probs.dtype, device=probs.device)
    open_rows = torch.arange(len(probs), device=probs.device)
    for width in (*(width for width in _WIDTHS if width < vocab), vocab):
        chosen = [samplers[row] for row in open_rows.tolist()]
        values, indices = probs[open_rows].topk(width, dim=-1)
        kept, enough = _truncate(values, chosen)
        if width == vocab:
            enough[:] = True
        if bool(enough.any()):
            ready = [sampler for sampler, is_ready in zip(chosen, enough.tolist(), strict=True) if is_ready]
            choice = _draw(kept[enough], ready)
            tokens[open_rows[enough]] = indices[enough].gather(-1, choice[:, None])[:, 0]
            mass[open_rows[enough]] = kept[enough].sum(-1)
            for row, sampler in zip(enough.nonzero()[:, 0].tolist(), ready, strict=True):
                if sampler.kept is not None:
                    sampler.kept.append(indices[row, kept[row] > 0].tolist())
        open_rows = open_rows[~enough]
        if len(open_rows) == 0:
            break
    return tokens, mass


def _truncate(values: Tensor, samplers: Sequence[RowSampler]) -> tuple[Tensor, Tensor]:
    """Set the excluded ones of the largest probabilities ``values`` [n, width] to 0.

    Also returns which rows [n] are complete: their limits exclude the last of the values.
    """
    width = values.shape[-1]
    params = [sampler.params for sampler in samplers]
    device = values.device
    top_k = torch.tensor([p.top_k if p.top_k > 0 else 2**62 for p in params], device=device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], device=device)[:, None]
    min_p = torch.tensor([p.min_p for p in params], device=device)[:, None]
    before = values.cumsum(-1) - values
    rank = torch.arange(width, device=device)
    keep = (rank < top_k) & ((before <= top_p) | (top_p >= 1.0)) & (values >= min_p * values[:, :1])
    return values.where(keep, 0.0), ~keep[:, -1] | (top_k[:, 0] <= width)


class StopStrings:
    """The stop strings of one generation."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._tokens = max(len(stop.encode()) for stop in stops) + _SPARE_TOKENS

    def completed_by(self, output_ids: Sequence[int]) -> str | None:
        """Return the stop string that the last token of a generation completes; None without one."""
        text = self._tokenizer.decode(list(output_ids[-self._tokens :]), skip_special_tokens=False)
        return next((stop for stop in self._stops if stop in text), None)


def read_params(values: Mapping[str, Any]) -> tuple[SamplingParams, dict[str, Any]]:
    """Return the sampling parameters, and the options ``ignore_eos``, ``sampling_seed`` and ``stop``.

    Raises ValueError, TypeError and AgentRLError for parameters that are not supported.
    """
    options: dict[str, Any] = {"ignore_eos": False, "sampling_seed": None, "stop": None}
    unknown = [name for name in values if name not in _PARAMS and name not in options]
    if unknown:
        raise ValueError(f"the local engine does not support sampling parameter {unknown[0]!r}")
    options |= {name: values[name] for name in options if values.get(name) is not None}
    known = {name: values[name] for name in _PARAMS if values.get(name) is not None}
    if "stop_token_ids" in known:
        known["stop_token_ids"] = tuple(known["stop_token_ids"])
    return SamplingParams(**{"max_new_tokens": 128, **known}), options


def read_stops(value: object) -> tuple[str, ...]:
    """Return the sampling parameter ``stop``. Raises ValueError unless it is text or a list of texts."""
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError(f"stop must be a text or a list of texts, not {value!r}")
    return tuple(stops)
