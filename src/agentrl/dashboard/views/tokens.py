"""Colour the generated tokens of a model call by one value, in steps that are also shown without colour."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agentrl.chat.model_folder import read_tokenizer_file
from agentrl.errors import ModelError
from agentrl.store.views.tokens import NO_VERSION, CallTokens

LEVELS: Final = 8
"""Steps of a colour scale, from 0."""
PAGE: Final = 2000
"""Tokens on one page."""
_LOGPROB_FLOOR = -6.0
_MAX_TOKENIZER_BYTES = 64 * 2**20


class Colour(StrEnum):
    """The value that colours a token."""

    LOGPROB = "logprob"
    ADVANTAGE = "advantage"
    VERSION = "version"
    TRAINED = "trained"
    RATIO = "ratio"
    ENTROPY = "entropy"

    @property
    def is_stored(self) -> bool:
        """Return whether the store holds this value for each token."""
        return self not in (Colour.RATIO, Colour.ENTROPY)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """One generated token. ``level`` is None where the value is missing."""

    place: int
    id: int
    text: str
    logprob: float | None
    version: int | None
    advantage: float | None
    level: str | None
    """``s0`` … ``s7`` of a scale, ``n1`` … ``n4`` below and ``p0`` … ``p4`` above zero, ``v0`` … ``v7``."""

    @property
    def detail(self) -> str:
        """Return all values in words, for a pointer, a keyboard and a screen reader."""
        parts = [f"token {self.place}", f"id {self.id}"]
        if self.logprob is None:
            parts.append("no logprob")
        else:
            parts.append(f"logprob {self.logprob:.3f} (probability {math.exp(min(self.logprob, 0.0)):.3g})")
        parts.append("version unknown" if self.version is None else f"policy version {self.version}")
        trained = "not trained" if self.advantage is None else f"trained, advantage {self.advantage:+.3f}"
        return " · ".join([*parts, trained])


def token_views(
    tokens: CallTokens, colour: Colour, decode: Callable[[int], str] | None, start: int = 0
) -> list[TokenView]:
    """Return up to ``PAGE`` tokens of a model call from ``start`` on."""
    end = min(start + PAGE, len(tokens.ids))
    largest = float(np.nanmax(np.abs(tokens.advantages))) if _has_numbers(tokens.advantages) else 0.0
    versions = sorted(set(tokens.versions.tolist()))
    views = []
    for place in range(start, end):
        token_id = int(tokens.ids[place])
        logprob, advantage = _number(tokens.logprobs[place]), _number(tokens.advantages[place])
        version = int(tokens.versions[place])
        views.append(
            TokenView(
                place=place,
                id=token_id,
                text=f"[{token_id}]" if decode is None else decode(token_id),
                logprob=logprob,
                version=None if version == NO_VERSION else version,
                advantage=advantage,
                level=_level(colour, logprob, advantage, version, largest, versions),
            )
        )
    return views


def _level(
    colour: Colour,
    logprob: float | None,
    advantage: float | None,
    version: int,
    largest: float,
    versions: Sequence[int],
) -> str | None:
    if colour is Colour.LOGPROB and logprob is not None:
        share = max(0.0, min(1.0, logprob / _LOGPROB_FLOOR))
        return f"s{min(int(share * LEVELS), LEVELS - 1)}"
    if colour is Colour.ADVANTAGE and advantage is not None:
        strength = math.ceil(4 * abs(advantage) / largest) if largest > 0 else 0
        return f"{'n' if advantage < 0 else 'p'}{strength}"
    if colour is Colour.VERSION and version != NO_VERSION:
        return f"v{versions.index(version) % LEVELS}"
    if colour is Colour.TRAINED:
        return None if advantage is None else "p3"
    return None


@lru_cache(maxsize=4)
def decoder(folder: str) -> Callable[[int], str] | None:
    """Return the function from a token id to its text; None if the folder has no tokenizer to read."""
    path = Path(folder) / "tokenizer.json"
    try:
        if path.stat().st_size > _MAX_TOKENIZER_BYTES:
            return None
        tokenizer = read_tokenizer_file(path)
    except (OSError, ModelError, ValueError):
        return None

    def text(token_id: int) -> str:
        if not 0 <= token_id < tokenizer.get_vocab_size(with_added_tokens=True):
            return f"[{token_id}]"
        decoded = tokenizer.decode([token_id], skip_special_tokens=False)
        return decoded if decoded and "\ufffd" not in decoded else tokenizer.id_to_token(token_id) or ""

    return text


def _number(value: np.float32) -> float | None:
    return float(value) if np.isfinite(value) else None


def _has_numbers(values: NDArray[np.float32]) -> bool:
    return bool(np.isfinite(values).any())


def legend_of(tokens: CallTokens, colour: Colour) -> list[tuple[str, str]]:
    """Return the levels of the scale with their meaning."""
    if colour is Colour.LOGPROB:
        edges = [_LOGPROB_FLOOR * level / LEVELS + 0.0 for level in range(LEVELS + 1)]  # no "-0"
        shown = [(f"s{level}", f"{edges[level]:g} to {edges[level + 1]:g}") for level in range(LEVELS - 1)]
        return [*shown, (f"s{LEVELS - 1}", f"below {edges[LEVELS - 1]:g}: the model was surprised")]
    if colour is Colour.ADVANTAGE:
        return [("n4", "made less likely"), ("n1", "a little"), ("p0", "advantage 0"), ("p1", "a little"),
                ("p4", "made more likely")]  # fmt: skip
    if colour is Colour.VERSION:
        versions = sorted(set(tokens.versions.tolist()))
        return [
            (f"v{place % LEVELS}", f"version {version}")
            for place, version in enumerate(versions)
            if version != NO_VERSION
        ]
    if colour is Colour.TRAINED:
        return [("p3", "in the training data")]
    return []
