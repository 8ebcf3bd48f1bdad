"""Validate loss settings: refuse flags that cannot act or would count a ratio twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.errors import ConfigError
from agentrl.losses.correction_spec import CAPS
from agentrl.losses.spec import OWN_DEFAULTS, SPECS

if TYPE_CHECKING:
    from agentrl.losses.settings import LossSettings


def require_acting(settings: LossSettings) -> None:
    """Raise ConfigError for a flag that the loss does not read, and for corrections that do not compose.

    A flag that has the loss's own default is never refused.
    """
    _require_read(settings)
    _require_reduction(settings)
    _require_corrections(settings)


def unclipped_flags(given: frozenset[str], settings: LossSettings, updates: int) -> list[str]:
    """Return the flags of ``given`` that bound r = πθ/π_old, where r is 1 in every update of a step.

    That is with recomputed π_old and a single update. Bounds on staleness act on ρ = πθ/μ, and read
    ``epsilon`` and ``epsilon_higher`` too.
    """
    if settings.old_logprobs != "recompute" or updates > 1 or not settings.spec.from_policy:
        return []
    clips = set(settings.spec.own_flags)
    if not settings.bounds_staleness:
        clips |= {"epsilon", "epsilon_higher"}
    return sorted(given & clips)


def _require_read(settings: LossSettings) -> None:
    spec, name = settings.spec, settings.loss_calculater
    for flag in sorted(frozenset().union(*(other.own_flags for other in SPECS.values())) - spec.own_flags):
        readers = [other for other, found in SPECS.items() if flag in found.own_flags]
        _require(_is_own(settings, flag), settings, flag, f"{name} does not read it",
                 f"leave it out, or use --loss_calculater {' or '.join(readers)}")  # fmt: skip
    _require(
        not (settings.keeps_gradient and settings.strict_in_bound), settings, "strict_in_bound",
        "it masks the tokens whose gradient --ce_grpo_beta_1 and --ce_grpo_beta_2 keep",
        "turn it off, or leave those two out",
    )  # fmt: skip
    cap = "importance_weight_cap_ratio"
    _require(
        not settings.strict_in_bound or _is_own(settings, cap), settings, cap,
        "it widens the bounds only where they are not strict", "add --strict_in_bound false, or leave it out",
    )  # fmt: skip
    for flag in ("epsilon", "epsilon_higher"):
        _require(
            spec.clips or settings.bounds_staleness or _is_own(settings, flag), settings, flag,
            f"{name} does not clip", "leave it out, or bound staleness with --importance_weight_cap_ratio",
        )  # fmt: skip
    if spec.from_policy:
        return
    bounds = set(OWN_DEFAULTS) - {"token_level_loss", "skip_length_normalization"}
    for flag in sorted(bounds):
        _require(_is_own(settings, flag), settings, flag, f"{name} samples no policy", "leave it out")
    for flag in ("importance_correction", "kl_coef", "entropy_coef"):
        _require(not getattr(settings, flag), settings, flag, f"{name} samples no policy", "leave it out")


def _require_reduction(settings: LossSettings) -> None:
    flag = "skip_length_normalization"
    _require(
        not (settings.token_level_loss and settings.skip_length_normalization) or _is_own(settings, flag),
        settings, flag, "a mean over tokens has no trajectory lengths", "add --token_level_loss false",
    )  # fmt: skip


def _require_corrections(settings: LossSettings) -> None:
    flag = "importance_correction"
    names = {correction.name for correction in settings.corrections}
    _require(
        "seq_tis" not in names or not names & {"tis", "icepop"}, settings, flag,
        "it weighs by the tokens' ratio and by the trajectory's, which counts the ratio twice",
        "keep one of them; token_mask:low:high drops what icepop drops and weighs nothing",
    )  # fmt: skip
    twice = sorted(names & set(CAPS))
    _require(
        not twice or settings.weighs, settings, flag,
        f"with --old_logprobs behavior the ratio of {settings.loss_calculater} is πθ/μ already, and"
        f" {' and '.join(twice)} would count it twice",
        "add --old_logprobs recompute; or use icepop, token_mask, seq_mask or seq_kl, which drop",
    )  # fmt: skip


def _is_own(settings: LossSettings, flag: str) -> bool:
    return bool(getattr(settings, flag) == getattr(settings.spec, flag, None))


def _require(good: bool, settings: LossSettings, flag: str, why: str, hint: str) -> None:
    if not good:
        raise ConfigError(f"--{flag} is {getattr(settings, flag)}: {why}", hint=hint)
