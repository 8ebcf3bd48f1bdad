"""Print the largest deviation per loss × model × executor: ``PYTHONPATH=tests python -m exactness``."""

from __future__ import annotations

import sys

import torch

from agentrl.data.planner import PrefixMerging
from agentrl.losses.loss import LOSSES
from agentrl.losses.settings import LossSettings
from exactness.corrections import cases_of
from exactness.models import MODELS, tiny_model
from exactness.reference import longest_sequence, plain_step, trainer_step
from exactness.steps import make_step, random_shape

LIMIT = 1e-5
MERGING: tuple[PrefixMerging, ...] = ("off", "trajectory", "group")
EXECUTORS = ("sdpa", "varlen", "per_sequence")


def largest_deviation(loss: str, model_name: str, executor: str, device: str) -> float:
    """Return the largest deviation over all corrections under every π_old.

    Each case has its own step, reduction, merging mode and ``max_tokens``: for one micro-batch, or for as
    many as possible.
    """
    model = tiny_model(model_name, device=device)
    worst = 0.0
    for seed, (old, correction) in enumerate(cases_of(loss)):
        data = make_step(random_shape(seed), seed)
        settings = LossSettings(
            loss_calculater=loss, token_level_loss=seed % 4 < 2, old_logprobs=old,
            importance_correction=correction,
        )  # fmt: skip
        expected = plain_step(model, data, settings)
        computed = trainer_step(
            model, data, settings, merging=MERGING[seed % 3],
            max_tokens=10**6 if seed % 2 else longest_sequence(data),
            executor=executor,
        )  # fmt: skip
        worst = max(worst, computed.deviation(expected))
    return worst


def main() -> int:
    """Print the table; return 1 if a deviation is above ``LIMIT``."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    executors = (*EXECUTORS, "flex") if device == "cuda" else EXECUTORS
    width = max(map(len, MODELS))
    print(
        f"largest deviation of loss and gradients from the plain model, a call at a time: float32, {device}"
    )
    print(f"{'loss':<13} {'model':<{width}} " + " ".join(f"{name:>12}" for name in executors))
    worst = 0.0
    for loss in [name for name in LOSSES.names() if not LOSSES.get(name).compares]:
        for model_name in MODELS:
            found = [largest_deviation(loss, model_name, executor, device) for executor in executors]
            worst = max(worst, *found)
            print(
                f"{loss:<13} {model_name:<{width}} " + " ".join(f"{value:12.1e}" for value in found),
                flush=True,
            )
    print(f"largest {worst:.1e}, limit {LIMIT:g}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
