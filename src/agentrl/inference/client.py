"""Sample from an inference engine, and manage it, over SGLang's HTTP API.

The ``local`` engine serves this API too. ``engines/clients.py`` has the client for vLLM, whose API differs.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import orjson

from agentrl.documents.images import Image, data_url
from agentrl.documents.model_call import (
    LARGEST,
    ExpertShape,
    SamplingMask,
    VersionSpan,
    append_span,
    pack_routing,
)
from agentrl.documents.run import EngineFigures
from agentrl.documents.sampling import LogprobsOf, SamplingParams, logprobs_of
from agentrl.errors import ENGINES, EngineError, ModelError
from agentrl.inference.engine import (
    EncodedIds,
    EngineAnswerError,
    EngineInterruptedError,
    EngineRefusedError,
    FinishReason,
    Generation,
    Progress,
    adapter_version,
    known_format,
    malformed,
)
from agentrl.inference.http import CONTROL_SECONDS, LARGEST_ANSWER, EngineHttp, refusal, silent
from agentrl.weights.folder import read_config, stored_bytes

log = logging.getLogger(__name__)

_NO_MASKS = re.compile("sampling.(mask|support)", re.IGNORECASE)
"""What SGLang writes when it cannot return the masks that were asked for."""
_ABORT_SECONDS = 5.0
_ROUTING_BYTES = 16 / 3
"""Bytes of one expert's index in an answer: base64 of int32."""
_ROUTING_KEY = "X-SMG-Routing-Key"
"""Header by which ``sglang-router`` keeps the requests of one key at one engine (``--policy manual``)."""
_LARGEST_LOGPROB = 1e-3
"""Rounding may put the logprob of a token with probability 1 slightly above 0."""
_REALTIME = "sglang:realtime_tokens_total"
"""SGLang's counter of tokens by mode, of every step; ``generation_tokens_total`` has ended requests alone."""
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
    figures: EngineFigures | None = None
    """None if its metrics are off."""


def metric(text: str, name: str, label: str = "") -> list[float]:
    """Return the values of a metric in Prometheus' text format: of the samples with ``label``."""
    samples = re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)", text, re.MULTILINE)
    return [float(value) for labels, value in samples if label in labels]


@dataclass(slots=True, kw_only=True)
class StreamChunk:
    """One event of a stream: the tokens that it adds, and what it says about the whole generation."""

    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    kept: Sequence[Sequence[int]] = ()
    """The ids that each of ``ids`` was sampled from, if the engine returns sampling masks."""
    version: int | None = None
    """Policy version of ``ids``, if the engine names one in each event."""
    spans: Sequence[VersionSpan] | None = None
    """Spans of the whole generation, if this event has them."""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    logprobs_of: LogprobsOf | None = None
    routed_experts: str | None = None
    """Base64 of int32 [tokens, layers, top_k]: in the last event of a generation whose routing is wanted."""


