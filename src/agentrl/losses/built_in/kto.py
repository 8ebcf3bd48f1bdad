"""KTO: raise trajectories that people want and lower those that they do not; needs no pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from agentrl.config.flags import flag, require
from agentrl.losses.built_in.dpo import check_whole_trajectories
from agentrl.losses.loss import TokenBatch, TokenLosses, loss

if TYPE_CHECKING:
    from agentrl.losses.settings import LossSettings


def check_weights(settings: LossSettings) -> None:
    """Raise ConfigError if both weights are 0, and as ``check_whole_trajectories`` does."""
    check_whole_trajectories(settings)
    require(
        settings.kto_desirable_weight + settings.kto_undesirable_weight > 0,
        "--kto_desirable_weight and --kto_undesirable_weight are 0: nothing would be trained",
        "raise one of the two",
    )


@loss(
    "KTO", skip_length_normalization=True, clips=False, from_policy=False, compares=True, check=check_weights,
)  # fmt: skip
def kto(
    batch: TokenBatch,
    settings: LossSettings,
    *,
    preference_beta: float,
    kto_threshold: Annotated[
        float, flag(0.5, "a trajectory is desirable if its score is above this", within="(-inf, inf)")
    ],
    kto_desirable_weight: Annotated[
        float, flag(1.0, "λ_D: weight of desirable trajectories", within="[0, inf)")
    ],
    kto_undesirable_weight: Annotated[
        float, flag(1.0, "λ_U: weight of undesirable trajectories", within="[0, inf)")
    ],
) -> TokenLosses:
    """Return λ·(1 − σ(±β·(h − z))), spread over the tokens of a trajectory, float32[T] (arXiv 2402.01306).

    h is Σ log πθ/π_ref over the trainable tokens of a trajectory; + and λ_D are those of a desirable one, −
    and λ_U those of another. z, without gradient, is the mean of h over the trajectories of the update, at
    least 0: an estimate of KL(πθ‖π_ref) from what the policy sampled. The paper, whose data come from
    elsewhere, takes it from mismatched prompts and answers.
    """
    import torch

    compared = batch.compared
    assert compared is not None
    is_desirable = compared.score > kto_threshold
    sign = torch.where(is_desirable, 1.0, -1.0)
    weight = torch.where(is_desirable, kto_desirable_weight, kto_undesirable_weight)
    baseline = compared.log_ratio.mean().clamp(min=0.0)
    value = torch.sigmoid(sign * preference_beta * (compared.log_ratio - baseline))
    slope = -weight * sign * preference_beta * value * (1 - value)
    return TokenLosses(losses=batch.of_trajectories(weight * (1 - value), slope))
