"""Collect the events of one generation's stream into a Generation, after checking each of them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from agentrl.documents.model_call import VersionSpan, append_span
from agentrl.documents.sampling import LogprobsOf
from agentrl.documents.sampling_mask import SamplingMask
from agentrl.inference.engine import FinishReason, Generation, adapter_version, malformed

_LARGEST_LOGPROB = 1e-3
"""Rounding may put the logprob of a token with probability 1 slightly above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
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

    def add(self, chunk: Chunk) -> None:
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

    def _version_of(self, chunk: Chunk) -> int:
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

    def _check(self, chunk: Chunk) -> None:
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
