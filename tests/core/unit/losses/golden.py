"""The examples of docs/losses.md, with the golden value of every loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from recipes import CONFIGS, RECIPES

from agentrl.config.schema import LossConfig, TrainConfig
from agentrl.config.training import OldLogprobs
from agentrl.data.stream import whitened
from agentrl.losses.compute import old_logprobs
from agentrl.losses.loss import TokenBatch
from agentrl.losses.settings import LossSettings

TOLERANCE = 1e-4
RELATIVE = 1e-3
"""Of the golden values of recipes, which have four digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """The tokens of a step, one entry each; ``row`` is the trajectory."""

    row: tuple[int, ...]
    advantages: tuple[float, ...]
    logprobs: tuple[float, ...]
    start: tuple[float, ...]
    """The trainer's logprobs at the start of the step."""
    behavior: tuple[float, ...]
    reference: tuple[float, ...]
    age: tuple[int, ...]


VECTOR = Example(
    row=(0, 0, 0),
    advantages=(1.0, -1.0, 2.0),
    logprobs=(-1.69315, -1.0, -0.59453),
    start=(-1.0, -1.0, -1.0),
    behavior=(-0.5, -1.5, -0.8),
    reference=(-1.0, -1.0, -1.0),
    age=(0, 0, 0),
)
"""One trajectory of three tokens with different advantages."""

STEP = Example(
    row=(0, 0, 0, 1, 1, 2),
    advantages=(1.0, 1.0, 1.0, -1.0, -1.0, 0.5),
    logprobs=(-1.69315, -1.0, -0.59453, -0.6, -0.5, -0.5),
    start=(-1.0, -1.0, -1.0, -1.0, -2.0, -2.2),
    behavior=(-0.5, -1.5, -0.8, -0.7, -0.7, -4.0),
    reference=(-1.2, -1.1, -0.9, -1.0, -1.5, -1.6),
    age=(0, 1, 1, 2, 2, 3),
)
"""Three trajectories of three, two and one token; ratios on both sides of every bound."""

WHITENED_STEP = replace(STEP, advantages=tuple(whitened(STEP.advantages, [1] * len(STEP.row))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """One case: the settings, the expected loss, and the mask (1 keeps a token) where the case fixes it."""

    name: str
    settings: LossSettings
    expected: float
    example: Example = VECTOR
    kept: tuple[int, ...] | None = None


def _case(
    name: str, expected: float, loss: str = "GRPO", *, upper: float = 0.2, correction: str = "",
    token_mean: bool = True, old: OldLogprobs = "recompute", length_divisor: int | None = None,
    kept: tuple[int, ...] | None = None,
) -> Golden:  # fmt: skip
    settings = LossSettings(
        loss_calculater=loss, epsilon=0.2, epsilon_higher=upper - 0.2, importance_correction=correction,
        token_level_loss=token_mean, skip_length_normalization=not token_mean, old_logprobs=old,
        loss_length_divisor=length_divisor,
    )  # fmt: skip
    return Golden(name=name, settings=settings, expected=expected, kept=kept)


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
        old="behavior", kept=(1, 1, 1),
    ),
    _case("SAPO", -1.5284, "SAPO"),
    _case("GRPO 0.2/0.2, sum over 4 tokens", -0.4750, token_mean=False, length_divisor=4),
    *(
        Golden(
            name=name, settings=LossSettings.of(configs[LossConfig]), expected=RECIPES[name].golden or 0.0,
            example=STEP if configs[TrainConfig].advantage_whitening == "none" else WHITENED_STEP,
        )
        for name, configs in CONFIGS.items()
    ),
)  # fmt: skip
"""``VECTOR``, by default with a token mean; then ``STEP`` with every recipe."""


def batch_of(example: Example, settings: LossSettings) -> TokenBatch:
    """Return the example as a TokenBatch; its logprobs are a leaf with a gradient."""
    behavior, age = torch.tensor(example.behavior), torch.tensor(example.age)
    row = torch.tensor(example.row)
    return TokenBatch(
        logprobs=torch.tensor(example.logprobs, requires_grad=True),
        old_logprobs=old_logprobs(settings.old_logprobs, torch.tensor(example.start), behavior, age),
        behavior_logprobs=behavior, reference_logprobs=torch.tensor(example.reference),
        advantages=torch.tensor(example.advantages), row=row, version=torch.zeros_like(row), age=age,
        mask=torch.ones_like(row, dtype=torch.bool), trajectories=int(row.max()) + 1,
    )  # fmt: skip
