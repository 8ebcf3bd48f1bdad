"""OPD: on-policy distillation; a teacher's judgement of each token is its advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.config.flags import require
from agentrl.losses.built_in.grpo import clipped_surrogate
from agentrl.losses.loss import TokenBatch, TokenLosses, bounded_exp, loss

if TYPE_CHECKING:
    from agentrl.losses.settings import LossSettings


def check_teacher(settings: LossSettings) -> None:
    """Raise ConfigError for OPD without its only advantage."""
    require(bool(settings.distill_coef), "--distill_coef is 0: OPD would train nothing", "leave it out")


@loss("OPD", token_level_loss=True, distill_coef=1.0, ignores_score=True, check=check_teacher)
def opd(batch: TokenBatch, settings: LossSettings, *, dual_clip: float) -> TokenLosses:
    """Return max(−r·A, −clip(r)·A), float32[T], with A = ``distill_coef``·(log π_teacher − log πθ).

    On tokens that πθ sampled, the expected gradient is that of the reverse KL(πθ‖π_teacher): on-policy
    distillation (GKD, arXiv 2306.13649) as policy gradient. The score of the trajectory has no part in it;
    ``--distill_coef`` with another loss adds A to the advantage of the score instead.
    """
    ratio = bounded_exp(batch.log_ratio)
    return clipped_surrogate(ratio, batch.advantages, settings, dual_clip, None, None)