@dataclass(slots=True, kw_only=True)
class Collector:
    """Collect the chunks of one generation, from its request on.

    ``add`` and ``result`` raise EngineError for malformed data.
    """

    url: str
    vocab_size: int
    max_new_tokens: int
    logprobs_of: LogprobsOf
    version: int
    """Policy version of tokens for which the engine names none: the version at the start of the request."""
    adapter: str | None = None
    """The adapter that samples all tokens: they are of its version, and the engine names that of its base."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)
    _masks: list[SamplingMask] = field(default_factory=list)
    _chunk_spans: list[VersionSpan] = field(default_factory=list)
    _spans: Sequence[VersionSpan] | None = None
    _finish_reason: str | None = None
    routed_experts: str | None = None
    _prompt_tokens: int = 0
    _cached_tokens: int = 0

    def __post_init__(self) -> None:
        if self.adapter is not None:
            self.version = adapter_version(self.adapter)

    def add(self, chunk: StreamChunk) -> None:
        """Append one chunk, after checking its ids and logprobs."""
        self._check(chunk)
        if self.adapter is not None:
            chunk = replace(chunk, version=None, spans=None)
        if chunk.ids:
            start = len(self.ids)
            version = self._version_of(chunk)
            self.ids.extend(chunk.ids)
            self.logprobs.extend(chunk.logprobs)
            if chunk.kept:
                self._masks.append(SamplingMask.of(chunk.kept))
            append_span(self._chunk_spans, version, start, len(self.ids))
        if chunk.spans is not None:
            self._spans = chunk.spans
        self._finish_reason = chunk.finish_reason or self._finish_reason
        self._prompt_tokens = chunk.prompt_tokens or self._prompt_tokens
        self._cached_tokens = chunk.cached_tokens or self._cached_tokens
        self.logprobs_of = chunk.logprobs_of or self.logprobs_of
        self.routed_experts = chunk.routed_experts or self.routed_experts

    @property
    def is_finished(self) -> bool:
        """Whether the engine has given a finish reason."""
        return self._finish_reason is not None

    def result(self) -> Generation:
        """Return the complete generation."""
        reason = self._finish_reason
        if reason not in ("stop", "length", "abort"):
            raise malformed(self.url, f"finish reason {reason!r}")
        return self._generation(reason, self._checked_spans())  # type: ignore[arg-type]

    def partial(self) -> Generation | None:
        """Return the tokens so far as an aborted generation; None if there are none."""
        if not self.ids:
            return None
        if self._spans is None or self._spans[-1].end != len(self.ids):
            return self._generation("abort", tuple(self._chunk_spans))
        return self._generation("abort", self._checked_spans())

    def _mask(self) -> SamplingMask | None:
        """Return the sampling mask; None if a token has none, or is not among its ids."""
        mask = SamplingMask.join(self._masks)
        is_whole = mask.keeps(np.array(self.ids)) and bool(mask.counts.all())
        return mask if is_whole and mask.ids.min() >= 0 and mask.ids.max() < self.vocab_size else None

    def _version_of(self, chunk: StreamChunk) -> int:
        """Return the version to record for the tokens of ``chunk``.

        An event that is sent after a weight update may hold tokens from before it. They count as those of the
        older version, until the engine's own spans say more.
        """
        older = self.version
        if chunk.version is not None:
            self.version = chunk.version
        return older if self.ids else self.version

    def _generation(self, reason: FinishReason, spans: tuple[VersionSpan, ...]) -> Generation:
        mask = self._mask() if self._masks else None
        logprobs_of: LogprobsOf = "other" if self._masks else self.logprobs_of
        return Generation(
            output_ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            versions=spans,
            finish_reason=reason,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            seconds=time.monotonic() - self._started,
            engine_url=self.url,
            logprobs_of=logprobs_of if mask is None else "truncated",
            sampling_mask=b"" if mask is None else mask.pack(),
        )

    def _check(self, chunk: StreamChunk) -> None:
        if len(chunk.logprobs) != len(chunk.ids):
            raise malformed(self.url, f"{len(chunk.logprobs)} logprobs for {len(chunk.ids)} tokens")
        if len(self.ids) + len(chunk.ids) > self.max_new_tokens:
            raise malformed(self.url, f"more than the {self.max_new_tokens} tokens asked for")
        if not chunk.ids:
            return
        if set(map(type, chunk.ids)) != {int} or min(chunk.ids) < 0 or max(chunk.ids) >= self.vocab_size:
            wrong = next(
                token for token in chunk.ids if type(token) is not int or not 0 <= token < self.vocab_size
            )
            raise malformed(self.url, f"token id {wrong!r}, outside the vocabulary of {self.vocab_size} ids")
        if not all(map(math.isfinite, chunk.logprobs)) or max(chunk.logprobs) > _LARGEST_LOGPROB:
            odd = next(each for each in chunk.logprobs if not math.isfinite(each) or each > _LARGEST_LOGPROB)
            raise malformed(self.url, f"logprob {odd!r}")

    def _checked_spans(self) -> tuple[VersionSpan, ...]:
        """Return the engine's spans, cut to the number of tokens; EngineError if they leave a gap."""
        count = len(self.ids)
        if self._spans is None or count == 0:
            return tuple(self._chunk_spans)
        cut = (replace(span, end=min(span.end, count)) for span in self._spans)
        spans = tuple(span for span in cut if span.start < span.end)
        edges = [0, *(span.end for span in spans)]
        if [span.start for span in spans] != edges[:-1] or edges[-1] != count:
            raise malformed(self.url, f"version spans that do not cover {count} tokens: {self._spans}")
        return spans


