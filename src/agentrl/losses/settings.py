"""The settings of a run's loss: its flags with the loss's own defaults filled in, and checked together.

Flags that the loss alone decides about are refused by ``LossSettings``; flags of a run that change nothing,
given its loss and its other flags, by ``IDLE_RULES``.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.config.flags import require
from agentrl.config.load import Configs
from agentrl.config.schema import GROUPS, CriticConfig, EngineConfig, GroupConfig, OptimConfig, TrainConfig
from agentrl.config.training import CAPS, LOSS_PARAMETERS, WEIGHTS, LossConfig
from agentrl.errors import ConfigError
from agentrl.losses.loss import LOSSES, TEACHER, Loss

FOR_QUANTIZED = {"old_logprobs": "recompute", "importance_correction": "tis:2"}
"""Flags for rollouts with quantized weights, whose μ differs from the trainer's policy at any age."""


@dataclass(frozen=True, kw_only=True)
class LossSettings(LossConfig):
    """LossConfig with every flag that is None set to the loss's own default.

    Raises ConfigError for an unknown loss, for a flag that could not act, and for corrections that do not
    compose. A flag with the loss's own default is never refused.
    """

    def __post_init__(self) -> None:
        loss = self.loss
        # Fill in first: the checks of LossConfig compare flags with each other.
        for name, value in loss.defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        super().__post_init__()
        plain = {
            name: value for name, value in _own_arguments(loss, self.arguments).items() if _is_json(value)
        }
        # Write all of them in one order: a later start compares them with what the run has stored.
        object.__setattr__(self, "loss_args", json.dumps(plain, sort_keys=True))
        _check_flags_are_read(self)
        loss.check(self)
        _check_reduction(self)
        _check_corrections(self)

    @classmethod
    def of(cls, config: LossConfig) -> LossSettings:
        """Return the settings of a run with the flags ``config``."""
        return cls(**dataclasses.asdict(config))

    @classmethod
    def of_run(cls, configs: Configs) -> LossSettings:
        """Return the settings of a run, which correct for quantized rollouts unless a correction is given.

        ``FOR_QUANTIZED`` is left out where the loss samples no policy or reads no π_old, and where a clip is
        given that would bound nothing with it.
        """
        config, training, optim = configs[LossConfig], configs[TrainConfig], configs[OptimConfig]
        settings = cls.of(config)
        is_free = not configs.given & FOR_QUANTIZED.keys()
        if configs[EngineConfig].rollout_quantization == "none" or not is_free:
            return settings
        if not settings.loss.from_policy or settings.loss.compares_behavior:
            return settings
        corrected = cls(**{**dataclasses.asdict(config), **FOR_QUANTIZED})
        # Count no more mini-batches than groups: each holds whole groups.
        updates = optim.num_epochs_per_batch * min(optim.mini_batches, training.groups_per_step)
        return settings if unclipped_flags(configs.given, corrected, updates) else corrected

    @property
    def loss(self) -> Loss:
        """The loss and what it declares."""
        return LOSSES.get(self.loss_calculater)

    @property
    def ratio_is_rho(self) -> bool:
        """Whether π_old is μ: then w = π_old/μ is 1 and r = πθ/π_old is ρ = πθ/μ."""
        return self.old_logprobs == "behavior"

    @property
    def weighs(self) -> bool:
        """Whether corrections weight the loss; otherwise they only drop tokens."""
        if self.loss.contains_weight:
            return True
        return not self.ratio_is_rho and any(found.name in WEIGHTS for found in self.corrections)

    @property
    def reads_trajectory(self) -> bool:
        """Whether a token's loss depends on its whole trajectory (``TokenBatch.means``)."""
        if not self.loss.from_policy:
            return False
        return self.loss.reads_trajectory or any(found.reads_trajectory for found in self.corrections)

    @property
    def needs_advantage(self) -> bool:
        """Whether a token has neither a loss nor a gradient where its advantage is 0."""
        return self.loss.follows_advantage and not (self.kl_coef or self.entropy_coef or self.distill_coef)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the logprobs of a reference model."""
        return self.kl_coef > 0 or self.loss.compares

    @property
    def bounds_staleness(self) -> bool:
        """Whether bounds on staleness drop tokens by ρ = πθ/μ."""
        return bool(self.strict_in_bound) or math.isfinite(self.bound_scale)

    @property
    def narrows_bounds(self) -> bool:
        """Whether ``out_of_date_decay`` narrows the bounds on staleness."""
        return self.bounds_staleness and not self.strict_in_bound

    @property
    def lower(self) -> float:
        """Lower end of the clip interval, 1 − ε."""
        return 1.0 - _number(self.epsilon)

    @property
    def upper(self) -> float:
        """Upper end of the clip interval, 1 + ε + ε_h."""
        return 1.0 + _number(self.epsilon) + _number(self.epsilon_higher)

    @property
    def lower_width(self) -> float:
        """ε, the distance from 1 to the lower end of the clip interval."""
        return _number(self.epsilon)

    @property
    def upper_width(self) -> float:
        """ε + ε_h, the distance from 1 to the upper end of the clip interval."""
        return _number(self.epsilon) + _number(self.epsilon_higher)

    @property
    def bound_scale(self) -> float:
        """Factor by which bounds on staleness are wider than the clip interval; inf: no such bounds."""
        return _number(self.importance_weight_cap_ratio)


def unclipped_flags(given: Iterable[str], settings: LossSettings, updates: int) -> list[str]:
    """Return the flags of ``given`` that bound r = πθ/π_old although r is 1 in every update of a step.

    That is so with recomputed π_old and a single update per step. Bounds on staleness act on ρ = πθ/μ, and
    read ``epsilon`` and ``epsilon_higher`` too.
    """
    if settings.old_logprobs != "recompute" or updates > 1 or not settings.loss.from_policy:
        return []
    clips = set(LOSS_PARAMETERS & settings.loss.parameters.keys())
    if not settings.bounds_staleness:
        clips |= {"epsilon", "epsilon_higher"}
    return sorted(clips.intersection(given))


def _own_arguments(loss: Loss, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the parameters that are not flags: ``arguments``, else their defaults.

    Raises ConfigError for an argument that the function does not have, one that is a flag, one of another
    type than its default, and for a parameter without a value.
    """
    flags = LossConfig.__dataclass_fields__
    own = {name: item for name, item in loss.parameters.items() if name not in flags}
    for name, value in arguments.items():
        if name in flags:
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


