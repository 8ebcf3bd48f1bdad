"""Flags of the loss, declared once: their ranges, and the reader of ``--importance_correction``."""

from __future__ import annotations

import difflib
import importlib
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from agentrl.config.flags import Flags, flag, require
from agentrl.errors import ConfigError

OldLogprobs = Literal["behavior", "recompute", "loglinear"]
OLD_LOGPROBS: tuple[OldLogprobs, ...] = get_args(OldLogprobs)

CAPS = ("tis", "seq_tis")
WEIGHTS = (*CAPS, "icepop")
_ONE_NUMBER = (*CAPS, "seq_kl")

_LOSSES = importlib.import_module("agentrl.losses.loss")
LOSS_PARAMETERS = frozenset(_LOSSES.loss_flags())
"""Flags that a loss reads only if it has a parameter of that name."""

C = TypeVar("C", bound=type[Flags])


def _with_flags_of_losses(group: C) -> C:
    """Add the flags that losses declare, each in its own file, to the fields of ``group``.

    The package of losses is above this one, so it is found by name; its declarations import no torch.
    """
    for name, declared in _LOSSES.loss_flags().items():
        group.__annotations__[name] = declared.type
        setattr(group, name, declared.field)
    return group


@dataclass(frozen=True, kw_only=True)
@_with_flags_of_losses
class LossConfig(Flags):
    """The loss (docs/losses.md)."""

    section = "loss"

    loss_calculater: str = flag(
        "GRPO",
        f"the loss: {', '.join(_LOSSES.built_in_losses())}, or one of your own as module:function",
    )
    loss_args: str = flag("{}", "JSON of parameters of a loss of your own, e.g. '{\"beta\": 0.1}'")
    token_level_loss: bool | None = flag(
        None, "average over the step's tokens instead of its trajectories (default: the loss's own)"
    )
    skip_length_normalization: bool | None = flag(
        None, "use the sum of a trajectory's token losses instead of their mean (default: the loss's own)"
    )
    loss_length_divisor: int | None = flag(
        None,
        "divide the sum of a trajectory's token losses by this constant, e.g. the generation budget"
        " (Dr. GRPO)",
        within="[1, inf)",
        unit="tokens",
    )
    strict_in_bound: bool | None = flag(
        None,
        "drop tokens whose πθ/μ is outside [1 - epsilon, 1 + epsilon + epsilon_higher] in the direction of"
        " their advantage (default: the loss's own)",
    )
    epsilon: float | None = flag(
        None, "lower end of the clip interval: 1 - epsilon (default: the loss's own)", within="[0, 1]"
    )
    epsilon_higher: float | None = flag(
        None,
        "upper end of the clip interval: 1 + epsilon + epsilon_higher (default: the loss's own)",
        within="[0, inf)",
    )
    importance_weight_cap_ratio: float | None = flag(
        None,
        "drop tokens whose πθ/μ is outside the clip interval widened by this factor, e.g. 4; inf drops none"
        " (default: the loss's own)",
        within="[1, inf]",
    )
    out_of_date_decay: float | None = flag(
        None,
        "multiply the width of these bounds by exp(-decay) per optimizer step of a token's age; also the"
        " decay of --staleness_policy decay",
        within="[0, inf)",
    )
    importance_correction: str = flag(
        "",
        "corrections of the mismatch between engine and trainer, comma-separated: tis, seq_tis, icepop,"
        " token_mask, seq_mask, seq_kl; e.g. 'icepop:0.5:5,seq_kl:0.1'",
    )
    old_logprobs: Literal["behavior", "recompute", "loglinear"] = flag(
        "behavior",
        "logprobs of π_old: the engine's (behavior), the trainer's at the start of the step (recompute), or"
        " an interpolation by a token's age (loglinear)",
    )
    kl_coef: float = flag(
        0.0, "weight of the KL to a reference model in the loss (0: none)", within="[0, inf)"
    )
    kl_estimator: Literal["weighted_k3", "k1", "k2", "k3"] = flag(
        "weighted_k3", "estimator of that KL from a sampled token; weighted_k3 is unbiased off-policy"
    )
    entropy_coef: float = flag(
        0.0, "weight of the entropy bonus, which is subtracted from the loss (0: none)", within="[0, inf)"
    )

    distill_coef: float | None = flag(
        None,
        "weight of log π_teacher/πθ in a token's advantage, with --columns teacher (default: OPD 1, else 0)",
        within="[0, inf)",
    )

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # a flag that a loss declares

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_corrections(self.importance_correction)
        _ = self.arguments
        require(
            self.loss_length_divisor is None or not self.token_level_loss,
            f"--loss_length_divisor is {self.loss_length_divisor}, and --token_level_loss is true",
            "set --token_level_loss false: an average over the step's tokens divides by their number",
        )

    @property
    def corrections(self) -> tuple[Correction, ...]:
        """``importance_correction``, parsed."""
        return parse_corrections(self.importance_correction)

    @property
    def arguments(self) -> dict[str, Any]:
        """``loss_args``, parsed. Raises ConfigError unless it is a JSON object."""
        try:
            values = json.loads(self.loss_args)
        except ValueError as error:
            raise ConfigError(
                f"--loss_args is {self.loss_args!r}: {error}",
                hint="give a JSON object, e.g. '{\"beta\": 0.1}'",
            ) from error
        require(
            isinstance(values, dict),
            f"--loss_args is {self.loss_args!r}",
            "give a JSON object, e.g. '{\"beta\": 0.1}'",
        )
        return dict(values)


@dataclass(frozen=True, slots=True)
class Correction:
    """One entry of ``--importance_correction``: its name and its bounds."""

    name: str
    low: float
    high: float

    @property
    def caps(self) -> bool:
        """Whether it caps a weight; the other corrections drop tokens outside the bounds."""
        return self.name in CAPS

    @property
    def reads_trajectory(self) -> bool:
        """Whether it reads the whole trajectory of a token."""
        return self.name.startswith("seq_")


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

    Below, w is π_old/μ; where π_old is μ, it is πθ/μ instead.
    ``tis[:C]`` multiplies by w capped at C (truncated importance sampling; default 2, ``inf`` caps nothing).
    ``seq_tis[:C]`` multiplies by the product of w over the trajectory, capped at C (2).
    ``icepop[:low:high]`` multiplies by w and drops tokens with w outside the bounds (0.5, 5).
    ``token_mask[:low:high]`` drops tokens with w outside the bounds (0.5, 2) and multiplies by nothing.
    ``seq_mask[:low:high]`` drops trajectories whose geometric mean of w is outside the bounds (0.9, 1.1).
    ``seq_kl[:limit]`` drops trajectories whose mean of w − 1 − log w, an estimate of the KL from μ, is above
    the limit (0.1 nats per token).
    Raises ConfigError for an unknown or repeated name and for invalid bounds.
    """
    corrections: list[Correction] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        correction = _parse_correction(entry)
        if correction.name in {earlier.name for earlier in corrections}:
            raise ConfigError(
                f"--importance_correction names {correction.name!r} twice", hint="name each correction once"
            )
        corrections.append(correction)
    require(
        bool(corrections) or not text, f"--importance_correction {text!r} names none", "give one, e.g. tis:2"
    )
    return tuple(corrections)


def _parse_correction(entry: str) -> Correction:
    name, *numbers = entry.split(":")
    if name not in _DEFAULTS:
        nearest = difflib.get_close_matches(name, _DEFAULTS, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"--importance_correction has the unknown name {name!r}; choose from {', '.join(_DEFAULTS)}",
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
