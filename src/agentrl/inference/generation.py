"""Define a generation: the tokens of one model call with their logprobs, policy versions and end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agentrl.documents.model_call import VersionSpan
from agentrl.documents.sampling import LogprobsOf
from agentrl.errors import ENGINES, EngineError

FinishReason = Literal["stop", "length", "abort"]

Progress = Callable[[int, Sequence[int]], None]
"""Receives tokens while they are generated: the place of the first one in the output, and their ids.

After a failure, places may come again: the ids from there on are replaced.
"""

_EXCERPT = 300
_LARGEST_LOGPROB = 1e-3
"""Rounding may put the logprob of a token with probability 1 slightly above 0."""


class EngineRefusedError(EngineError):
    """The engine refused the request; a retry would fail too."""


class EngineAnswerError(EngineError):
    """The engine answered something that no healthy engine answers; none of the answer is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The result of one generation; the spans in ``versions`` cover ``output_ids`` without a gap."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    engine_url: str
    logprobs_of: LogprobsOf = "policy"


class EngineInterruptedError(EngineError):
    """The engine ended a stream early; ``partial`` holds the tokens that it sent, as if it were aborted."""

    def __init__(self, message: str, partial: Generation | None, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint, outage=ENGINES)
        self.partial = partial


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One event of a stream: the tokens that it adds, and what it says about the whole generation."""

    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    version: int | None = None
    """Policy version of ``ids``, if the engine names one in each event."""
    spans: Sequence[VersionSpan] | None = None
    """Spans of the whole generation, if this event has them."""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    logprobs_of: LogprobsOf | None = None


@dataclass(slots=True, kw_only=True)
class Collector:
    """Collect the chunks of one generation. ``add`` and ``result`` raise EngineError for malformed data."""

    url: str
    vocab_size: int
    max_new_tokens: int
    logprobs_of: LogprobsOf
    version: int
    """Policy version of tokens for which the engine names none: the version at the start of the request."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    _chunk_spans: list[VersionSpan] = field(default_factory=list)
    _spans: Sequence[VersionSpan] | None = None
    _finish_reason: str | None = None
    _prompt_tokens: int = 0
    _cached_tokens: int = 0

    def add(self, chunk: Chunk) -> None:
        """Append one chunk, after checking its ids and logprobs."""
        self._check(chunk)
        if chunk.ids:
            start = len(self.ids)
            self.ids.extend(chunk.ids)
            self.logprobs.extend(chunk.logprobs)
            version = self._version_of(chunk)
            if self._chunk_spans and self._chunk_spans[-1].version == version:
                start = self._chunk_spans.pop().start
            self._chunk_spans.append(VersionSpan(version=version, start=start, end=len(self.ids)))
        if chunk.spans is not None:
            self._spans = chunk.spans
        self._finish_reason = chunk.finish_reason or self._finish_reason
        self._prompt_tokens = chunk.prompt_tokens or self._prompt_tokens
        self._cached_tokens = chunk.cached_tokens or self._cached_tokens
        self.logprobs_of = chunk.logprobs_of or self.logprobs_of

    @property
    def is_finished(self) -> bool:
        """Whether the engine has given a finish reason."""
        return self._finish_reason is not None

    def result(self, seconds: float) -> Generation:
        """Return the complete generation."""
        reason = self._finish_reason
        if reason not in ("stop", "length", "abort"):
            raise self._malformed(f"finish reason {reason!r}")
        return self._generation(reason, self._checked_spans(), seconds)  # type: ignore[arg-type]

    def partial(self, seconds: float) -> Generation | None:
        """Return the tokens so far as an aborted generation; None if there are none."""
        if not self.ids:
            return None
        if self._spans is None or self._spans[-1].end != len(self.ids):
            return self._generation("abort", tuple(self._chunk_spans), seconds)
        return self._generation("abort", self._checked_spans(), seconds)

    def _version_of(self, chunk: Chunk) -> int:
        """Return the version to record for the tokens of ``chunk``.

        An event that is sent after a weight update may hold tokens from before it. They count as those of the
        older version, until the engine's own spans say more.
        """
        older = self.version
        if chunk.version is not None:
            self.version = chunk.version
        return older if self.ids[: -len(chunk.ids)] else self.version

    def _generation(self, reason: FinishReason, spans: tuple[VersionSpan, ...], seconds: float) -> Generation:
        return Generation(
            output_ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            versions=spans,
            finish_reason=reason,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            seconds=seconds,
            engine_url=self.url,
            logprobs_of=self.logprobs_of,
        )

    def _check(self, chunk: Chunk) -> None:
        if len(chunk.logprobs) != len(chunk.ids):
            raise self._malformed(f"{len(chunk.logprobs)} logprobs for {len(chunk.ids)} tokens")
        if len(self.ids) + len(chunk.ids) > self.max_new_tokens:
            raise self._malformed(f"more than the {self.max_new_tokens} tokens asked for")
        if not chunk.ids:
            return
        if set(map(type, chunk.ids)) != {int} or min(chunk.ids) < 0 or max(chunk.ids) >= self.vocab_size:
            wrong = next(
                token for token in chunk.ids if type(token) is not int or not 0 <= token < self.vocab_size
            )
            raise self._malformed(f"token id {wrong!r}, outside the vocabulary of {self.vocab_size} ids")
        if not all(map(math.isfinite, chunk.logprobs)) or max(chunk.logprobs) > _LARGEST_LOGPROB:
            odd = next(each for each in chunk.logprobs if not math.isfinite(each) or each > _LARGEST_LOGPROB)
            raise self._malformed(f"logprob {odd!r}")

    def _checked_spans(self) -> tuple[VersionSpan, ...]:
        """Return the engine's spans, cut to the number of tokens; EngineError if they leave a gap."""
        count = len(self.ids)
        if self._spans is None or count == 0:
            return tuple(self._chunk_spans)
        cut = (replace(span, end=min(span.end, count)) for span in self._spans)
        found = tuple(span for span in cut if span.start < span.end)
        edges = [0, *(span.end for span in found)]
        if [span.start for span in found] != edges[:-1] or edges[-1] != count:
            raise self._malformed(f"version spans that do not cover {count} tokens: {self._spans}")
        return found

    def _malformed(self, what: str) -> EngineAnswerError:
        return malformed(self.url, what)


