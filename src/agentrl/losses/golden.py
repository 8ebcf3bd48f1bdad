"""``python -m agentrl.losses.golden``: prints the golden value of every loss, computed as training does."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from agentrl.losses.batch import TokenBatch
from agentrl.losses.reduce import Denominators, reduce_losses
from agentrl.losses.registry import token_losses
from agentrl.losses.settings import LossSettings

TOLERANCE = 1e-4

ADVANTAGES = (1.0, -1.0, 2.0)
LOGPROBS = (-1.69315, -1.0, -0.59453)
OLD_LOGPROBS = (-1.0, -1.0, -1.0)
BEHAVIOR_LOGPROBS = (-0.5, -1.5, -0.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """One case: the settings, the expected loss, and the mask (1 keeps a token) where the case fixes it."""

    name: str
    settings: LossSettings
    expected: float
    old_is_behavior: bool = False
    kept: tuple[int, ...] | None = None


def _case(
    name: str,
    expected: float,
    loss: str = "GRPO",
    *,
    upper: float = 0.2,
    correction: str = "",
    token_mean: bool = True,
    old_is_behavior: bool = False,
    kept: tuple[int, ...] | None = None,
) -> Golden:
    settings = LossSettings(
        loss_calculater=loss,
        epsilon=0.2,
        epsilon_higher=upper - 0.2,
        importance_correction=correction,
        token_level_loss=token_mean,
        skip_length_normalization=not token_mean,
        old_logprobs="behavior" if old_is_behavior else "recompute",
    )
    return Golden(name=name, settings=settings, expected=expected, old_is_behavior=old_is_behavior, kept=kept)


GOLDEN: tuple[Golden, ...] = (
    _case("GRPO 0.2/0.2", -0.6333),
    _case("GRPO + uncapped w", -0.2065, correction="tis:inf"),
    _case("GRPO + tis C = 0.8", -0.4744, correction="tis:0.8"),
    _case("GRPO upper 0.28", -0.6867, upper=0.28),
    _case("GRPO 0.2/0.2 + icepop [0.7, 1.5]", -0.6550, correction="icepop:0.7:1.5"),
    _case("GRPO upper 0.28 + icepop [0.7, 1.5]", -0.6987, upper=0.28, correction="icepop:0.7:1.5"),
    _case("GSPO 0.2/0.2", -0.6057, "GSPO"),
    _case("CISPO 0.2/0.2", 0.5938, "CISPO"),
    _case(
        "MINIRL, sum, recomputed π_old, upper 0.28", -1.1352, "MINIRL", upper=0.28, token_mean=False,
        kept=(1, 1, 0),
    ),
    _case(
        "MINIRL, sum, π_old = μ, bounds [0.8, 1.3]", 0.3250, "MINIRL", upper=0.3, token_mean=False,
        old_is_behavior=True, kept=(1, 1, 1),
    ),
)  # fmt: skip
"""One trajectory of three tokens, each with an advantage of its own; token mean where not said otherwise."""


def evaluate(case: Golden) -> tuple[float, tuple[int, ...]]:
    """The loss of a case, and which tokens it kept."""
    behavior = torch.tensor(BEHAVIOR_LOGPROBS)
    batch = TokenBatch(
        logprobs=torch.tensor(LOGPROBS),
        old_logprobs=behavior if case.old_is_behavior else torch.tensor(OLD_LOGPROBS),
        behavior_logprobs=behavior,
        advantages=torch.tensor(ADVANTAGES),
        row=torch.zeros(3, dtype=torch.int64),
        version=torch.zeros(3, dtype=torch.int64),
        age=torch.zeros(3, dtype=torch.int64),
        mask=torch.ones(3, dtype=torch.bool),
        trajectories=1,
    )
    result = token_losses(batch, case.settings)
    whole = Denominators.of(batch.mask, batch.row)
    loss = reduce_losses(result.losses, batch.mask, batch.row, 1, whole, case.settings)
    return float(loss), tuple((~(result.masked | result.clipped)).int().tolist())


def main() -> int:
    """Print every case; 1 where one deviates by more than 1e-4 or keeps other tokens."""
    wrong = 0
    print(f"{'case':<44} {'expected':>9} {'computed':>9} {'deviation':>10}")
    for case in GOLDEN:
        value, kept = evaluate(case)
        good = abs(value - case.expected) <= TOLERANCE and case.kept in (None, kept)
        mask = "" if case.kept is None else "  mask " + ",".join(map(str, kept))
        print(
            f"{case.name:<44} {case.expected:>+9.4f} {value:>+9.4f} {value - case.expected:>+10.1e}{mask}"
            f"{'' if good else '  WRONG'}"
        )
        wrong += not good
    print(f"{len(GOLDEN) - wrong} of {len(GOLDEN)} agree to {TOLERANCE:g}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
