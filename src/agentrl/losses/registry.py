"""Declare losses with ``@loss`` and find them by name; import no torch itself."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from agentrl.config.loss import LossConfig
from agentrl.errors import ConfigError
from agentrl.registry import Registry

if TYPE_CHECKING:
    from agentrl.losses.batch import TokenBatch, TokenLosses

_FLAGS = frozenset(field.name for field in dataclasses.fields(LossConfig))


@dataclass(frozen=True, kw_only=True, eq=False)
class Loss:
    """A loss function with what it declares about itself."""

    function: Callable[..., TokenLosses]
    defaults: Mapping[str, Any]
    """Flag → the value that it has for this loss when it is not given."""
    clips: bool = True
    """False if only the bounds on staleness read ``epsilon`` and ``epsilon_higher``."""
    from_policy: bool = True
    """True if a policy sampled the tokens: bounds, corrections and a KL apply."""
    contains_weight: bool = False
    """True if w = π_old/μ is a factor of the loss."""
    reads_trajectory: bool = False
    """True if a token's loss depends on the other tokens of its trajectory."""
    compares_behavior: bool = False
    """True if the loss compares πθ with μ and reads no π_old."""

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The keyword-only parameters of the function, by name."""
        found = inspect.signature(self.function).parameters.values()
        return {item.name: item for item in found if item.kind is inspect.Parameter.KEYWORD_ONLY}

    @cached_property
    def flags(self) -> frozenset[str]:
        """The parameters that are flags."""
        return _FLAGS & self.parameters.keys()

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the parameters that are not flags: ``arguments``, else their defaults.

        Raises ConfigError for an argument that the function does not have, one that is a flag, one of another
        type than its default, and for a parameter without a value.
        """
        own = {name: item for name, item in self.parameters.items() if name not in _FLAGS}
        for name, value in arguments.items():
            if name in _FLAGS:
                raise ConfigError(f"--loss_args has {name!r}, which is a flag", hint=f"give it as --{name}")
            if name not in own:
                known = f"its parameters are {', '.join(own)}" if own else "it has no parameters"
                raise ConfigError(f"--loss_args has {name!r}, which the loss does not take", hint=known)
            _check_type(name, value, own[name].default)
        missing = [n for n, item in own.items() if item.default is item.empty and n not in arguments]
        if missing:
            raise ConfigError(
                f"the loss needs a value of {', '.join(missing)}",
                hint=f"--loss_args '{{\"{missing[0]}\": …}}'",
            )
        return {name: arguments.get(name, item.default) for name, item in own.items()}

    def __call__(self, batch: TokenBatch, settings: LossConfig) -> TokenLosses:
        """Return the loss of each token of ``batch``; ``settings`` are the run's LossSettings."""
        flags = {name: getattr(settings, name) for name in self.flags}
        return self.function(batch, settings, **flags, **settings.arguments)


def loss(
    *names: str,
    token_level_loss: bool = False,
    skip_length_normalization: bool = False,
    strict_in_bound: bool = False,
    importance_weight_cap_ratio: float = math.inf,
    epsilon: float = 0.2,
    epsilon_higher: float = 0.0,
    clips: bool = True,
    from_policy: bool = True,
    contains_weight: bool = False,
    reads_trajectory: bool = False,
    compares_behavior: bool = False,
) -> Callable[[Callable[..., TokenLosses]], Loss]:
    """Return a decorator that turns a function into a Loss and registers it under ``names``.

    The function takes a TokenBatch and the LossSettings and returns TokenLosses. Its keyword-only parameters
    are the loss's own: one with the name of a flag, such as ``dual_clip``, gets the value of the flag, any
    other its value in ``--loss_args``. Without ``names`` the loss is found as ``module:name`` alone.

    ``token_level_loss`` and ``skip_length_normalization`` are the reduction, ``strict_in_bound``,
    ``importance_weight_cap_ratio``, ``epsilon`` and ``epsilon_higher`` the bounds that the loss has where
    the flags of these names are not given; ``dual_clip``, if it is a parameter, is then 3 (verl's
    ``clip_ratio_c``). The last five arguments are explained at ``Loss``.
    """
    defaults = {
        "token_level_loss": token_level_loss,
        "skip_length_normalization": skip_length_normalization,
        "strict_in_bound": strict_in_bound,
        "importance_weight_cap_ratio": importance_weight_cap_ratio,
        "epsilon": epsilon,
        "epsilon_higher": epsilon_higher,
    }

    def decorate(function: Callable[..., TokenLosses]) -> Loss:
        has_dual_clip = "dual_clip" in inspect.signature(function).parameters
        declared = Loss(
            function=function,
            defaults=defaults | ({"dual_clip": 3.0} if has_dual_clip else {}),
            clips=clips,
            from_policy=from_policy,
            contains_weight=contains_weight,
            reads_trajectory=reads_trajectory,
            compares_behavior=compares_behavior,
        )
        LOSSES.add(declared, *names)
        return declared

    return decorate


def _as_loss(found: Any) -> Loss:
    """Return a Loss as it is, and a plain function as a loss with the usual defaults."""
    if isinstance(found, Loss):
        return found
    if not inspect.isfunction(found):
        raise TypeError(f"it is of type {type(found).__name__}, not a function")
    return loss()(found)


def _check_type(name: str, value: Any, default: Any) -> None:
    """Raise ConfigError for a value of another type than the default's; an int is a float too."""
    if default is None or default is inspect.Parameter.empty:
        return
    expected = (int, float) if isinstance(default, float) else type(default)
    if not isinstance(value, expected) or (isinstance(value, bool) and not isinstance(default, bool)):
        raise ConfigError(
            f"--loss_args has {name!r} = {value!r}, of type {type(value).__name__}",
            hint=f"give a value of type {type(default).__name__}, such as the default {default!r}",
        )


LOSSES = Registry[Loss](
    "loss",
    group="agentrl.losses",
    built_in=[
        "agentrl.losses.grpo", "agentrl.losses.gspo", "agentrl.losses.cispo", "agentrl.losses.minirl",
        "agentrl.losses.sapo", "agentrl.losses.dppo", "agentrl.losses.cross_entropy",
    ],
    convert=_as_loss,
    hints={
        "dapo": "DAPO is GRPO with --token_level_loss true --epsilon_higher 0.08; docs/losses.md has all of"
        " its flags",
        "drgrpo": "Dr. GRPO is GRPO with --loss_length_divisor and --advantage dr_grpo (docs/losses.md)",
        "reinforce": "REINFORCE++ is GRPO with --token_level_loss true --advantage reward"
        " --advantage_whitening batch (docs/losses.md)",
        "ppo": "GRPO is PPO's clipped surrogate with the group's mean in place of a critic",
        "sft": "CrossEntropy; `agentrl sft` trains conversations",
    },
)  # fmt: skip
"""Every loss, by its ``--loss_calculater`` name."""
