"""AdamW with its decay groups, and which parameters it trains."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from agentrl.config.schema import MemoryConfig, OptimConfig
from agentrl.errors import ConfigError
from agentrl.train.memory import OffloadedAdamW

logger = logging.getLogger(__name__)


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
            raise ConfigError(f"--optim_args has {item!r}", hint="write beta1=0.9,beta2=0.999,eps=1e-8")
        try:
            values[name] = float(value)
        except ValueError as error:
            raise ConfigError(f"--optim_args: {name} is {value!r}", hint="give a number") from error
    arguments = AdamArguments(**values)
    for name in ("beta1", "beta2"):
        if not 0.0 <= getattr(arguments, name) < 1.0:
            raise ConfigError(f"--optim_args: {name} is {getattr(arguments, name)}", hint="0 ≤ beta < 1")
    if not 0.0 < arguments.eps < math.inf:
        raise ConfigError(f"--optim_args: eps is {arguments.eps}", hint="give a small number above 0")
    return arguments


def build_optimizer(
    model: nn.Module, config: OptimConfig, memory: MemoryConfig | None = None
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; those of fewer than two dimensions are never decayed."""
    memory = memory or MemoryConfig()
    arguments = parse_optim_args(config.optim_args)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": _of_rank(trainable, matrices=True), "weight_decay": config.weight_decay},
        {"params": _of_rank(trainable, matrices=False), "weight_decay": 0.0},
    ]
    is_sharded = any(isinstance(parameter, DTensor) for parameter in trainable)
    kind = OffloadedAdamW if memory.optimizer_offload else torch.optim.AdamW
    return kind(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(arguments.beta1, arguments.beta2),
        eps=arguments.eps,
        fused=True if memory.fused_adamw and not is_sharded else None,
    )


def freeze(model: nn.Module, pattern: str | None) -> int:
    """Stop training the parameters in whose names ``pattern`` is found; returns how many numbers they hold.

    A tied parameter is found by either of its names. Raises ConfigError for a pattern that is no regular
    expression, that finds nothing, or that leaves nothing to train.
    """
    if pattern is None:
        return 0
    try:
        finds = re.compile(pattern).search
    except re.error as error:
        raise ConfigError(
            f"--freeze {pattern!r} is no regular expression: {error}", hint="mend it"
        ) from error
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found = {name: model.get_parameter(name) for name in names if finds(name)}
    if not found:
        raise ConfigError(
            f"--freeze {pattern!r} finds none of the model's {len(names)} parameters",
            hint=f"match names such as {names[0]} and {names[-1]}",
        )
    for parameter in found.values():
        parameter.requires_grad = False
    left = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if left == 0:
        raise ConfigError(f"--freeze {pattern!r} leaves nothing to train", hint="match fewer parameters")
    frozen = sum(parameter.numel() for parameter in {id(p): p for p in found.values()}.values())
    logger.info(
        "%d parameters (%d numbers) are frozen by %r; %d numbers are trained",
        len(found),
        frozen,
        pattern,
        left,
    )
    return frozen


def _of_rank(parameters: Iterable[nn.Parameter], *, matrices: bool) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if (parameter.dim() >= 2) is matrices]
