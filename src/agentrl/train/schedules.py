"""Learning-rate schedules: transformers' curves behind one linear warm-up."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from agentrl.config.schema import OptimConfig
from agentrl.errors import ConfigError

Factor = Callable[[int], float]

_ENDLESS = frozenset({"constant", "constant_with_warmup", "inverse_sqrt"})
_DECAY_SHARE = 0.1
"""Share of the steps that ``warmup_stable_decay`` falls over unless it is told."""


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: int | None
) -> LambdaLR:
    """Linear warm-up, whose first step learns already, then ``--lr_scheduler_type`` up to ``total_steps``.

    The curve is the one that ``transformers.get_scheduler`` draws over the steps after warm-up, with
    ``--lr_scheduler_kwargs``. Raises ConfigError for a curve whose end is unknown, and for wrong arguments.
    """
    if config.lr_scheduler_type not in _ENDLESS and total_steps is None:
        raise ConfigError(
            f"--lr_scheduler_type {config.lr_scheduler_type} has no end to fall to", hint="give --max_steps"
        )
    warmup = _warmup_steps(config, total_steps)
    steps = None if total_steps is None else max(1, total_steps - warmup)
    curve = _curve(config, warmup, steps)
    end = math.inf if steps is None or config.lr_scheduler_type in _ENDLESS else steps

    def factor(step: int) -> float:
        return (step + 1) / (warmup + 1) if step < warmup else curve(int(min(step - warmup, end)))

    return LambdaLR(optimizer, factor)


def _warmup_steps(config: OptimConfig, total_steps: int | None) -> int:
    if config.warmup_ratio == 0:
        return config.warmup_steps
    if total_steps is None:
        raise ConfigError(
            f"--warmup_ratio {config.warmup_ratio} is a share of a number of steps that is unknown",
            hint="give --max_steps, or --warmup_steps instead",
        )
    return math.ceil(config.warmup_ratio * total_steps)


def _curve(config: OptimConfig, warmup: int, steps: int | None) -> Factor:
    """Factor of the learning rate by steps since the end of warm-up; ``steps`` of them in all."""
    from transformers import get_scheduler

    kind = config.lr_scheduler_type
    given = _arguments(config.lr_scheduler_kwargs)
    defaults: dict[str, Any] = {}
    if kind == "inverse_sqrt" and warmup:
        defaults = {"timescale": warmup}
    elif kind == "warmup_stable_decay" and steps is not None:
        defaults = {"num_decay_steps": max(1, math.ceil(_DECAY_SHARE * steps))}
    stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    try:
        scheduler: Any = get_scheduler(kind, stand_in, 0, steps, scheduler_specific_kwargs=defaults | given)
        curve: Factor = scheduler.lr_lambdas[0]
        curve(0)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"--lr_scheduler_type {kind} with --lr_scheduler_kwargs {config.lr_scheduler_kwargs}: {error}",
            hint="give the arguments of that schedule in transformers, such as"
            " '{\"min_lr_rate\": 0.1}' for cosine_with_min_lr",
        ) from error
    return curve


def _arguments(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--lr_scheduler_kwargs is {text!r}: {error}", hint="give JSON, or {}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--lr_scheduler_kwargs is {text!r}", hint="give a JSON object, or {}")
    return content