def _check_type(name: str, value: Any, default: Any) -> None:
    """Raise ConfigError for a value of another type than the default's; an int is a float too."""
    if default is None or default is inspect.Parameter.empty:
        return
    expected = (int, float) if isinstance(default, float) else type(default)
    # Look for bool by itself: isinstance takes True for an int.
    if not isinstance(value, expected) or (isinstance(value, bool) and not isinstance(default, bool)):
        raise ConfigError(
            f"--loss_args has {name!r} = {value!r}, of type {type(value).__name__}",
            hint=f"give a value of type {type(default).__name__}, such as the default {default!r}",
        )


def _check_flags_are_read(settings: LossSettings) -> None:
    loss, name = settings.loss, settings.loss_calculater
    for flag in sorted(LOSS_PARAMETERS - loss.parameters.keys()):
        if not _is_default(settings, flag):
            readers = [known for known, other in sorted(LOSSES.known().items()) if flag in other.parameters]
            hint = f"leave it out, or use --loss_calculater {' or '.join(readers)}"
            _require(False, settings, flag, f"{name} does not read it", hint)
    cap = "importance_weight_cap_ratio"
    _require(
        not settings.strict_in_bound or _is_default(settings, cap), settings, cap,
        "it widens the bounds only where they are not strict", "add --strict_in_bound false, or leave it out",
    )  # fmt: skip
    for flag in ("epsilon", "epsilon_higher"):
        _require(
            loss.clips or settings.bounds_staleness or _is_default(settings, flag), settings, flag,
            f"{name} does not clip", "leave it out, or bound staleness with --importance_weight_cap_ratio",
        )  # fmt: skip
    _require(
        not loss.compares_behavior or settings.ratio_is_rho, settings, "old_logprobs",
        f"{name} compares πθ with μ and reads no π_old", "leave it out",
    )  # fmt: skip
    _require(
        bool(settings.kl_coef) or _is_default(settings, "kl_estimator"), settings, "kl_estimator",
        "--kl_coef is 0, so that there is no KL to estimate", "add --kl_coef, e.g. 0.001, or leave it out",
    )  # fmt: skip
    if loss.from_policy:
        return
    bounds = ("epsilon", "epsilon_higher", cap, "strict_in_bound")
    others = ("importance_correction", "old_logprobs", "kl_coef", "entropy_coef", "distill_coef")
    for flag in (*bounds, *others):
        _require(
            _is_default(settings, flag),
            settings,
            flag,
            f"{name} does not correct for the policy that sampled",
            "leave it out",
        )


