"""Turn hidden states into values: the linear head, and the registry of others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from agentrl.base.registry import Registry, refuse_bare
from agentrl.base.user_code import describe
from agentrl.errors import ConfigError

MakeHead = Callable[[int], nn.Module]
"""Returns a module that turns hidden states, float32[T, H], into values, [T] or [T, 1]; it gets H."""

VALUE_HEADS: Registry[MakeHead] = Registry("value head", group="agentrl.value_heads", flag="--critic_head")


def value_head(*names: str) -> Callable[[MakeHead], MakeHead]:
    """Register a function ``(hidden size) -> torch.nn.Module`` under ``names``.

    The module gets float32[T, hidden size], a row before each trained token, and returns T values.
    """
    refuse_bare(names, "value_head")
    return VALUE_HEADS.register(*names)


@value_head("linear")
def linear(hidden_size: int) -> nn.Module:
    """Return a linear layer whose values begin as 0: the first advantages are the returns."""
    layer = nn.Linear(hidden_size, 1, dtype=torch.float32)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def build_head(name: str, hidden_size: int, device: torch.device, seed: int) -> nn.Module:
    """Return the head ``name`` in float32, the same on every rank. Raises ConfigError for one that fails.

    Other random numbers of the run do not depend on it.
    """
    make = VALUE_HEADS.get(name)

    def checked() -> nn.Module:
        module = make(hidden_size)
        if not isinstance(module, nn.Module):
            raise TypeError(f"it returned {describe(module)}, not a torch.nn.Module")
        found: Tensor = module.float()(torch.zeros(2, hidden_size))
        if found.numel() != 2:
            raise ValueError(f"it returned a tensor of shape {list(found.shape)} for 2 hidden states")
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError("it has nothing to train")
        kept = [name for name, item in module.named_parameters() if not item.requires_grad]
        if kept := [*kept, *dict(module.named_buffers())]:
            # A checkpoint has what is trained, and buffers would differ between ranks.
            raise ValueError(f"{kept[0]} is not trained, and no checkpoint would hold it")
        return module

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return checked().to(device)
        # Catch all: it is a user's code, which may raise anything.
        except Exception as error:
            raise ConfigError(
                f"the value head {name} cannot be used: {describe(error)}",
                hint="give a function (hidden size) -> module, as in docs/your_own/critic.md",
            ) from error
