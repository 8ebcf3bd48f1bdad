"""Declare losses with ``@loss`` and find them by name; import no torch itself."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from agentrl.registry import Registry

if TYPE_CHECKING:
    from agentrl.losses.batch import TokenBatch, TokenLosses

_BUILT_IN = "agentrl.losses.built_in"


@dataclass(frozen=True, kw_only=True, eq=False)
class Loss:
    """A loss function with what it declares about itself."""

    function: Callable[..., TokenLosses]
    own_defaults: Mapping[str, Any]
    """Flag → the value that it has for this loss when it is not given, as ``@loss`` says."""
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
    check: Callable[[Any], None] = lambda _: None
    """Raises ConfigError for LossSettings with which the loss does not work."""

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The keyword-only parameters of the function, by name."""
        found = inspect.signature(self.function).parameters.values()
        return {item.name: item for item in found if item.kind is inspect.Parameter.KEYWORD_ONLY}

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Flag → the value that it has for this loss when it is not given."""
        declared = {name: flag.default for name, flag in loss_flags().items() if name in self.parameters}
        return {name: value for name, value in declared.items() if value is not None} | dict(
            self.own_defaults
        )

    def __call__(self, batch: TokenBatch, settings: Any) -> TokenLosses:
        """Return the loss of each token of ``batch``; ``settings`` are the run's LossSettings."""
        flags = {
            name: getattr(settings, name) for name in settings.__dataclass_fields__.keys() & self.parameters
        }
        return self.function(batch, settings, **flags, **settings.arguments)


@dataclass(frozen=True, kw_only=True)
class LossFlag:
    """A flag that a built-in loss declares."""

    type: Any
    field: dataclasses.Field[Any]
    default: Any
    """Its value for the losses that read it, where it is not given; None: that of the field."""


def built_in_losses() -> dict[str, Loss]:
    """Return the losses of ``losses.built_in`` by name, sorted."""
    known = sorted(LOSSES.known().items())
    return {name: item for name, item in known if item.function.__module__.startswith(_BUILT_IN)}


@cache
def loss_flags() -> dict[str, LossFlag]:
    """Return the flags that built-in losses declare, by name; their help names the losses that read them.

    Other losses may read them too, by a parameter of the same name.
    """
    losses = built_in_losses()
    found: dict[str, LossFlag] = {}
    for item in losses.values():
        for name, parameter in item.parameters.items():
            if not str(parameter.annotation).startswith("Annotated["):
                continue
            if name in found:
                raise ValueError(f"two losses declare --{name}; the second one's parameter needs no flag()")
            # Only this annotation: the others name types that are imported for type checkers alone.
            alone = SimpleNamespace(__annotations__={name: parameter.annotation})
            hint = get_type_hints(alone, item.function.__globals__, include_extras=True)[name]
            kind, field = get_args(hint)
            readers = ", ".join(other for other, reader in losses.items() if name in reader.parameters)
            described = dataclasses.field(
                default=field.default,
                metadata={**field.metadata, "help": f"{readers}: {field.metadata['help']}"},
            )
            default = None if parameter.default is parameter.empty else parameter.default
            found[name] = LossFlag(
                type=kind | None if field.default is None else kind, field=described, default=default
            )
    return found


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
    check: Callable[[Any], None] = lambda _: None,
) -> Callable[[Callable[..., TokenLosses]], Loss]:
    """Return a decorator that turns a function into a Loss and registers it under ``names``.

    The function takes a TokenBatch and the LossSettings and returns TokenLosses. Its keyword-only parameters
    are the loss's own: one with the name of a flag, such as ``dual_clip``, gets the value of the flag, any
    other its value in ``--loss_args``. Without ``names`` the loss is found as ``module:name`` alone.

    In ``losses.built_in`` a parameter annotated ``Annotated[type, flag(...)]`` declares a flag of its name;
    its default, if it has one, is the flag's for every loss that reads it.

    ``token_level_loss`` and ``skip_length_normalization`` are the reduction, ``strict_in_bound``,
    ``importance_weight_cap_ratio``, ``epsilon`` and ``epsilon_higher`` the bounds that the loss has where
    the flags of these names are not given. The other arguments are explained at ``Loss``.
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
        declared = Loss(
            function=function,
            own_defaults=defaults,
            clips=clips,
            from_policy=from_policy,
            contains_weight=contains_weight,
            reads_trajectory=reads_trajectory,
            compares_behavior=compares_behavior,
            check=check,
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


LOSSES = Registry[Loss](
    "loss",
    group="agentrl.losses",
    built_in=[_BUILT_IN],
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
)
"""Every loss, by its ``--loss_calculater`` name."""
