"""Make the model calls of one trajectory: a generation survives aborts, pauses and engines that die."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Sequence
from contextlib import nullcontext
from typing import Protocol

from agentrl.chat.chat_format import ChatFormat
from agentrl.documents.images import Image
from agentrl.documents.model_call import PartialGeneration
from agentrl.documents.sampling import SamplingParams
from agentrl.errors import ContextFullError, EngineError
from agentrl.inference.client import EngineClient
from agentrl.inference.engine import (
    EncodedIds,
    EngineInterruptedError,
    EngineRefusedError,
    Generation,
    Held,
    Progress,
)
from agentrl.inference.engine_list import EngineList
from agentrl.inference.generation_parts import GenerationParts

log = logging.getLogger(__name__)


class SessionRouter(Protocol):
    """The part of the router that a session needs."""

    engines: EngineList
    tokens: ChatFormat | None
    wait_seconds: float

    async def pick(self, session: EngineSession, tokens: int, deadline: float) -> EngineClient:
        """Return the client of the session's engine, which gets ``tokens`` tokens."""
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
        router: SessionRouter,
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
        self._router = router
        self._encoded = EncodedIds()

    @property
    def context_length(self) -> int | None:
        """Return the largest number of tokens of a prompt and its continuation; None if it is unknown."""
        return self._router.engines.context_length

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
        self._encoded = encoded or self._encoded
        made = GenerationParts(input_ids, params, self._router.tokens, routed_from)
        if self.partial is not None:
            made.resume(self.partial)
            self.partial = None
        start = time.monotonic()
        try:
            await self._complete(made, progress, images)
        except EngineRefusedError:
            raise
        except BaseException:
            self.partial = made.kept()
            raise
        return made.whole(time.monotonic() - start)

    async def _complete(
        self, made: GenerationParts, progress: Progress | None, images: Sequence[Image]
    ) -> None:
        """Request the rest of ``made``, of one engine after another, until the generation has ended."""
        router = self._router
        deadline, failures = time.monotonic() + router.wait_seconds, 0
        if progress is not None and made.output_ids:
            progress(0, list(made.output_ids))
        while made.reason == "abort":
            client = await router.pick(self, made.tokens, deadline)
            before = made.tokens
            why = await self._request(client, made, progress, images)
            self.tokens = made.tokens
            if made.reason != "abort":
                return
            if made.tokens > before:
                deadline, failures = time.monotonic() + router.wait_seconds, 0
            failures += 1
            await router.wait(f"{self.traj_id}: {why}", deadline, failures)

    async def _request(
        self, client: EngineClient, made: GenerationParts, progress: Progress | None, images: Sequence[Image]
    ) -> str:
        """Add what one engine generates to ``made``; return why it is not the whole rest, if it is not."""
        try:
            part = await client.generate(
                made.next_prompt,
                made.next_params,
                f"{uuid.uuid4().hex}-{self.traj_id}",
                encoded=self._encoded,
                routing_key=self.group or self.traj_id,
                keep=made.keep,
                progress=None if progress is None else _shifted(progress, len(made.output_ids)),
                images=images,
                routed_from=made.next_routed_from,
            )
        except EngineRefusedError:
            raise
        except EngineError as error:
            log.warning("%s: %s", self.traj_id, error.message)
            self._router.avoid(self)
            if isinstance(error, EngineInterruptedError) and error.partial is not None:
                made.add(error.partial)
            return error.message
        self._router.generated()
        made.add(part)
        return f"aborted by {part.engine_url}"


def _shifted(progress: Progress, by: int) -> Progress:
    """Return ``progress`` for a request whose first token has the index ``by`` in the output."""
    return lambda start, ids: progress(by + start, ids)
