"""DPO: prefer the best trajectory of a group to its worst, relative to a reference model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from agentrl.config.flags import flag, require
from agentrl.losses.loss import TokenBatch, TokenLosses, loss

if TYPE_CHECKING:
    from agentrl.documents.training import DBRecordData
    from agentrl.losses.settings import LossSettings


def check_whole_trajectories(settings: LossSettings) -> None:
    """Raise ConfigError for another reduction than the mean over trajectories of a trajectory's sum."""
    for name, needed in (
        ("token_level_loss", False),
        ("skip_length_normalization", True),
        ("loss_length_divisor", None),
    ):
        require(
            getattr(settings, name) == needed,
            f"--{name} is {getattr(settings, name)}: the loss of {settings.loss_calculater} is that of whole"
            " trajectories",
            "leave it out",
        )


def best_and_worst(data: Sequence[DBRecordData]) -> list[DBRecordData]:
    """Return the trajectories with the highest and with the lowest score of each group, in their order.

    The first counts where several have it. A group whose scores are all equal has none.
    """
    groups: dict[str, list[DBRecordData]] = {}
    for item in data:
        groups.setdefault(item.task, []).append(item)
    chosen: set[str] = set()
    for items in groups.values():
        best, worst = max(items, key=lambda item: item.score), min(items, key=lambda item: item.score)
        if best.score > worst.score:
            chosen |= {best.id, worst.id}
    return [item for item in data if item.id in chosen]


@loss(
    "DPO", skip_length_normalization=True, clips=False, from_policy=False, compares=True,
    choose=best_and_worst, check=check_whole_trajectories,
)  # fmt: skip
def dpo(
    batch: TokenBatch,
    settings: LossSettings,
    *,
    preference_beta: Annotated[
        float,
        flag(None, "β: how much a change from the reference model counts (default: 0.1)", within="(0, inf)"),
    ] = 0.1,
) -> TokenLosses:
    """Return −log σ(β·(h_best − h_worst)), spread over the tokens of both, float32[T] (arXiv 2305.18290).

    h is Σ log πθ/π_ref over the trainable tokens of a trajectory. A step's loss is the mean over groups.
    """
    import torch
    from torch.nn.functional import logsigmoid

    compared = batch.compared
    assert compared is not None
    # Each group has two trajectories, of different scores: the partner is the group's other one.
    order = torch.argsort(compared.group, stable=True)
    partner = torch.empty_like(order)
    partner[order] = order.view(-1, 2).flip(1).flatten()
    sign = torch.sign(compared.score - compared.score[partner])
    margin = preference_beta * sign * (compared.log_ratio - compared.log_ratio[partner])
    # The reduction divides by the trajectories, two in each group: a value counts once, a slope twice.
    slope = -2 * preference_beta * sign * torch.sigmoid(-margin)
    return TokenLosses(losses=batch.of_trajectories(-logsigmoid(margin), slope))