class EngineClient:
    """The client of one engine: its generations, and the calls that manage it.

    Methods raise EngineError with the url, the status and the answer.
    """

    takes_live_weights = True
    """Whether weights may come from the trainer's memory, without a disk."""
    adapter: str | None = None
    """The adapter that requests name from now on, ``RUN@VERSION``; None: the engine's own weights."""
    _returns_masks = True
    """Whether to ask for sampling masks: until an answer shows that the engine has none."""
    _is_unrouted = False
    """Whether an answer without routing has been logged."""
    _has_metrics = True
    """Whether the engine serves ``/metrics``, as SGLang does with ``--enable-metrics``: until it refuses."""

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

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        rid: str,
        *,
        encoded: EncodedIds | None = None,
        routing_key: str | None = None,
        images: Sequence[Image] = (),
        keep: Callable[[Generation], None] = lambda _: None,
        progress: Progress | None = None,
        routed_from: int | None = None,
    ) -> Generation:
        """Sample a continuation of ``input_ids``.

        An id outside the vocabulary raises EngineRefusedError here, because it crashes SGLang. ``rid`` must
        not be a prefix of the id of another request, because SGLang aborts by prefix. Cancelling the call
        aborts the request in the engine. ``encoded`` keeps the JSON of the ids for the next prompt of the
        same conversation. A cancelled call passes the tokens received so far to ``keep``. ``progress``
        receives the tokens of each event as it arrives. ``images`` are those of the prompt, in order; the
        prompt has all tokens of each. ``routed_from`` is the first token whose experts are wanted; a
        client without ``experts`` ignores it. An answer without experts is accepted.

        Raises EngineInterruptedError, with the tokens received, if the stream ends early or is silent for
        ``timeout`` seconds, and EngineError if the engine cannot be reached or its answer is malformed.
        """
        if self._unverified is not None:
            await self.check_instance(self._unverified)
            self._unverified = None
        collector = await self._collector(params)
        encoded = EncodedIds() if encoded is None else encoded
        ids_json = encoded.update(input_ids, collector.vocab_size)
        if routed_from is not None and not self._fits(len(input_ids) + params.max_new_tokens - routed_from):
            routed_from = None
        asks_for_masks = self._returns_masks and params.truncates
        path, body = self._request(ids_json, params, rid, images, routed_from)
        headers = {_ROUTING_KEY: routing_key} if routing_key else {}
        try:
            await self._collect(collector, path, body, headers, progress)
        except asyncio.CancelledError:
            if (part := collector.partial()) is not None:
                keep(part)
            # Shield the abort: a second cancellation would leave the request running in the engine.
            await asyncio.shield(self._abort_quietly(rid))
            raise
        except EngineError as error:
            self._unverified = self._instance  # the address may belong to another server by the next call
            if asks_for_masks and _NO_MASKS.search(error.message):
                self._stop_asking(error.message)
                if (part := collector.partial()) is not None:
                    raise EngineInterruptedError(error.message, part) from error
                return await self.generate(
                    input_ids, params, rid, encoded=encoded, routing_key=routing_key, images=images,
                    keep=keep, progress=progress, routed_from=routed_from,
                )  # fmt: skip
            if not isinstance(error, EngineRefusedError):
                await self._abort_quietly(rid)
            elif collector.adapter is not None and collector.adapter in error.message:
                raise EngineError(error.message, hint=error.hint) from error  # unloaded; a newer one is there
            raise
        generation = collector.result()
        # Compare lengths: a processor that scales images otherwise samples behind a prompt of other tokens.
        if images and generation.prompt_tokens != len(input_ids):
            raise malformed(
                self.url,
                f"for a prompt of {generation.prompt_tokens} tokens; {len(input_ids)} with"
                f" {len(images)} images were sent",
            )
        if asks_for_masks and generation.output_ids and generation.logprobs_of != "truncated":
            self._stop_asking("its answer has none")
        if routed_from is None:
            return generation
        routed = range(routed_from, len(input_ids) + len(generation.output_ids) - 1)
        return replace(generation, routing=await self._routing(collector, routed))

    def _fits(self, tokens: int) -> bool:
        """Return whether the routing of ``tokens`` tokens fits into one event; False if none is wanted."""
        experts = self._experts
        return experts is not None and tokens * experts.per_token * _ROUTING_BYTES < LARGEST_ANSWER // 2

    async def _routing(self, collector: Collector, tokens: range) -> bytes:
        """Return the packed experts of the prompt's and the generation's ``tokens``; empty without them.

        The first answer without them is logged.
        """
        assert self._experts is not None
        encoded = collector.routed_experts
        # Decode in a thread: at 4 KiB a token, the routing of a long call holds the event loop.
        packed = await asyncio.to_thread(packed_experts, encoded, tokens, self._experts)
        if packed is None and collector.ids and not self._is_unrouted:
            self._is_unrouted = True
            log.warning(
                "engine %s returned %s routed experts: its calls are trained with the trainer's own routing"
                " (SGLang needs --enable-return-routed-experts)",
                self.url, "no" if encoded is None else "malformed",
            )  # fmt: skip
        return packed or b""

    async def _collector(self, params: SamplingParams) -> Collector:
        if self._vocab_size is None:
            self._vocab_size = (await self.model_info()).vocab_size
        if self._vocab_size is None:
            raise EngineRefusedError(
                f"engine {self.url} reports no vocabulary size, and its model folder cannot be read here",
                hint="pass vocab_size to the client",
            )
        return Collector(
            url=self.url,
            vocab_size=self._vocab_size,
            max_new_tokens=params.max_new_tokens,
            logprobs_of=self._logprobs_of(params),
            version=await self._version_at_start(),
            adapter=self.adapter,
        )

    async def _collect(
        self,
        collector: Collector,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        progress: Progress | None,
    ) -> None:
        """Read the stream to its end. Raises EngineInterruptedError if it ends before the generation."""
        last = time.monotonic()
        try:
            # Close the stream here: a generator that an error leaves keeps its connection for a while.
            async with aclosing(self._http.stream(path, body, self._timeout, headers)) as events:
                async for event in events:
                    if "error" in event:
                        error = event["error"]
                        details = error if isinstance(error, dict) else {"message": str(error)}
                        raise refusal(self.url, details.get("code"), str(details.get("message")))
                    have, now = len(collector.ids), time.monotonic()
                    with known_format(self.url, event):
                        chunk = self._fields(event, have)
                    collector.add(chunk)
                    if progress is not None:
                        progress(have, collector.ids[have:])
                    # Count the silence from the last token: any event restarts the stream's time-out.
                    last = now if len(collector.ids) > have else last
                    if now - last > self._timeout:
                        raise silent(f"{self.url}{path}", self._timeout)
            if not collector.is_finished:
                raise EngineError(f"engine {self.url} ended a stream without a finish reason")
        except (EngineRefusedError, EngineAnswerError):
            raise
        except EngineError as error:
            raise EngineInterruptedError(error.message, collector.partial(), hint=error.hint) from error

    def _request(
        self,
        ids_json: bytes,
        params: SamplingParams,
        rid: str,
        images: Sequence[Image] = (),
        routed_from: int | None = None,
    ) -> tuple[str, bytes]:
        """Return the path and the body of a generation request."""
        rest: dict[str, Any] = {
            "sampling_params": params.to_request(),
            "return_logprob": True,
            "stream": True,
            "rid": rid,
        }
        if self._returns_masks and params.truncates:
            # Bound top_k with masks: each token's mask lists all ids that it was sampled from.
            largest = min(params.top_k, LARGEST) if params.top_k > 0 else LARGEST
            rest |= {
                "sampling_params": params.replace(top_k=largest).to_request(),
                "return_sampling_mask": True,
            }
        if images:
            rest["image_data"] = [data_url(image) for image in images]
        if self.adapter is not None:
            rest["lora_path"] = self.adapter
        if routed_from is not None:
            rest |= {"return_routed_experts": True, "routed_experts_start_len": routed_from}
        return "/generate", b"".join((b'{"input_ids":', ids_json, b",", orjson.dumps(rest)[1:]))

    def _fields(self, event: Mapping[str, Any], have: int) -> StreamChunk:
        """Return the chunk of an event after ``have`` tokens; its ids are the new ones or all so far."""
        meta = event["meta_info"]
        new = int(meta["completion_tokens"]) - have
        reason = meta["finish_reason"] or {}
        if reason.get("type") == "abort" and reason.get("status_code"):
            raise refusal(self.url, reason["status_code"], str(reason.get("message")))
        rows = meta["output_token_logprobs"]
        if len(event["output_ids"]) < new or len(rows) < new:
            raise malformed(
                self.url, f"{len(rows)} logprobs and {len(event['output_ids'])} ids for {new} tokens"
            )
        first = len(rows) - new
        logprobs, kept = [float(row[0]) for row in rows[first:]], meta.get("output_token_sampling_mask") or ()
        if 0 < new <= len(kept):
            kept = kept[len(kept) - new :]
            logprobs = [float(value) for value in meta["output_token_sampling_logprobs"][-new:]]
        return StreamChunk(
            ids=event["output_ids"][len(event["output_ids"]) - new :] if new > 0 else (),
            logprobs=logprobs if new > 0 else (),
            kept=kept if new > 0 else (),
            version=policy_version(meta.get("weight_version"), self.url),
            spans=version_spans(meta.get("weight_versions"), self.url),
            finish_reason=reason.get("type"),
            prompt_tokens=int(meta["prompt_tokens"]),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            logprobs_of=meta.get("logprobs_of"),
            routed_experts=meta.get("routed_experts"),
        )

    def _logprobs_of(self, params: SamplingParams) -> LogprobsOf:
        return logprobs_of("sglang", params.to_request())

    async def _version_at_start(self) -> int:
        """Return the version of tokens whose event names none; here every event does."""
        return 0

    def _stop_asking(self, why: str) -> None:
        self._returns_masks = False
        log.warning(
            "engine %s returns no sampling masks (%s): calls with top_p, top_k or min_p are trained only if"
            " its logprobs are of what these left",
            self.url, why,
        )  # fmt: skip

    async def _abort_quietly(self, rid: str) -> None:
        with suppress(EngineError, TimeoutError):  # the engine has ended, and the request with it
            async with asyncio.timeout(_ABORT_SECONDS):
                await self.abort(rid)

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
            running, waiting, tokens, capacity = (
                int(sum(rank.get(name, 0) for rank in ranks))
                for name in (
                    "num_running_reqs",
                    "num_waiting_reqs",
                    "num_total_tokens",
                    "max_total_num_tokens",
                )
            )
            kv_usage = float(max((rank.get("token_usage", 0.0) for rank in ranks), default=0.0))
        metrics = await self._metrics()
        with known_format(self.url, metrics):
            generated = metric(metrics, _REALTIME, 'mode="decode"')
            figures = EngineFigures(
                at=time.monotonic(), running=running, waiting=waiting, kv_usage=kv_usage, capacity=capacity,
                generated=int(sum(generated)),
                computed=int(sum(metric(metrics, _REALTIME, 'mode="prefill_compute"'))),
                # It has this one from the first retraction on.
                preempted=int(sum(metric(metrics, "sglang:num_retracted_requests_total"))),
            )  # fmt: skip
        return EngineLoad(requests=running + waiting, tokens=tokens, figures=figures if generated else None)

    async def _metrics(self) -> str:
        """Return the engine's metrics in Prometheus' text format; empty if they are off."""
        if not self._has_metrics:
            return ""
        try:
            _, metrics = await self._http.respond("GET", "/metrics")
        except EngineRefusedError:
            self._has_metrics = False
            return ""
        return metrics.decode("utf-8", "replace")

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


def packed_experts(encoded: str | None, tokens: range, shape: ExpertShape) -> bytes | None:
    """Return the packed experts of ``tokens``, by their places in prompt and generation.

    None unless ``encoded`` holds these, or those of all tokens: an older SGLang knows no start.
    """
    try:
        experts = np.frombuffer(base64.b64decode(encoded or "", validate=True), "<i4")
        experts = experts.reshape(-1, shape.layers, shape.top_k)
    except (binascii.Error, ValueError, TypeError):
        return None
    if len(experts) == tokens.stop:
        experts = experts[tokens.start :]
    if len(experts) != len(tokens):
        return None
    is_valid = experts.size > 0 and experts.min() >= 0 and experts.max() < shape.experts
    return pack_routing(experts) if is_valid else None


def version_spans(spans: Sequence[Mapping[str, Any]] | None, url: str) -> list[VersionSpan] | None:
    """Return an engine's JSON spans as VersionSpans; None if there are none."""
    if not spans:
        return None
    return [
        VersionSpan(version=policy_version(item["version"], url), start=item["start"], end=item["end"])
        for item in spans
    ]


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
