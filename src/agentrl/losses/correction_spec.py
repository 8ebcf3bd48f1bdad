"""Reads ``--importance_correction``: which corrections a run asks for, and their bounds."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Correction:
    """One entry of ``--importance_correction``: its name and its bounds."""

    name: str
    low: float
    high: float

    @property
    def caps(self) -> bool:
        """True for a weight with a cap; the others drop what is outside the bounds."""
        return self.name in CAPS

    @property
    def of_trajectory(self) -> bool:
        """True where it looks at the whole trajectory of a token."""
        return self.name.startswith("seq_")

    def excludes(self, values: Tensor) -> Tensor:
        """bool[T]: which ``values`` are outside the bounds."""
        return (values < self.low) | (values > self.high)


CAPS = ("tis", "seq_tis")
WEIGHS = (*CAPS, "icepop")
_ONE_NUMBER = (*CAPS, "seq_kl")


_DEFAULTS = {
    "tis": Correction("tis", 0.0, 2.0),
    "seq_tis": Correction("seq_tis", 0.0, 2.0),
    "icepop": Correction("icepop", 0.5, 5.0),
    "seq_mask": Correction("seq_mask", 0.9, 1.1),
    "token_mask": Correction("token_mask", 0.5, 2.0),
    "seq_kl": Correction("seq_kl", 0.0, 0.1),
}


def parse_corrections(text: str) -> tuple[Correction, ...]:
    """Read ``--importance_correction``: names with optional bounds, comma-separated.

    With w = π_old/μ, or ρ = πθ/μ in its place where π_old is μ:
    ``tis[:C]`` weighs by w capped at C (truncated importance sampling; default 2, ``inf`` caps nothing).
    ``seq_tis[:C]`` (2) weighs a trajectory by the product of its tokens' w, capped at C.
    ``icepop[:low:high]`` (0.5, 5) weighs by w and drops tokens whose w is outside.
    ``token_mask[:low:high]`` (0.5, 2) drops tokens whose w is outside, and weighs none.
    ``seq_mask[:low:high]`` (0.9, 1.1) drops trajectories whose geometric mean of w is outside.
    ``seq_kl[:limit]`` (0.1 nats a token) drops trajectories whose mean of w − 1 − log w, an estimate of the
    KL from μ, is above the limit.
    Raises ConfigError for an unknown name, a repeated one or bounds that are none.
    """
    corrections: list[Correction] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        correction = _parse_one(entry)
        if correction.name in {earlier.name for earlier in corrections}:
            raise ConfigError(
                f"--importance_correction names {correction.name!r} twice", hint="name each correction once"
            )
        corrections.append(correction)
    return tuple(corrections)


def _parse_one(entry: str) -> Correction:
    name, *numbers = entry.split(":")
    if name not in _DEFAULTS:
        nearest = difflib.get_close_matches(name, _DEFAULTS, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"--importance_correction names {name!r}, which is none of {', '.join(_DEFAULTS)}",
            hint=f"did you mean {nearest!r}?",
        )
    if not numbers:
        return _DEFAULTS[name]
    form = f"{name}:{'limit' if name == 'seq_kl' else 'C'}" if name in _ONE_NUMBER else f"{name}:low:high"
    hint = f"write it as {form} with numbers, 0 ≤ low < high"
    try:
        bounds = [float(number) for number in numbers]
    except ValueError as error:
        raise ConfigError(f"--importance_correction has {entry!r}", hint=hint) from error
    if name in _ONE_NUMBER:
        bounds = [0.0, *bounds]
    if len(bounds) != 2 or any(math.isnan(bound) for bound in bounds) or not 0 <= bounds[0] < bounds[1]:
        raise ConfigError(f"--importance_correction has {entry!r}", hint=hint)
    return Correction(name, bounds[0], bounds[1])
