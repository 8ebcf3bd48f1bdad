"""Make the model calls of one trajectory: a generation survives aborts, pauses and engines that die."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Awaitable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol

from agentrl.chat.chat_format import ChatFormat
from agentrl.documents.images import Image
from agentrl.documents.model_call import (
    PartialGeneration,
    pack_floats,
    pack_ids,
    prompt_digest,
    unpack_floats,
    unpack_ids,
)
from agentrl.documents.routing import routed_tokens
from agentrl.documents.sampling import SamplingParams
from agentrl.errors import ContextFullError, EngineError
from agentrl.inference.client import EngineClient
from agentrl.inference.engine import (
    EncodedIds,
    EngineInterruptedError,
    EngineRefusedError,
    FinishReason,
    Generation,
    Held,
    Progress,
    join,
)

_LARGEST_MASK = 4 * 2**20
"""Bytes of a sampling mask that is kept with a partial generation, within the document of its Record."""
log = logging.getLogger(__name__)


class Engines(Protocol):
    """The part of the router that a session needs."""

    tokens: ChatFormat | None
    wait_seconds: float

    @property
    def context_length(self) -> int | None:
        """Return the largest number of tokens of a prompt and its continuation; None if unknown."""
        ...

    async def pick(self, session: EngineSession, tokens: int, deadline: float) -> EngineClient:
        """Return the client of the session's engine, which gets ``tokens`` tokens."""
        ...

    def assign(self, session: EngineSession, url: str | None) -> None:
        """Move the session to the engine at ``url``; None detaches it."""
        ...

    def avoid(self, session: EngineSession) -> None:
        """Detach the session from its engine, which failed."""
        ...

    def generated(self) -> None:
        """Record that an engine has generated."""
        ...

    def wait(self, why: str, deadline: float, attempt: int = 1) -> Awaitable[None]:
        """Sleep before the next attempt; EngineError at ``deadline``."""
        ...


class EngineSession:
    """The model calls of one trajectory; created by ``EngineRouter.session``.

    ``url`` is the engine that has the trajectory's prefix in its cache, ``tokens`` the length of its context.
    ``partial`` holds the tokens of a call that was cancelled or failed; one with the same prompt resumes it.
    The router waits in ``held`` while the trainer has the engines' devices.
    """

    def __init__(
        self,
        engines: Engines,
        traj_id: str,
        group: str | None,
        partial: PartialGeneration | None,
        held: Held = nullcontext,
    ) -> None:
        self.traj_id = traj_id
        self.group = group
        self.url: str | None = None
        self.tokens = 0
        self.partial = partial
        self.held = held
        self._engines = engines
        self._encoded = EncodedIds()

    @property
    def context_length(self) -> int | None:
        """Return the largest number of tokens of a prompt and its continuation; None if it is unknown."""
        return self._engines.context_length

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        progress: Progress | None = None,
        images: Sequence[Image] = (),
        encoded: EncodedIds | None = None,
        *,
        routed_from: int | None = None,
    ) -> Generation:
        """Return one complete generation, resumed as often as engines abort it or fail.

        ``images`` are those of the prompt, in order. ``encoded`` is the JSON of an earlier prompt that this
        one continues; without it, that of the last call is tried. The routing from token ``routed_from`` on
        is complete or left out. A part asks for all that the parts before it lack: an engine that continues
        a generation has computed, or computes, every token before.

        An aborted generation continues from its tokens so far, on the same or another engine, unless they
        already end at a stop: an engine may report the abort instead of the stop. After a failure it
        continues from the last token received. Penalties then count only the tokens of the last part.
        Raises ContextFullError if the prompt leaves no token of the context, EngineRefusedError if an engine
        refuses the request, and EngineError, with the engines as its outage, if no token arrives for
        ``wait_seconds``. ``progress`` receives the tokens while they are generated.
        """
        limit = self.context_length
        if limit is not None and len(input_ids) >= limit:
            raise ContextFullError(
                f"a prompt of {len(input_ids):,} tokens leaves nothing of the context of {limit:,} tokens"
            )
        if encoded is not None:
            self._encoded = encoded
        partial, self.partial = self.partial, None
        parts = []
        if partial is not None and partial.prompt == prompt_digest(input_ids):
            parts.append(_resumed(partial, len(input_ids)))
        try:
            whole = await self._finish(input_ids, params, parts, progress, images, routed_from)
            wanted = len(input_ids) + len(whole.output_ids) - 1 - (routed_from or 0)
            is_complete = not whole.routing or routed_tokens(whole.routing) == wanted
            return whole if is_complete else replace(whole, routing=b"")
        except EngineRefusedError:
            raise
        except BaseException:
            self.partial = _kept(input_ids, parts)
            raise

    async def _finish(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        parts: list[Generation],
        progress: Progress | None,
        images: Sequence[Image],
        routed_from: int | None,
    ) -> Generation:
        """Append further parts to ``parts`` until the generation is complete; return it."""
        engines = self._engines
        done = [token for part in parts for token in part.output_ids]
        if progress is not None and done:
            progress(0, done)
        start = time.monotonic()
        deadline = start + engines.wait_seconds
        failures = 0
        if parts and (reason := _reason(parts[-1], done, params, engines.tokens)) != "abort":
            return join(parts, reason, len(input_ids), 0.0)
        while True:
            prompt = [*input_ids, *done] if done else input_ids
            lacking = routed_from
            if lacking is not None:
                lacking += sum(routed_tokens(each.routing) for each in parts)
            client = await engines.pick(self, len(prompt), deadline)
            part: Generation | None = None
            try:
                part = await client.generate(
                    prompt,
                    _remaining(params, len(done)),
                    f"{uuid.uuid4().hex}-{self.traj_id}",
                    encoded=self._encoded,
                    routing_key=self.group or self.traj_id,
                    keep=parts.append,
                    progress=None if progress is None else _shifted(progress, len(done)),
                    images=images,
                    routed_from=lacking,
                )
            except EngineRefusedError:
                raise
            except EngineError as error:
                why = error.message
                log.warning("%s: %s", self.traj_id, why)
                engines.avoid(self)
                if isinstance(error, EngineInterruptedError):
                    part = error.partial
            else:
                why = f"aborted by {part.engine_url}"
                engines.generated()
            if part is not None:
                parts.append(part)
                done.extend(part.output_ids)
                self.tokens = len(input_ids) + len(done)
                reason = _reason(part, done, params, engines.tokens)
                if reason != "abort":
                    return join(parts, reason, len(input_ids), time.monotonic() - start)
                if part.output_ids:
                    deadline, failures = time.monotonic() + engines.wait_seconds, 0
            failures += 1
            await engines.wait(f"{self.traj_id}: {why}", deadline, failures)