def malformed(url: str, what: str) -> EngineAnswerError:
    """Return the error for an answer that no healthy engine gives."""
    return EngineAnswerError(
        f"engine {url} answered {what}",
        hint="its answer is not used; see the engine's log, and restart it",
        outage=ENGINES,
    )


@contextmanager
def known_format(url: str, answer: Any) -> Iterator[None]:
    """Raise EngineAnswerError if reading ``answer`` in this block finds another format."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise malformed(url, f"in an unknown format ({error!r}): {str(answer)[:_EXCERPT]}") from error


def join_spans(parts: Sequence[Sequence[VersionSpan]]) -> list[VersionSpan]:
    """Concatenate consecutive spans; merge neighbours of one version."""
    joined: list[VersionSpan] = []
    for span in (span for part in parts for span in part):
        if joined and joined[-1].version == span.version:
            span = replace(span, start=joined.pop().start)
        joined.append(span)
    return joined


def join(parts: Sequence[Generation], reason: FinishReason, prompt_tokens: int, seconds: float) -> Generation:
    """Concatenate the consecutive parts of one generation."""
    if len(parts) == 1:
        merged = tuple(join_spans([parts[0].versions]))
        return replace(
            parts[0], versions=merged, finish_reason=reason, prompt_tokens=prompt_tokens, seconds=seconds
        )
    spans: list[list[VersionSpan]] = []
    offset = 0
    for part in parts:
        spans.append([VersionSpan(version=span.version, start=offset + span.start, end=offset + span.end)
                      for span in part.versions])  # fmt: skip
        offset += len(part.output_ids)
    kinds = {part.logprobs_of for part in parts if part.output_ids} or {parts[-1].logprobs_of}
    return Generation(
        output_ids=tuple(token for part in parts for token in part.output_ids),
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
        versions=tuple(join_spans(spans)),
        finish_reason=reason,
        prompt_tokens=prompt_tokens,
        cached_tokens=parts[0].cached_tokens,
        seconds=seconds,
        engine_url=parts[-1].engine_url,
        logprobs_of=kinds.pop() if len(kinds) == 1 else "other",
    )


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


def version_spans(spans: Sequence[Mapping[str, Any]] | None, url: str) -> list[VersionSpan] | None:
    """Return an engine's JSON spans as VersionSpans; None if there are none."""
    if not spans:
        return None
    return [
        VersionSpan(version=policy_version(item["version"], url), start=item["start"], end=item["end"])
        for item in spans
    ]
