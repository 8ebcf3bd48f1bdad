"""Encode the token ids of a growing prompt as JSON; each id is checked and encoded once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import orjson

from agentrl.inference.generation import EngineRefusedError

_MAX_FIRST = 16


class FirstPrompts:
    """The latest first prompts and their JSON: all trajectories of a group start with one prompt."""

    def __init__(self) -> None:
        self._known: deque[tuple[list[int], int, bytes]] = deque(maxlen=_MAX_FIRST)

    def encode(self, ids: list[int], vocab_size: int) -> bytes:
        """Return ``ids`` as a JSON array. Raises EngineRefusedError for an id outside the vocabulary."""
        for known, size, found in self._known:
            if size == vocab_size and known == ids:
                return found
        _check(ids, vocab_size)
        encoded = orjson.dumps(ids)
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
        self._json = b"[]"

    def update(self, ids: Sequence[int], vocab_size: int) -> bytes:
        """Return ``ids`` as a JSON array.

        Raises EngineRefusedError for no ids, and for an id outside the vocabulary.
        """
        if not ids:
            raise EngineRefusedError("a generation needs at least one input id")
        known = len(self._ids)
        prompt = ids if isinstance(ids, list) else list(ids)
        if known == 0 or prompt[:known] != self._ids:
            known = 0
        if known == 0:
            self._json = self._first.encode(prompt, vocab_size)
        elif new := prompt[known:]:
            _check(new, vocab_size)
            self._json = b"".join((memoryview(self._json)[:-1], b",", memoryview(orjson.dumps(new))[1:]))
        self._ids = prompt
        return self._json


def _check(ids: Sequence[int], vocab_size: int) -> None:
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise EngineRefusedError(f"token id {wrong} is outside the vocabulary of {vocab_size} ids")
