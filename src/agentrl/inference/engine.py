"""Define what callers of the policy see: the engine of a trajectory, and what a call of it generates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import orjson

from agentrl.documents.images import Image
from agentrl.documents.model_call import PartialGeneration, VersionSpan
from agentrl.documents.sampling import LogprobsOf, SamplingParams
from agentrl.errors import ENGINES, EngineError

FinishReason = Literal["stop", "length", "abort"]

Progress = Callable[[int, Sequence[int]], None]
"""Receives tokens while they are generated: the index of the first one in the output, and their ids.

After a failure, indices may come again: the ids from there on are replaced.
"""

Held = Callable[[], AbstractContextManager[None]]
"""Returns a block in which a call waits for the engines, and the trajectory's time does not count."""

_EXCERPT = 300
_FIRST_PROMPTS = 16


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
    sampling_mask: bytes = b""
    """A packed SamplingMask of ``output_ids``, if ``logprobs_of`` is ``truncated``."""
    routing: bytes = b""
    """Experts (``documents.routing``) of the tokens from ``routed_from`` to the last but one; empty: none."""


class EngineRefusedError(EngineError):
    """The engine refused the request; a retry would fail too."""


class EngineAnswerError(EngineError):
    """The engine answered something that no healthy engine answers; none of the answer is used."""


class EngineInterruptedError(EngineError):
    """The engine ended a stream early; ``partial`` holds the tokens that it sent, as if it were aborted."""

    def __init__(self, message: str, partial: Generation | None, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint, outage=ENGINES)
        self.partial = partial


class FirstPrompts:
    """The latest first prompts and their JSON: all trajectories of a group start with one prompt."""

    def __init__(self) -> None:
        self._known: deque[tuple[list[int], int, bytes]] = deque(maxlen=_FIRST_PROMPTS)

    def encode(self, ids: list[int], vocab_size: int) -> bytes:
        """Return ``ids`` as a JSON array. Raises EngineRefusedError for an id outside the vocabulary."""
        for known, size, found in self._known:
            # Compare the size too: an engine with fewer ids must not get a prompt checked for another.
            if size == vocab_size and known == ids:
                return found
        _check(ids, vocab_size)
        # Use orjson: json takes 9.7 ms for 110,000 ids, in which the event loop serves no other trajectory.
        encoded = orjson.dumps(ids)
        # Keep a copy: if the caller changed its list, a later prompt would match the wrong JSON.
        self._known.append((list(ids), vocab_size, encoded))
        return encoded


_FIRST = FirstPrompts()


class EncodedIds:
    """The ids of a conversation's last prompt, and their JSON.

    A prompt that starts with the last one costs only its new ids; any other is encoded as a whole.
    """

    def __init__(self, first: FirstPrompts = _FIRST) -> None:
        self._first = first
        self._ids: list[int] = []
        self._vocab_size = 0
        """What ``_ids`` were checked for."""
        self._json = b"[]"
        self._next: list[int] | None = None
        """What ``grow`` has made of the last prompt."""

    def grow(self, prompt: list[int], ids: list[int]) -> list[int]:
        """Return ``prompt`` with ``ids`` behind it; ``update`` trusts that neither list is changed."""
        grown = prompt + ids
        self._next = grown if prompt is self._ids else None
        return grown

    def update(self, ids: Sequence[int], vocab_size: int) -> bytes:
        """Return ``ids`` as a JSON array.

        Raises EngineRefusedError for no ids, and for an id outside the vocabulary.
        """
        if not ids:
            raise EngineRefusedError("a generation needs at least one input id")
        known = len(self._ids)
        prompt = ids if isinstance(ids, list) else list(ids)
        # Check all ids again for an engine with fewer: the next call may go to another one.
        if vocab_size < self._vocab_size or not (prompt is self._next or prompt[:known] == self._ids):
            known = 0
        if known == 0:
            self._json = self._first.encode(prompt, vocab_size)
        elif new := prompt[known:]:
            _check(new, vocab_size)
            # Join views: a slice of bytes would copy the whole conversation once more each turn.
            self._json = b"".join((memoryview(self._json)[:-1], b",", memoryview(orjson.dumps(new))[1:]))
        self._ids, self._vocab_size, self._next = prompt, vocab_size, None
        return self._json


def _check(ids: Sequence[int], vocab_size: int) -> None:
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise EngineRefusedError(f"token id {wrong} is outside the vocabulary of {vocab_size} ids")


class Engine(Protocol):
    """The model calls of one trajectory: ``EngineSession``, and what wraps one."""

    partial: PartialGeneration | None
    """The tokens of a call that was cancelled or failed; a call with the same prompt resumes it."""

    @property
    def context_length(self) -> int | None:
        """Return the largest number of tokens of a prompt and its continuation; None if it is unknown."""
        ...

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
        """Sample a continuation of ``input_ids``, whose ``images`` are given in order.

        ``progress`` receives the tokens meanwhile. ``encoded`` is the JSON of an earlier prompt that this
        one continues; without it, that of the last call is tried. ``routed_from`` is the first token
        whose experts are wanted, if the policy is a mixture whose routing is replayed.
        """
        ...


class Router(Protocol):
    """Access to the engines: ``EngineRouter``."""

    def session(
        self,
        traj_id: str,
        group: str | None = None,
        partial: PartialGeneration | None = None,
        held: Held = nullcontext,
    ) -> AbstractAsyncContextManager[Engine]:
        """Return the engine of one trajectory; those of one ``group`` prefer one engine.

        A call with the prompt of ``partial`` resumes it. Calls wait in a block of ``held`` while the trainer
        has the engines' devices.
        """
        ...


def adapter_name(run_name: str, version: int) -> str:
    """Return the name under which engines hold the adapter of a version of a run."""
    return f"{run_name}@{version}"


def adapter_version(name: str) -> int:
    """Return the policy version of an adapter from its name."""
    return int(name.rpartition("@")[2])


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
