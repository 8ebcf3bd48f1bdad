"""What a loss gets and returns, and how it is declared by ``@loss`` and found; import no torch itself."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

from agentrl.base.registry import Registry, refuse_bare

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from agentrl.documents.training import DBRecordData


@dataclass(frozen=True, slots=True)
class TrajectoryMeans:
    """Means over whole trajectories, for micro-batches that hold only parts of some."""

    log_ratio: Tensor
    """float32[R], of log πθ − log π_old."""
    log_weight: Tensor
    """float32[R], of log π_old − log μ."""
    divergence: Tensor
    """float32[R], of ``losses.compute.divergence``, the k3 estimate of the KL from μ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTrajectories:
    """The N whole trajectories of an update, over all ranks, for losses that compare them; all is data."""

    number: Tensor
    """int64[R], the place of each row of the micro-batch in [0, N)."""
    score: Tensor
    """float32[N]."""
    group: Tensor
    """int64[N], the same for the trajectories of one group."""
    log_ratio: Tensor
    """float32[N], Σ over the trainable tokens of a trajectory of log πθ/π_ref."""


LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this before ``exp``."""
TEACHER = "teacher"  # the column with a teacher's logprobs
# Type it Any: the fields are tensors to every reader, as __post_init__ fills them in.
_NONE: Any = None
_INFINITY_BITS = 0x7F800000
"""float32's infinity, as an integer."""
_BUILT_IN = "agentrl.losses.built_in"


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of a log-ratio in float32, clamped to ±20; the gradient is 0 where it is clamped."""
    return log_ratio.float().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def k3(log_ratio: Tensor | NDArray[Any]) -> Tensor:
    """Return eˣ − 1 − x of a log-ratio x clamped to ±20, float64: 0 or more, and exact near 0.

    Float32 has none of it left below |x| = 1e-4: eˣ − 1 − x is rounding noise of either sign there, and so is
    expm1(x) − x. Float64 keeps five digits of that difference down to |x| = 1e-10.
    """
    # Import it here: samplers and --help read the flags of losses without torch.
    import torch

    bounded = torch.as_tensor(log_ratio).double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (bounded.expm1() - bounded).clamp(min=0.0)


def largest_within(values: Sequence[Tensor], reduce: Callable[[Tensor], Tensor] = lambda sums: sums) -> float:
    """Return the largest c for which the mean of the values in (0, c] is at most 1; inf for all.

    ``values`` are float32[T] ≥ 0 on one device; ``reduce`` adds sums up over ranks, which all get the same
    c. Equal values are on the same side of it. NaN counts as no value.
    """
    import torch

    every = torch.cat([each.detach().float().flatten() for each in values])

    def fits(bits: int) -> bool:
        limit = torch.tensor(bits, dtype=torch.int32).view(torch.float32).to(every.device)
        here = (every > 0) & (every <= limit)
        sums = torch.stack([torch.where(here, every, 0.0).double().sum(), here.double().sum()])
        total, count = reduce(sums)
        return bool(total <= count)

    # Search the bits of float32, which are ordered as positive numbers are: 31 sums find c exactly.
    low, high = 0, _INFINITY_BITS
    if fits(high):
        return math.inf
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return float(torch.tensor(low, dtype=torch.int32).view(torch.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The trainable tokens of one micro-batch: T tokens of R trajectories.

    ``logprobs`` carries the gradient, and ``entropy`` may carry one; every other tensor is data. Trajectories
    are whole unless ``lengths`` and ``means`` are given.
    """

    logprobs: Tensor
    """float32[T], log πθ."""
    old_logprobs: Tensor
    """float32[T], log π_old."""
    behavior_logprobs: Tensor
    """float32[T], log μ as the engine reported it."""
    advantages: Tensor
    """float32[T]."""
    row: Tensor
    """int64[T], trajectory index in [0, R)."""
    version: Tensor
    """int64[T], the policy version that sampled the token."""
    age: Tensor
    """int64[T], optimizer steps between the weights that sampled the token and the current ones, ≥ 0."""
    mask: Tensor
    """bool[T], the loss mask m: a False token counts in no numerator and no denominator."""
    trajectories: int
    """R."""
    reference_logprobs: Tensor | None = None
    """float32[T], log π_ref of the reference model."""
    lengths: Tensor | None = None
    """int64[R], tokens in the loss mask of each whole trajectory; None: count those of the micro-batch."""
    means: TrajectoryMeans | None = None
    """None: compute them from the tokens of the micro-batch."""
    compared: ComparedTrajectories | None = None
    """Given if the loss ``compares``."""
    mean_limit: float | None = None
    """``largest_within`` of the update's tokens, for a loss with ``bounds_mean_of``; None: they are here."""
    entropy: Tensor | None = None
    """float32[T], entropy in nats of each token's distribution; with gradient if ``entropy_coef`` is set."""
    columns: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """{column: float32[T]} of ``--columns``; NaN: the token has no value."""

    @property
    def log_ratio(self) -> Tensor:
        """Return log r = log πθ − log π_old, float32[T], with gradient."""
        return self.logprobs.float() - self.old_logprobs.float()

    @property
    def log_weight(self) -> Tensor:
        """Return log w = log π_old − log μ, float32[T]."""
        return self.old_logprobs.float() - self.behavior_logprobs.float()

    @property
    def log_rho(self) -> Tensor:
        """Return log ρ = log πθ − log μ, float32[T], detached."""
        return self.logprobs.detach().float() - self.behavior_logprobs.float()

    @property
    def is_extreme(self) -> Tensor:
        """Return bool[T], the tokens with |log ρ| above ``LOG_RATIO_LIMIT``: no update moves that far."""
        return self.log_rho.abs() > LOG_RATIO_LIMIT

    @property
    def mean_log_ratio(self) -> Tensor:
        """Return the mean of log r over each token's trajectory, float32[T], detached."""
        if self.means is not None:
            return self.means.log_ratio[self.row]
        return self.trajectory_mean(self.log_ratio.detach())

    @property
    def mean_log_weight(self) -> Tensor:
        """Return the mean of log w over each token's trajectory, float32[T]."""
        if self.means is not None:
            return self.means.log_weight[self.row]
        return self.trajectory_mean(self.log_weight)

    @property
    def mean_log_rho(self) -> Tensor:
        """Return the mean of log ρ over each token's trajectory, float32[T], detached."""
        return self.mean_log_ratio + self.mean_log_weight

    @property
    def trajectory_tokens(self) -> Tensor:
        """Return the number of tokens in the loss mask of each token's trajectory, float32[T]."""
        if self.lengths is not None:
            return self.lengths.float()[self.row]
        return self.row[self.mask].bincount(minlength=self.trajectories).float()[self.row]

    def trajectory_mean(self, values: Tensor) -> Tensor:
        """Return the mean of ``values[T]`` over each token's trajectory within the micro-batch, [T].

        Tokens outside ``mask`` do not count. A trajectory without a token in it has mean 0. Sums are float64,
        because thousands of log-ratios of either sign add up to much less than their sizes.
        """
        weights = self.mask.double()
        zeros = weights.new_zeros(self.trajectories)
        totals = zeros.index_add(0, self.row, values.double() * weights)
        counts = zeros.index_add(0, self.row, weights)
        return (totals / counts.clamp(min=1.0))[self.row].to(values.dtype)

    def limit_of_mean(self, values: Tensor) -> float:
        """Return the largest of the update's values up to which their mean is at most 1; inf: all of them.

        ``values`` are those of the micro-batch, float32[T], and the update's if it has no other one.
        """
        return largest_within([values]) if self.mean_limit is None else self.mean_limit

    def of_trajectories(self, value: Tensor, slope: Tensor) -> Tensor:
        """Return the token losses, float32[T], of losses of whole trajectories.

        Those of trajectory i of ``compared`` add up to ``value[i]``, with the gradient
        ``slope[i]``·∇ Σ log πθ: the derivative of its loss by the sum of its logprobs.
        """
        if self.compared is None:
            raise ValueError("the batch has no compared trajectories")
        number = self.compared.number[self.row]
        # Subtract it from itself: the value is 0, and the gradient that of the logprobs.
        change = self.logprobs.float() - self.logprobs.detach().float()
        return value[number] / self.trajectory_tokens + slope[number] * change


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """Per-token losses before any reduction, and what the metrics need. Only ``losses`` must be given."""

    losses: Tensor
    """float32[T] with gradient; 0 where ``masked``."""
    ratio: Tensor = _NONE
    """float32[T], detached: the ratio that the loss clips (r; for GSPO the trajectory's s). Default: 1."""
    clipped: Tensor = _NONE
    """bool[T]: clipping removed or bounded the token's gradient. Default: no token."""
    masked: Tensor = _NONE
    """bool[T]: a bound or a correction removed the token from the numerator. Default: no token."""
    capped: Tensor | None = None
    """bool[T]: a correction capped the token's weight; None: no correction caps."""

    def __post_init__(self) -> None:
        import torch

        losses = self.losses.detach()
        if self.ratio is None:
            object.__setattr__(self, "ratio", torch.ones_like(losses))
        for name in ("clipped", "masked"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, torch.zeros_like(losses, dtype=torch.bool))


