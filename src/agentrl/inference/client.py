"""Sample from an inference engine over SGLang's HTTP API, which the ``local`` engine serves too.

``control.py`` has the calls that manage an engine. ``engines/clients.py`` has the client for vLLM, whose API
differs.
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
from typing import Any

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
from agentrl.documents.sampling import LogprobsOf, SamplingParams, logprobs_of
from agentrl.errors import EngineError
from agentrl.inference.control import EngineControl, policy_version
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
from agentrl.inference.http import LARGEST_ANSWER, refusal, silent

_LARGEST_LOGPROB = 1e-3
"""Rounding may put the logprob of a token with probability 1 slightly above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
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


log = logging.getLogger(__name__)

_NO_MASKS = re.compile("sampling.(mask|support)", re.IGNORECASE)
"""What SGLang writes when it cannot return the masks that were asked for."""
_ABORT_SECONDS = 5.0
_ROUTING_BYTES = 16 / 3
"""Bytes of one expert's index in an answer: base64 of int32."""
_ROUTING_KEY = "X-SMG-Routing-Key"
"""Header by which ``sglang-router`` keeps the requests of one key at one engine (``--policy manual``)."""


class EngineClient(EngineControl):
    """The client of one engine. Methods raise EngineError with the url, the status and the answer."""

    adapter: str | None = None
    """The adapter that requests name from now on, ``RUN@VERSION``; None: the engine's own weights."""
    _returns_masks = True
    """Whether to ask for sampling masks: until an answer shows that the engine has none."""
    _is_unrouted = False
    """Whether an answer without routing has been logged."""

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
