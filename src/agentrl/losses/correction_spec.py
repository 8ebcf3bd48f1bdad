"""Reads ``--importance_correction``: which corrections a run asks for, and their bounds."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Correction:
    """One entry of ``--importance_correction``: its name and its bounds on w = π_old/μ."""

    name: str
    low: float
    high: float


_DEFAULTS = {
    "tis": Correction("tis", 0.0, 2.0),
    "icepop": Correction("icepop", 0.5, 5.0),
    "seq_mask": Correction("seq_mask", 0.9, 1.1),
    "token_mask": Correction("token_mask", 0.5, 2.0),
}


def parse_corrections(text: str) -> tuple[Correction, ...]:
    """Read ``--importance_correction``: names with optional bounds, comma-separated.

    ``tis[:C]`` weights by w capped at C (truncated importance sampling; default 2, ``inf`` caps nothing).
    ``icepop[:low:high]`` (0.5, 5) weights by w and drops tokens whose w is outside.
    ``seq_mask[:low:high]`` (0.9, 1.1) drops trajectories whose geometric mean of w is outside.
    ``token_mask[:low:high]`` (0.5, 2) drops tokens whose w is outside, and weights none.
    Raises ConfigError for an unknown name, a repeated one or bounds that are none.
    """
    corrections: list[Correction] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        correction = _parse_one(entry)
        if correction.name in {earlier.name for earlier in corrections}:
            raise ConfigError(
                f"--importance_correction names {correction.name!r} twice", cure="name each correction once"
            )
        corrections.append(correction)
    return tuple(corrections)


def _parse_one(entry: str) -> Correction:
    name, *numbers = entry.split(":")
    if name not in _DEFAULTS:
        nearest = difflib.get_close_matches(name, _DEFAULTS, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"--importance_correction names {name!r}, which is none of {', '.join(_DEFAULTS)}",
            cure=f"did you mean {nearest!r}?",
        )
    if not numbers:
        return _DEFAULTS[name]
    form = "tis:C" if name == "tis" else f"{name}:low:high"
    cure = f"write it as {form} with numbers, 0 ≤ low < high"
    try:
        bounds = [float(number) for number in numbers]
    except ValueError as error:
        raise ConfigError(f"--importance_correction has {entry!r}", cure=cure) from error
    if name == "tis":
        bounds = [0.0, *bounds]
    if len(bounds) != 2 or any(math.isnan(bound) for bound in bounds) or not 0 <= bounds[0] < bounds[1]:
        raise ConfigError(f"--importance_correction has {entry!r}", cure=cure)
    return Correction(name, bounds[0], bounds[1])