@dataclass(frozen=True, kw_only=True, eq=False)
class FlagDefaults:
    """The values that flags have for a loss where they are not given."""

    token_level_loss: bool = False
    skip_length_normalization: bool = False
    strict_in_bound: bool = False
    importance_weight_cap_ratio: float = math.inf
    epsilon: float = 0.2
    epsilon_higher: float = 0.0
    distill_coef: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Loss(FlagDefaults):
    """A loss function with what ``@loss`` declares about it."""

    function: Callable[..., TokenLosses]
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
    follows_advantage: bool = False
    """True if the loss and the gradient of a token are 0 where its advantage is 0."""
    ignores_score: bool = False
    """True if a teacher's judgement replaces the advantage of the score (``distill_coef``)."""
    compares: bool = False
    """True if a trajectory's loss depends on scores and on a reference model (``TokenBatch.compared``)."""
    bounds_mean_of: Callable[[TokenBatch, Any], Tensor] | None = None
    """Returns values of tokens, float32[T] ≥ 0, whose mean over an update the loss bounds by 1.

    A 0 is not counted. It takes the LossSettings too, and ``TokenBatch.limit_of_mean`` the values. An update
    of several micro-batches makes one more forward for it."""
    choose: Callable[[Sequence[DBRecordData]], Sequence[DBRecordData]] = lambda data: data
    """Returns the data of a step that the loss trains, in their order."""
    check: Callable[[Any], None] = lambda _: None
    """Raises ConfigError for LossSettings with which the loss does not work."""

    @property
    def reads_advantage(self) -> bool:
        """Whether the advantage of the score is a part of the loss."""
        return self.from_policy and not self.ignores_score

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The keyword-only parameters of the function, by name."""
        found = inspect.signature(self.function).parameters.values()
        return {item.name: item for item in found if item.kind is inspect.Parameter.KEYWORD_ONLY}

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Flag → the value that it has for this loss when it is not given."""
        declared = {name: flag.default for name, flag in loss_flags().items() if name in self.parameters}
        own = {item.name: getattr(self, item.name) for item in dataclasses.fields(FlagDefaults)}
        return {name: value for name, value in declared.items() if value is not None} | own

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
    # Import no entry point: this runs while the flags are defined, which a user's package may import too.
    known = sorted(LOSSES.registered().items())
    # Go by the module: losses of users are registered beside them, and may not add flags of the command.
    return {name: item for name, item in known if item.function.__module__.startswith(_BUILT_IN)}


