"""Refuse flags of a run that change nothing, given its loss and its other flags.

Flags that the loss alone decides about are refused by ``LossSettings``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.config.flags import require
from agentrl.config.load import Configs
from agentrl.config.loss import LossConfig
from agentrl.config.schema import GROUPS, GroupConfig, OptimConfig, TrainConfig
from agentrl.errors import ConfigError
from agentrl.losses.loss import TEACHER
from agentrl.losses.settings import LossSettings, unclipped_flags

Flags = Mapping[str, Any]
_SAME_ZEROS = ("leave_one_out", "grpo", "dr_grpo")
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


def _is_trained_again(flags: Flags) -> bool:
    """Return whether data can be trained again a step later without being too stale."""
    staleness = 0 if flags["sync_sampling"] else flags["max_staleness"]
    return bool(flags["staleness_policy"] == "decay" or max(1, flags["retrained_interval"]) <= staleness)


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
        "it makes the advantages of old tokens smaller, and the loss reads none", "use drop or mask",
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
        lambda flags, _: (
            flags["old_logprobs"] != "loglinear"
            or flags["staleness_policy"] == "decay"
            or (flags["max_staleness"] > 0 and not flags["sync_sampling"])
        ),
        "no token that is trained is older than 0 steps, where the interpolation is behavior",
        "use behavior or recompute, or --max_staleness 1 or more",
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
        ("max_trained_count",), lambda flags, _: _is_trained_again(flags),
        "--retrained_interval steps later the data are older than --max_staleness, and are left out",
        "raise --max_staleness, or use --staleness_policy decay",
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
        ("publish",),
        lambda flags, _: (
            (flags["publish"] != "delta" or flags["weight_sync"] == "disk")
            and (flags["publish"] != "adapter" or _publishes_adapter(flags))
        ),
        "an adapter needs --lora_rank, and files, as a delta does, --weight_sync disk", _LEAVE_OUT,
    ),
    IdleRule(
        ("full_every",),
        lambda flags, _: (
            flags["weight_sync"] != "disk" or not (flags["publish"] == "full" or _publishes_adapter(flags))
        ),
        "no version is a delta", _LEAVE_OUT,
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
                raise ConfigError(
                    f"--{name} {shown} with --loss_calculater {settings.loss_calculater}: {rule.why}",
                    hint=rule.hint,
                )


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
