"""Encode the token ids of a growing prompt as JSON; each id is checked and encoded once."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from agentrl.inference.generation import EngineRefusedError


class EncodedIds:
    """The ids of a conversation's last prompt, and their JSON.

    A prompt that starts with the last one costs only its new ids; any other is encoded as a whole.
    """

    def __init__(self) -> None:
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
        new = prompt[known:]
        if new:
            _check(new, vocab_size)
            added = orjson.dumps(new)
            self._json = self._json[:-1] + b"," + added[1:] if known else added
            self._ids = prompt
        return self._json


def _check(ids: Sequence[int], vocab_size: int) -> None:
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise EngineRefusedError(f"token id {wrong} is outside the vocabulary of {vocab_size} ids")