@cache
def loss_flags() -> dict[str, LossFlag]:
    """Return the flags that built-in losses declare, by name; their help names the losses that read them.

    Other losses may read them too, by a parameter of the same name.
    """
    losses = built_in_losses()
    found: dict[str, LossFlag] = {}
    for item in losses.values():
        # Name it: a module imports the class for type checkers alone, as settings import the losses.
        hints = get_type_hints(item.function, localns={"LossSettings": Any}, include_extras=True)
        for name, hint in hints.items():
            if get_origin(hint) is not Annotated:
                continue
            if name in found:
                raise ValueError(f"two losses declare --{name}; the second one's parameter needs no flag()")
            kind, field = get_args(hint)
            readers = ", ".join(other for other, reader in losses.items() if name in reader.parameters)
            described = dataclasses.field(
                default=field.default,
                metadata={**field.metadata, "help": f"{readers}: {field.metadata['help']}"},
            )
            default = item.parameters[name].default
            found[name] = LossFlag(
                type=kind | None if field.default is None else kind,
                field=described,
                default=None if default is inspect.Parameter.empty else default,
            )
    return found


def loss(*names: str, **declared: Any) -> Callable[[Callable[..., TokenLosses]], Loss]:
    """Return a decorator that turns a function into a Loss and registers it under ``names``.

    The function takes a TokenBatch and the LossSettings and returns TokenLosses. Its keyword-only parameters
    are the loss's own: one with the name of a flag, such as ``dual_clip``, gets the value of the flag, any
    other its value in ``--loss_args``. Without ``names`` the loss is found as ``module:name`` alone.

    ``declared`` are fields of ``Loss`` and of ``FlagDefaults``, such as ``token_level_loss=True``.

    In ``losses.built_in`` a parameter annotated ``Annotated[type, flag(...)]`` declares a flag of its name;
    its default, if it has one, is the flag's for every loss that reads it.
    """
    refuse_bare(names, "loss")

    def decorate(function: Callable[..., TokenLosses]) -> Loss:
        made = Loss(function=function, **declared)
        LOSSES.add(made, *names)
        return made

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
        "ppo": "GRPO is PPO's clipped surrogate; with --recipe ppo a critic gives its advantages",
        "mispo": "MIS-PO is CISPO with the weight 1 and two masks (docs/losses.md)",
        "kpop": "GRPO or IPO with --importance_correction kpop",
        "gkd": "OPD: on-policy distillation (docs/distillation.md)",
        "sft": "CrossEntropy; `agentrl sft` trains conversations",
    },
)
"""Every loss, by its ``--loss_calculater`` name."""