def _check_reduction(settings: LossSettings) -> None:
    flag = "skip_length_normalization"
    _require(
        not (settings.token_level_loss and settings.skip_length_normalization) or _is_default(settings, flag),
        settings, flag, "a mean over tokens has no trajectory lengths", "add --token_level_loss false",
    )  # fmt: skip
    _require(
        settings.loss_length_divisor is None
        or bool(settings.skip_length_normalization) or _is_default(settings, flag),
        settings, flag, "--loss_length_divisor divides a trajectory's sum, not its mean", "leave it out",
    )  # fmt: skip


def _check_corrections(settings: LossSettings) -> None:
    flag = "importance_correction"
    names = {correction.name for correction in settings.corrections}
    of_trajectory = names & {"seq_tis", "seq_icepop"}
    _require(
        not of_trajectory or not names & set(WEIGHTS) - of_trajectory, settings, flag,
        "it weighs by the tokens' ratio and by the trajectory's, which counts the ratio twice",
        "keep one of them; token_mask:low:high drops what icepop drops and weighs nothing",
    )  # fmt: skip
    twice = sorted(names & set(CAPS))
    _require(
        not twice or settings.weighs, settings, flag,
        f"with --old_logprobs behavior the ratio of {settings.loss_calculater} is πθ/μ already, and"
        f" {' and '.join(twice)} would count it twice",
        "add --old_logprobs recompute; or use one that drops: icepop, seq_icepop, kpop, token_mask, seq_mask,"
        " seq_kl",
    )  # fmt: skip
    adds_weight = settings.weighs and not settings.loss.contains_weight
    idle = [
        found.name
        for found in settings.corrections
        if (found.low, found.high) == (0.0, math.inf) and not (adds_weight and found.name in WEIGHTS)
    ]
    _require(
        not idle, settings, flag, f"{' and '.join(idle)} with the bounds 0 and inf neither drops nor weighs",
        "give narrower bounds, or leave it out",
    )  # fmt: skip


def _is_default(settings: LossSettings, flag: str) -> bool:
    """Return whether ``flag`` has the loss's own default, or that of the flag where the loss has none."""
    usual = LossConfig.__dataclass_fields__[flag].default
    return bool(getattr(settings, flag) == settings.loss.defaults.get(flag, usual))


def _require(condition: bool, settings: LossSettings, flag: str, why: str, hint: str) -> None:
    if not condition:
        raise ConfigError(f"--{flag} is {getattr(settings, flag)}: {why}", hint=hint)


def _number(value: float | None) -> float:
    """Return a number that ``LossSettings`` has resolved."""
    if value is None:
        raise ValueError("LossSettings resolves every number")
    return value


