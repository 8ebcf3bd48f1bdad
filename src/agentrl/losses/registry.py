"""LOSSES: every loss by the name that ``--loss_calculater`` takes, and the one way to compute it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from agentrl.errors import ConfigError
from agentrl.losses.batch import TokenBatch, TokenLosses
from agentrl.losses.cispo import cispo
from agentrl.losses.correction import out_of_bound, weigh
from agentrl.losses.grpo import grpo
from agentrl.losses.gspo import gspo
from agentrl.losses.minirl import minirl
from agentrl.losses.reference import reference_kl
from agentrl.losses.settings import LossSettings
from agentrl.losses.sft import cross_entropy

LossFunction = Callable[[TokenBatch, LossSettings], TokenLosses]


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss function and how corrections and bounds meet it."""

    function: LossFunction
    weighted_by_default: bool = False
    """True where w = π_old/μ is a factor of the loss itself."""
    reads_trajectory: bool = False
    """True where a token's loss depends on the other tokens of its trajectory."""
    from_policy: bool = True
    """True where a policy sampled the tokens, so that bounds and corrections apply."""


LOSSES: dict[str, Loss] = {
    "GRPO": Loss(grpo),
    "GSPO": Loss(gspo, reads_trajectory=True),
    "CISPO": Loss(cispo),
    "MINIRL": Loss(minirl, weighted_by_default=True),
    "CrossEntropy": Loss(cross_entropy, from_policy=False),
}


def get_loss(name: str) -> Loss:
    """The loss called ``name``; ConfigError naming the nearest one for a name that is none."""
    if name in LOSSES:
        return LOSSES[name]
    by_lower = {known.lower(): known for known in LOSSES}
    nearest = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.0)[0]
    raise ConfigError(
        f"--loss_calculater is {name!r}, which is none of {', '.join(LOSSES)}",
        cure=f"did you mean {by_lower[nearest]!r}?",
    )


def reads_trajectory(settings: LossSettings) -> bool:
    """True where a token's loss depends on its whole trajectory (``TokenBatch.means``)."""
    loss = get_loss(settings.loss_calculater)
    masks = any(correction.name == "seq_mask" for correction in settings.corrections)
    return loss.reads_trajectory or (loss.from_policy and masks)


def token_losses(batch: TokenBatch, settings: LossSettings) -> TokenLosses:
    """Per-token losses [T] of a micro-batch, with corrections and bounds applied, not yet reduced.

    The pull towards a reference model (``kl_coef``) is on every token, also where a bound or mask holds.
    """
    loss = get_loss(settings.loss_calculater)
    result = loss.function(batch, settings)
    if not loss.from_policy:
        return result
    weighting = weigh(batch, settings.corrections, weighted_by_default=loss.weighted_by_default)
    masked = weighting.masked | out_of_bound(result.ratio, batch, settings)
    losses = torch.where(masked, 0.0, result.losses * weighting.weight)
    if settings.kl_coef:
        losses = losses + settings.kl_coef * reference_kl(batch, settings.kl_estimator)
    return replace(result, losses=losses, masked=masked)