def _shifted(progress: Progress, by: int) -> Progress:
    """Return ``progress`` for a request whose first token has the index ``by`` in the output."""
    return lambda start, ids: progress(by + start, ids)


def _reason(
    part: Generation, done: Sequence[int], params: SamplingParams, tokens: ChatFormat | None
) -> FinishReason:
    """Return the finish reason after ``part``; ``abort`` if the generation has to be resumed."""
    if part.finish_reason != "abort":
        return part.finish_reason
    if part.output_ids and _stops(done, params, tokens):
        return "stop"
    return "length" if len(done) >= params.max_new_tokens else "abort"


def _stops(done: Sequence[int], params: SamplingParams, tokens: ChatFormat | None) -> bool:
    """Return whether the ids ``done`` end in a stop token or contain a stop string, by SGLang's rules.

    Stop tokens do not count with ``ignore_eos``. A string of ``stop`` and a match of ``stop_regex`` count at
    any position, because a generation ends at the first one.
    """
    extra = params.extra
    own = tokens.stop_ids if tokens is not None else frozenset()
    if not extra.get("ignore_eos") and done[-1] in own.union(params.stop_token_ids):
        return True
    patterns = [*map(re.escape, _strings(extra.get("stop"))), *_strings(extra.get("stop_regex"))]
    if not patterns or tokens is None:
        return False
    text = tokens.decode(done)
    return any(re.search(pattern, text) for pattern in patterns)


def _strings(value: Any) -> list[str]:
    """Return a parameter that is a string, or a list of strings, as a list."""
    return [value] if isinstance(value, str) else list(value or ())


def _remaining(params: SamplingParams, done: int) -> SamplingParams:
    """Return the parameters for the rest of a generation after ``done`` tokens; advance its seed."""
    if not done:
        return params
    extra = dict(params.extra)
    if "sampling_seed" in extra:
        extra["sampling_seed"] += done
    return params.replace(max_new_tokens=params.max_new_tokens - done, extra=extra)


def _kept(input_ids: Sequence[int], parts: Sequence[Generation]) -> PartialGeneration | None:
    """Return the tokens of ``parts``, generated after ``input_ids``; None if there are none."""
    parts = [part for part in parts if part.output_ids]
    if not parts:
        return None
    whole = join(parts, "abort", len(input_ids), 0.0)
    if len(whole.sampling_mask) > _LARGEST_MASK:
        whole = replace(whole, logprobs_of="other", sampling_mask=b"")
    return PartialGeneration(
        prompt=prompt_digest(input_ids),
        output_ids=pack_ids(whole.output_ids),
        logprobs=pack_floats(whole.logprobs),
        logprobs_of=whole.logprobs_of,
        sampling_mask=whole.sampling_mask,
        versions=whole.versions,
        cached_tokens=whole.cached_tokens,
    )


def _resumed(partial: PartialGeneration, prompt_tokens: int) -> Generation:
    """Return the kept tokens as an aborted generation."""
    return Generation(
        output_ids=tuple(unpack_ids(partial.output_ids).tolist()),
        logprobs=tuple(unpack_floats(partial.logprobs).tolist()),
        versions=partial.versions,
        finish_reason="abort",
        prompt_tokens=prompt_tokens,
        cached_tokens=partial.cached_tokens,
        seconds=0.0,
        engine_url="",
        logprobs_of=partial.logprobs_of,
        sampling_mask=partial.sampling_mask,
    )