def _is_json(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


Flags = Mapping[str, Any]
_SAME_ZEROS = ("leave_one_out", "grpo", "dr_grpo", "maxrl")
"""Estimators that give 0 to the same trajectories."""


@dataclass(frozen=True, slots=True)
class IdleRule:
    """Flags that act only if ``acts`` is true of the run's flags and of its loss."""

    flags: tuple[str, ...]
    acts: Callable[[Flags, LossSettings], bool]
    why: str
    hint: str


def _by_advantage(flags: Flags) -> bool:
    """Return whether model calls are chosen by their advantage."""
    return bool(flags["drop_zero_advantage"] or flags["minimal_advantage"])


def _largest_age(flags: Flags) -> float:
    """Return the largest age of a token that is trained, in optimizer steps."""
    ahead = 0 if flags["sync_sampling"] else int(flags["max_staleness"])
    policy = flags["staleness_policy"]
    # On-policy groups begin after each step and are trained in it: without these flags none becomes old.
    becomes_old = ahead > 0 or flags["oversample_groups"] > 0 or flags["max_trained_count"] > 1
    return math.inf if policy == "decay" or (policy == "keep" and becomes_old) else ahead


def _publishes_adapter(flags: Flags) -> bool:
    """Return whether versions hold the adapter alone."""
    is_trained = flags["lora_rank"] > 0 and flags["weight_sync"] == "disk"
    return is_trained and flags["publish"] in ("auto", "adapter")


_UNREAD = "the loss reads no advantage, and no model call is chosen by it"
_LEAVE_OUT = "leave it out"

IDLE_RULES: tuple[IdleRule, ...] = (
    IdleRule(
        ("adv_scaling",), lambda flags, _: flags["adv_scaling"] > 0,
        "a factor below 0 turns every advantage around, and 0 trains nothing", "give a factor above 0",
    ),
    IdleRule(
        ("adv_scaling",), lambda flags, loss: loss.loss.reads_advantage or flags["minimal_advantage"] > 0,
        _UNREAD, _LEAVE_OUT,
    ),
    IdleRule(
        ("advantage",),
        lambda flags, loss: (
            loss.loss.reads_advantage
            or flags["minimal_advantage"] > 0
            or (flags["drop_zero_advantage"] and flags["advantage"] not in _SAME_ZEROS)
        ),
        _UNREAD, _LEAVE_OUT,
    ),
    IdleRule(
        ("baseline_versions",), lambda flags, _: flags["baseline"] == "window",
        "--baseline is none", "add --baseline window, or leave it out",
    ),
    IdleRule(
        ("baseline", "step_advantage", "turn_discount", "multi_objective_aggregation"),
        lambda flags, loss: loss.loss.reads_advantage or _by_advantage(flags),
        _UNREAD, _LEAVE_OUT,
    ),
    IdleRule(
        ("step_advantage_weight",), lambda flags, _: flags["step_advantage"] != "off",
        "--step_advantage is off", "add --step_advantage gigpo, or leave it out",
    ),
    IdleRule(
        ("step_advantage_weight",),
        lambda flags, loss: loss.loss.reads_advantage or flags["minimal_advantage"] > 0,
        _UNREAD, _LEAVE_OUT,
    ),
    IdleRule(
        ("overlong_limit", "overlong_penalty"), lambda flags, _: flags["overlong_buffer"] > 0,
        "--overlong_buffer is 0, so that no reward is lowered", "give --overlong_buffer, or leave it out",
    ),
    IdleRule(
        ("clamp_advantage_by_score", "efficient_rewarding", "overlong_buffer"),
        lambda flags, loss: loss.loss.reads_advantage or _by_advantage(flags),
        _UNREAD, _LEAVE_OUT,
    ),
    IdleRule(
        ("min_turns", "reserve_context_error_count"), lambda flags, _: not flags["balance_sample"],
        "--balance_sample chooses trajectories by their scores alone", "leave out one of the two",
    ),
    IdleRule(
        ("reserve_context_error_count",), lambda flags, _: not flags["efficient_rewarding"],
        "--efficient_rewarding ranks trajectories with a context error too", "leave out one of the two",
    ),
    IdleRule(
        ("advantage_whitening",), lambda _, loss: loss.loss.reads_advantage,
        "the loss reads no advantage", _LEAVE_OUT,
    ),
    IdleRule(
        ("staleness_policy",),
        lambda flags, loss: flags["staleness_policy"] != "decay" or loss.loss.reads_advantage,
        "it makes the advantages of old tokens smaller, and the loss reads none", "use keep, mask or drop",
    ),
    IdleRule(
        ("out_of_date_decay",), lambda flags, _: _largest_age(flags) > 0,
        "no token that is trained is older than 0 steps", "use --max_staleness 1 or more, or leave it out",
    ),
    IdleRule(
        ("out_of_date_decay",),
        lambda flags, loss: flags["staleness_policy"] == "decay" or loss.narrows_bounds,
        "the loss has no bounds that it could narrow",
        "add bounds, e.g. --strict_in_bound false --importance_weight_cap_ratio 4; or use --staleness_policy"
        " decay; or leave it out",
    ),
    IdleRule(
        ("old_logprobs",),
        lambda flags, _: flags["old_logprobs"] != "loglinear" or _largest_age(flags) > 0,
        "no token that is trained is older than 0 steps, where the interpolation is behavior",
        "use behavior or recompute, or --max_staleness 1 or more",
    ),
    IdleRule(
        ("old_logprobs",),
        lambda flags, _: flags["old_logprobs"] != "version" or _largest_age(flags) > 0,
        "no token that is trained is older than 0 steps, where the version is recompute",
        "use recompute, or --max_staleness 1 or more",
    ),
    IdleRule(
        ("reference_model",), lambda _, loss: loss.needs_reference,
        "the loss compares with no reference model", "add --kl_coef, e.g. 0.001, or leave it out",
    ),
    IdleRule(
        ("lora_alpha", "lora_target_modules"), lambda flags, _: flags["lora_rank"] > 0,
        "--lora_rank is 0: the weights themselves are trained", "add --lora_rank, e.g. 16, or leave it out",
    ),
    IdleRule(
        ("retrained_interval",), lambda flags, _: flags["max_trained_count"] > 1,
        "--max_trained_count is 1: nothing is trained again", "raise --max_trained_count, or leave it out",
    ),
    IdleRule(
        ("max_trained_count",), lambda flags, _: max(1, flags["retrained_interval"]) <= _largest_age(flags),
        "--retrained_interval steps later the data are older than --max_staleness, and are left out",
        "raise --max_staleness, or use --staleness_policy keep",
    ),
    IdleRule(
        ("max_staleness",), lambda flags, _: not (flags["sync_sampling"] and flags["max_staleness"]),
        "with --sync_sampling it is 0", "leave out one of the two",
    ),
    IdleRule(
        ("per_device_train_batch_size",), lambda flags, _: flags["gradient_accumulation_steps"] is not None,
        "it is a factor of --gradient_accumulation_steps, which is not given",
        "give --groups_per_step; --max_tokens is the size of a micro-batch",
    ),
    IdleRule(
        ("mini_batches",), lambda flags, _: flags["mini_batches"] <= flags["groups_per_step"],
        "a mini-batch holds whole groups, and --groups_per_step has fewer",
        "lower it, or raise --groups_per_step",
    ),
    IdleRule(
        ("lr_scheduler_type",),
        lambda flags, _: (
            flags["lr_scheduler_type"] != "constant_with_warmup"
            or flags["warmup_steps"] + flags["warmup_ratio"] > 0
        ),
        "there is no warm-up", "add --warmup_steps, e.g. 10, or leave it out",
    ),
    IdleRule(
        ("autocast_bf16",),
        lambda flags, _: flags["dtype"] != "bfloat16" or flags["autocast_bf16"] == "true",
        "--dtype bfloat16 multiplies in bfloat16", "leave out one of the two",
    ),
    IdleRule(
        ("publish",), lambda flags, _: flags["publish"] != "adapter" or _publishes_adapter(flags),
        "no adapter is trained, or --weight_sync sends whole weights", "add --lora_rank, or leave it out",
    ),
    IdleRule(
        ("publish",), lambda flags, _: flags["publish"] != "delta" or flags["weight_sync"] == "disk",
        "--weight_sync sends whole weights", "leave out one of the two",
    ),
    IdleRule(
        ("full_every",),
        lambda flags, _: (
            flags["weight_sync"] != "disk" or not (flags["publish"] == "full" or _publishes_adapter(flags))
        ),
        "no version is a delta", _LEAVE_OUT,
    ),
    IdleRule(
        (
            "critic_head", "critic_learning_rate", "critic_warmup_steps", "gamma", "gae_lambda", "gae_over",
            "value_clip",
        ),
        lambda flags, _: flags["critic"] != "off",
        "there is no critic", "add --critic head or --critic model, or leave it out",
    ),
    IdleRule(
        ("value_clip",),
        lambda flags, _: (
            flags["num_epochs_per_batch"] * min(flags["mini_batches"], flags["groups_per_step"]) > 1
        ),
        "in a step of one update values are those of its start", "add --mini_batches, or leave it out",
    ),
    IdleRule(
        ("trace_content", "trace_queue"), lambda flags, _: flags["trace"] is not None,
        "spans go nowhere", "add --trace, e.g. sqlite:///traces.db, or leave it out",
    ),
)  # fmt: skip
"""In the order in which they are checked."""


def check_loss(configs: Configs, chosen: Collection[str] | None = None) -> None:
    """Raise ConfigError for flags that are invalid or change nothing with the loss and the run's other flags.

    Of ``IDLE_RULES``, those of the flags ``chosen`` are checked: a what-if inherits the others, which made
    the data that it trains. None: all.
    """
    loss, optim, training = configs[LossConfig], configs[OptimConfig], configs[TrainConfig]
    settings = LossSettings.of_run(configs)
    usual = {field.name: field.default for field in dataclasses.fields(LossConfig)}
    given = (name for name, default in usual.items() if getattr(loss, name) != default)
    updates = optim.num_epochs_per_batch * min(optim.mini_batches, training.groups_per_step)
    idle = unclipped_flags(given, settings, updates)
    require(
        not idle,
        f"{', '.join(f'--{name} {getattr(settings, name)}' for name in idle)} with --old_logprobs recompute:"
        " it bounds πθ/π_old, which is 1 in a step of one update",
        "use --old_logprobs behavior; or --num_epochs_per_batch or --mini_batches above 1; or leave it out,"
        " and bound πθ/μ with --importance_correction token_mask or --importance_weight_cap_ratio 4",
    )
    _require_teacher(settings, configs[GroupConfig])
    critic = configs[CriticConfig].critic
    require(
        critic == "off" or settings.loss.reads_advantage,
        f"--critic {critic} with --loss_calculater {settings.loss_calculater}, which reads no advantage",
        "use --loss_calculater GRPO, PPO's clipped surrogate; or leave out --critic",
    )
    check_idle(configs, settings, configs.flags if chosen is None else chosen)


def check_idle(configs: Configs, settings: LossSettings, chosen: Collection[str]) -> None:
    """Raise ConfigError for the first of the flags ``chosen`` that changes nothing, by ``IDLE_RULES``."""
    defaults = {field.name: field.default for group in GROUPS for field in dataclasses.fields(group)}
    flags = defaults | configs.flags
    for rule in IDLE_RULES:
        for name in rule.flags:
            is_set = name in chosen and flags[name] != defaults[name]
            if is_set and not rule.acts(flags, settings):
                shown = str(flags[name]).lower() if isinstance(flags[name], bool) else flags[name]
                loss = f" with --loss_calculater {settings.loss_calculater}" if "the loss" in rule.why else ""
                raise ConfigError(f"--{name} {shown}{loss}: {rule.why}", hint=rule.hint)


def _require_teacher(settings: LossSettings, groups: GroupConfig) -> None:
    """Refuse distillation without the teacher's column, or with rules that drop trajectories by score."""
    if not settings.distill_coef:
        return
    require(
        TEACHER in groups.column_names,
        f"--loss_calculater {settings.loss_calculater} with --distill_coef {settings.distill_coef:g} reads"
        f" the logprobs of a teacher, and --columns is {groups.columns!r}",
        f"set --columns {TEACHER} for samplers and the trainer, and run agentrl teach (docs/distillation.md)",
    )
    require(
        not settings.loss.ignores_score
        or not (groups.drop_zero_advantage or groups.min_score_spread or groups.minimal_advantage),
        f"--loss_calculater {settings.loss_calculater} ignores scores, and --drop_zero_advantage"
        f" {str(groups.drop_zero_advantage).lower()} with --min_score_spread {groups.min_score_spread:g} and"
        f" --minimal_advantage {groups.minimal_advantage:g} drops trajectories by them",
        "set --drop_zero_advantage false --min_score_spread 0 --minimal_advantage 0 for samplers and the"
        " trainer",
    )
