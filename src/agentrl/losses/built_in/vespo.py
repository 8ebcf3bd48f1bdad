"""VESPO: REINFORCE with a smooth weight of the whole trajectory's ratio, which fades on both sides of 1."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from agentrl.config.flags import require
from agentrl.losses.loss import LOG_RATIO_LIMIT, TokenBatch, TokenLosses, loss

if TYPE_CHECKING:
    from agentrl.losses.settings import LossSettings


def check_weights(settings: LossSettings) -> None:
    """Raise ConfigError for a k below 0, a λ that is not above 0, and for one that is not finite."""
    for name, value in settings.arguments.items():
        least = 0.0 if name.startswith("k_") else math.ulp(0.0)
        require(
            least <= value < math.inf,
            f"--loss_args has {name!r} = {value}: the weight W^k·exp(λ·(1 − W)) needs k of 0 or more and λ"
            " above 0, both finite",
            "leave it out, or use numbers near k 2 and λ 3",
        )


@loss(
    "VESPO", token_level_loss=True, clips=False, compares_behavior=True, reads_trajectory=True,
    follows_advantage=True, check=check_weights,
)  # fmt: skip
def vespo(
    batch: TokenBatch,
    settings: LossSettings,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> TokenLosses:
    """Return −sg(φ(W))·A·log πθ, float32[T], with φ(W) = W^k·exp(λ·(1 − W)) (arXiv 2602.10693).

    W is the product of πθ/μ over the trajectory, not its geometric mean, within e^±20. φ(1) is 1, the largest
    φ is at W = k/λ. ``k_pos`` and ``lambda_pos`` hold for A ≥ 0, the others for A < 0. The defaults, and the
    mean over tokens, are those of the authors' code (FloyedShen/VESPO) and of TRL's ``loss_type`` vespo.
    """
    import torch

    log_weight = (batch.mean_log_rho * batch.trajectory_tokens).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    weight = log_weight.exp()
    is_positive = batch.advantages >= 0
    power = torch.where(is_positive, k_pos, k_neg)
    rate = torch.where(is_positive, lambda_pos, lambda_neg)
    scale = (power * log_weight + rate * (1 - weight)).exp()
    return TokenLosses(losses=-scale * batch.advantages * batch.logprobs.float(), ratio=weight)
