"""Join one generation from the parts that engines return, and say what a request for the rest asks for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from agentrl.chat.chat_format import ChatFormat
from agentrl.documents.model_call import (
    PartialGeneration,
    VersionSpan,
    append_span,
    pack_floats,
    pack_ids,
    prompt_digest,
    unpack_floats,
    unpack_ids,
)
from agentrl.documents.routing import routed_tokens
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.sampling_mask import SamplingMask
from agentrl.inference.engine import FinishReason, Generation

_LARGEST_MASK = 4 * 2**20
"""Bytes of a sampling mask that is kept with a partial generation, within the document of its Record."""


@dataclass(slots=True)
class GenerationParts:
    """The parts of one generation so far. An abort or a failure of an engine ends each part but the last."""

    input_ids: Sequence[int]
    params: SamplingParams
    chat_format: ChatFormat | None
    """Says where a generation stops; None: at ``stop_token_ids`` only."""
    routed_from: int | None
    """The first token whose experts are wanted."""
    output_ids: list[int] = field(default_factory=list)
    reason: FinishReason = "abort"
    """Why the generation has ended; ``abort``: it has not."""
    _parts: list[Generation] = field(default_factory=list)

    def add(self, part: Generation) -> None:
        """Append a part. An engine may report an abort where the tokens already end at a stop."""
        self.keep(part)
        self.reason = part.finish_reason
        if self.reason == "abort" and part.output_ids and self._stops():
            self.reason = "stop"
        elif self.reason == "abort" and len(self.output_ids) >= self.params.max_new_tokens:
            self.reason = "length"

    def keep(self, part: Generation) -> None:
        """Append what a cancelled request has sent: whether it stops there no longer matters."""
        self._parts.append(part)
        self.output_ids += part.output_ids

    def resume(self, partial: PartialGeneration) -> None:
        """Begin with the tokens of an earlier call, if it had the same prompt."""
        if partial.prompt != prompt_digest(self.input_ids):
            return
        self.add(
            Generation(
                output_ids=tuple(unpack_ids(partial.output_ids).tolist()),
                logprobs=tuple(unpack_floats(partial.logprobs).tolist()),
                versions=partial.versions,
                finish_reason="abort",
                prompt_tokens=len(self.input_ids),
                cached_tokens=partial.cached_tokens,
                seconds=0.0,
                engine_url="",
                logprobs_of=partial.logprobs_of,
                sampling_mask=partial.sampling_mask,
            )
        )

    @property
    def tokens(self) -> int:
        """The number of tokens in the prompt and the parts."""
        return len(self.input_ids) + len(self.output_ids)

    @property
    def next_prompt(self) -> Sequence[int]:
        """The prompt of a request for the rest."""
        return [*self.input_ids, *self.output_ids] if self.output_ids else self.input_ids

    @property
    def next_params(self) -> SamplingParams:
        """The parameters of a request for the rest, with an advanced seed."""
        done = len(self.output_ids)
        if not done:
            return self.params
        extra = dict(self.params.extra)
        if "sampling_seed" in extra:
            extra["sampling_seed"] += done
        return self.params.replace(max_new_tokens=self.params.max_new_tokens - done, extra=extra)

    @property
    def next_routed_from(self) -> int | None:
        """The first token whose experts no part has; None if they are not wanted."""
        if self.routed_from is None:
            return None
        return self.routed_from + sum(routed_tokens(part.routing) for part in self._parts)

    def whole(self, seconds: float) -> Generation:
        """Return the generation, made in ``seconds``; its routing is complete or left out."""
        joined = self._joined(seconds)
        wanted = self.tokens - 1 - (self.routed_from or 0)
        is_complete = not joined.routing or routed_tokens(joined.routing) == wanted
        return joined if is_complete else replace(joined, routing=b"")

    def kept(self) -> PartialGeneration | None:
        """Return what a later call with the same prompt resumes; None without a token."""
        if not self.output_ids:
            return None
        joined = self._joined(0.0)
        if len(joined.sampling_mask) > _LARGEST_MASK:
            joined = replace(joined, logprobs_of="other", sampling_mask=b"")
        return PartialGeneration(
            prompt=prompt_digest(self.input_ids),
            output_ids=pack_ids(joined.output_ids),
            logprobs=pack_floats(joined.logprobs),
            logprobs_of=joined.logprobs_of,
            sampling_mask=joined.sampling_mask,
            versions=joined.versions,
            cached_tokens=next(part.cached_tokens for part in self._parts if part.output_ids),
        )

    def _joined(self, seconds: float) -> Generation:
        parts = self._parts
        spans: list[VersionSpan] = []
        offset = 0
        for part in parts:
            for span in part.versions:
                append_span(spans, span.version, offset + span.start, offset + span.end)
            offset += len(part.output_ids)
        kinds = {part.logprobs_of for part in parts if part.output_ids} or {parts[-1].logprobs_of}
        kind = kinds.pop() if len(kinds) == 1 else "other"
        masks = [SamplingMask.unpack(part.sampling_mask, len(part.output_ids)) for part in parts]
        return Generation(
            output_ids=tuple(self.output_ids),
            logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
            versions=tuple(spans),
            finish_reason=self.reason,
            prompt_tokens=len(self.input_ids),
            cached_tokens=parts[0].cached_tokens,
            seconds=seconds,
            engine_url=parts[-1].engine_url,
            logprobs_of=kind,
            sampling_mask=SamplingMask.join(masks).pack() if kind == "truncated" else b"",
            routing=b"".join(part.routing for part in parts),
        )

    def _stops(self) -> bool:
        """Return whether the output ends in a stop token or contains a stop string, by SGLang's rules.

        Stop tokens do not count with ``ignore_eos``. A string of ``stop`` and a match of ``stop_regex`` count
        at any position, because a generation ends at the first one.
        """
        chat_format, extra = self.chat_format, self.params.extra
        own = frozenset() if chat_format is None else chat_format.stop_ids
        if not extra.get("ignore_eos") and self.output_ids[-1] in own.union(self.params.stop_token_ids):
            return True
        patterns = [*map(re.escape, _strings(extra.get("stop"))), *_strings(extra.get("stop_regex"))]
        if not patterns or chat_format is None:
            return False
        text = chat_format.decode(self.output_ids)
        return any(re.search(pattern, text) for pattern in patterns)


def _strings(value: Any) -> list[str]:
    """Return a parameter that is a string, or a list of strings, as a list."""
    return [value] if isinstance(value, str) else list(value or ())
