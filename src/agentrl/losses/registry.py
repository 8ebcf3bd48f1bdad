"""LOSSES: every loss function by its ``--loss_calculater`` name; ``token_losses`` calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from agentrl.losses.batch import TokenBatch, TokenLosses
from agentrl.losses.cispo import cispo
from agentrl.losses.correction import out_of_bound, weigh
from agentrl.losses.grpo import grpo
from agentrl.losses.gspo import gspo
from agentrl.losses.minirl import minirl
from agentrl.losses.reference import reference_kl
from agentrl.losses.sapo import sapo
from agentrl.losses.settings import LossSettings
from agentrl.losses.sft import cross_entropy

LossFunction = Callable[[TokenBatch, LossSettings], TokenLosses]


LOSSES: dict[str, LossFunction] = {
    "GRPO": grpo,
    "GSPO": gspo,
    "CISPO": cispo,
    "MINIRL": minirl,
    "SAPO": sapo,
    "CrossEntropy": cross_entropy,
}
"""``losses.spec.SPECS`` has the paper's defaults under the same names."""


def reads_trajectory(settings: LossSettings) -> bool:
    """True where a token's loss depends on its whole trajectory (``TokenBatch.means``)."""
    if not settings.spec.from_policy:
        return False
    corrections = any(correction.of_trajectory for correction in settings.corrections)
    return settings.spec.reads_trajectory or corrections


def token_losses(batch: TokenBatch, settings: LossSettings) -> TokenLosses:
    """Per-token losses [T] of a micro-batch, with corrections and bounds applied, not yet reduced.

    The pull towards a reference model (``kl_coef``) and the bonus on the entropy (``entropy_coef``) are on
    every token, also where a bound or mask holds. Raises ValueError for a batch without what they need.
    """
    result = LOSSES[settings.loss_calculater](batch, settings)
    if not settings.spec.from_policy:
        return result
    weighting = weigh(batch, settings)
    masked = weighting.masked | out_of_bound(batch, settings)
    losses = torch.where(masked, 0.0, result.losses * weighting.weight)
    if settings.kl_coef:
        losses = losses + settings.kl_coef * reference_kl(batch, settings.kl_estimator)
    if settings.entropy_coef:
        if batch.entropy is None:
            raise ValueError("the batch has no entropy")
        losses = losses - settings.entropy_coef * batch.entropy
    return replace(result, losses=losses, masked=masked, capped=weighting.capped)
