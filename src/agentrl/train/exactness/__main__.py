"""``python -m agentrl.train.exactness``: the largest deviation per loss × model × executor, as a table."""

from __future__ import annotations

import sys

import torch

from agentrl.losses.registry import LOSSES
from agentrl.losses.settings import LossSettings
from agentrl.train.exactness.models import MODELS, tiny_model
from agentrl.train.exactness.reference import longest_sequence, plain_step, trainer_step
from agentrl.train.exactness.steps import make_step, random_shape
from agentrl.train.step import ForwardOptions

LIMIT = 1e-5
SEEDS = (1, 2, 3)
EXECUTORS = ("sdpa", "varlen", "paths")


def largest_deviation(loss: str, model_name: str, executor: str, device: str) -> float:
    """Over ``SEEDS``, merging modes, reductions and budgets: one micro-batch, and as many as there can be."""
    model = tiny_model(model_name, device=device)
    worst = 0.0
    for seed in SEEDS:
        data = make_step(random_shape(seed), seed)
        settings = LossSettings(
            loss_calculater=loss, token_level_loss=seed % 2 == 0, importance_correction="tis"
        )
        expected = plain_step(model, data, settings)
        for merging in ("off", "trajectory", "group"):
            for max_tokens in (longest_sequence(data), 10**6):
                computed = trainer_step(
                    model, data, settings, merging=merging, max_tokens=max_tokens,
                    options=ForwardOptions(executor=executor),
                )  # fmt: skip
                worst = max(worst, computed.deviation(expected))
    return worst


def main() -> int:
    """Print the table; 1 where a deviation is above ``LIMIT``."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    executors = (*EXECUTORS, "flex") if device == "cuda" else EXECUTORS
    width = max(map(len, MODELS))
    print(
        f"largest deviation of loss and gradients from the plain model, a call at a time: float32, {device}"
    )
    print(f"{'loss':<13} {'model':<{width}} " + " ".join(f"{name:>8}" for name in executors))
    worst = 0.0
    for loss in LOSSES:
        for model_name in MODELS:
            found = [largest_deviation(loss, model_name, executor, device) for executor in executors]
            worst = max(worst, *found)
            print(
                f"{loss:<13} {model_name:<{width}} " + " ".join(f"{value:8.1e}" for value in found),
                flush=True,
            )
    print(f"largest {worst:.1e}, limit {LIMIT:g}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
