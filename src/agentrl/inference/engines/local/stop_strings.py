"""End a generation at a stop string: decode its last tokens after each new one."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_SPARE = 8
"""Further tokens to decode: the first ones may be parts of a character."""


class StopStrings:
    """The stop strings of one generation."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._tokens = max(len(stop.encode()) for stop in stops) + _SPARE

    def found_in(self, output_ids: Sequence[int]) -> str | None:
        """Return the stop string that the last token of a generation completes; None without one."""
        text = self._tokenizer.decode(list(output_ids[-self._tokens :]), skip_special_tokens=False)
        return next((stop for stop in self._stops if stop in text), None)


def read_stops(value: object) -> tuple[str, ...]:
    """Return the sampling parameter ``stop``. Raises ValueError unless it is text or a list of texts."""
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError(f"stop must be a text or a list of texts, not {value!r}")
    return tuple(stops)
