"""AdamW with its decay groups, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from agentrl.config.schema import OptimConfig
from agentrl.errors import ConfigError


@dataclass(frozen=True)
class AdamArguments:
    """What ``--optim_args`` may set."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


def parse_optim_args(text: str) -> AdamArguments:
    """``beta1=0.9,beta2=0.98,eps=1e-8`` → AdamArguments; raises ConfigError on a wrong name or value."""
    values: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = (part.strip() for part in item.partition("="))
        if not separator or name not in AdamArguments.__dataclass_fields__:
            raise ConfigError(f"--optim_args has {item!r}", cure="write beta1=0.9,beta2=0.999,eps=1e-8")
        try:
            values[name] = float(value)
        except ValueError as error:
            raise ConfigError(f"--optim_args: {name} is {value!r}", cure="give a number") from error
    arguments = AdamArguments(**values)
    for name in ("beta1", "beta2"):
        if not 0.0 <= getattr(arguments, name) < 1.0:
            raise ConfigError(f"--optim_args: {name} is {getattr(arguments, name)}", cure="0 ≤ beta < 1")
    if not 0.0 < arguments.eps < math.inf:
        raise ConfigError(f"--optim_args: eps is {arguments.eps}", cure="give a small number above 0")
    return arguments


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; those of fewer than two dimensions are never decayed."""
    arguments = parse_optim_args(config.optim_args)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": _of_rank(trainable, matrices=True), "weight_decay": config.weight_decay},
        {"params": _of_rank(trainable, matrices=False), "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(arguments.beta1, arguments.beta2),
        eps=arguments.eps,
    )


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: int | None
) -> LambdaLR:
    """Linear warm-up, then constant, or falling to 0 at ``total_steps``; ConfigError if that is unknown."""
    if config.lr_scheduler_type != "constant" and total_steps is None:
        raise ConfigError(
            f"--lr_scheduler_type {config.lr_scheduler_type} has no end to fall to", cure="give --max_steps"
        )
    return LambdaLR(optimizer, _factor(config.lr_scheduler_type, config.warmup_steps, total_steps or 0))


def _factor(kind: str, warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        if kind == "constant":
            return 1.0
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return 1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor


def _of_rank(parameters: Iterable[nn.Parameter], *, matrices: bool) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if (parameter.dim() >= 2) is matrices]
