"""LossSettings: the numbers of a loss, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from agentrl.errors import ConfigError
from agentrl.losses.correction_spec import WEIGHS, Correction, parse_corrections
from agentrl.losses.inert import require_acting
from agentrl.losses.spec import OWN_DEFAULTS, LossSpec, get_spec

OLD_LOGPROBS = ("behavior", "recompute", "loglinear")
KL_ESTIMATORS = ("weighted_k3", "k1", "k2", "k3")


OWN: Any = None
"""Placeholder for the loss's own default; ``__post_init__`` replaces it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """One run's loss. The fields carry the names of the command-line flags; a bad value is a ConfigError.

    A field that is None when the object is made takes the loss's own default (``losses.spec``).
    """

    loss_calculater: str = "GRPO"
    token_level_loss: bool = OWN
    """Mean over the step's tokens. Where False, a mean over its trajectories."""
    skip_length_normalization: bool = OWN
    """With ``token_level_loss`` False: a trajectory counts with its sum instead of its mean."""
    loss_length_divisor: int | None = None
    """Constant that divides a trajectory's sum, in tokens (Dr. GRPO)."""
    strict_in_bound: bool = OWN
    epsilon: float = OWN
    epsilon_higher: float = OWN
    importance_weight_cap_ratio: float = OWN
    """inf: no bounds on staleness, unless they are strict."""
    out_of_date_decay: float | None = None
    importance_correction: str = ""
    dual_clip: float | None = None
    ce_grpo_beta_1: float | None = None
    ce_grpo_beta_2: float | None = None
    sapo_tau_pos: float = OWN
    """SAPO: how fast its gate closes for A > 0."""
    sapo_tau_neg: float = OWN
    """SAPO: how fast it closes for A ≤ 0."""
    old_logprobs: str = "behavior"
    kl_coef: float = 0.0
    """Weight of the KL to a reference model."""
    kl_estimator: str = "weighted_k3"
    entropy_coef: float = 0.0
    """Weight of the bonus on the policy's entropy."""

    def __post_init__(self) -> None:
        for name in OWN_DEFAULTS:
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self.spec, name))
        parse_corrections(self.importance_correction)
        self._require(0 <= self.epsilon <= 1, "epsilon", self.epsilon, "give a value in [0, 1]")
        for name in ("epsilon_higher", "out_of_date_decay", "ce_grpo_beta_1", "ce_grpo_beta_2"):
            value = getattr(self, name)
            good = value is None or (math.isfinite(value) and value >= 0)
            self._require(good, name, value, "give a finite value of 0 or more")
        cap = self.importance_weight_cap_ratio
        self._require(cap >= 1, "importance_weight_cap_ratio", cap, "give 1 or more; inf turns the bound off")
        self._check_length_divisor()
        for name in ("sapo_tau_pos", "sapo_tau_neg"):
            tau = getattr(self, name)
            self._require(math.isfinite(tau) and tau > 0, name, tau, "give a finite value above 0")
        clip = self.dual_clip
        self._require(clip is None or clip > 1, "dual_clip", clip, "give a value above 1, such as 3")
        old = self.old_logprobs
        self._require(old in OLD_LOGPROBS, "old_logprobs", old, f"use one of {', '.join(OLD_LOGPROBS)}")
        kl = self.kl_coef
        self._require(math.isfinite(kl) and kl >= 0, "kl_coef", kl, "give a finite value of 0 or more")
        kind = self.kl_estimator
        self._require(kind in KL_ESTIMATORS, "kl_estimator", kind, f"use one of {', '.join(KL_ESTIMATORS)}")
        bonus = self.entropy_coef
        good = math.isfinite(bonus) and bonus >= 0
        self._require(good, "entropy_coef", bonus, "give a finite value of 0 or more")
        require_acting(self)

    def _check_length_divisor(self) -> None:
        divisor = self.loss_length_divisor
        self._require(divisor is None or divisor >= 1, "loss_length_divisor", divisor, "give 1 token or more")
        hint = "set --token_level_loss false: a mean over the step's tokens divides by their number"
        self._require(divisor is None or not self.token_level_loss, "loss_length_divisor", divisor, hint)

    @staticmethod
    def _require(good: bool, name: str, value: object, hint: str) -> None:
        if not good:
            raise ConfigError(f"--{name} is {value}", hint=hint)

    @property
    def spec(self) -> LossSpec:
        """Defaults of the loss's paper."""
        return get_spec(self.loss_calculater)

    @property
    def corrections(self) -> tuple[Correction, ...]:
        """``importance_correction``, read."""
        return parse_corrections(self.importance_correction)

    @property
    def ratio_is_rho(self) -> bool:
        """True if π_old is μ: then w = π_old/μ is 1 and r = πθ/π_old is ρ = πθ/μ."""
        return self.old_logprobs == "behavior"

    @property
    def weighs(self) -> bool:
        """True if corrections weight the loss; else they only mask tokens."""
        if self.spec.contains_weight:
            return True
        return not self.ratio_is_rho and any(found.name in WEIGHS for found in self.corrections)

    @property
    def bounds_staleness(self) -> bool:
        """True if bounds on staleness mask tokens by ρ = πθ/μ."""
        return self.strict_in_bound or math.isfinite(self.importance_weight_cap_ratio)

    @property
    def narrows_bounds(self) -> bool:
        """True if ``out_of_date_decay`` narrows the bounds on staleness."""
        return self.bounds_staleness and not self.strict_in_bound

    @property
    def lower(self) -> float:
        """Lower end of the clip interval, 1 − ε."""
        return 1.0 - self.epsilon

    @property
    def upper(self) -> float:
        """Upper end of the clip interval, 1 + ε + ε_h."""
        return 1.0 + self.epsilon + self.epsilon_higher

    @property
    def keeps_gradient(self) -> bool:
        """True where clipped tokens keep a bounded gradient (CE-GPPO)."""
        return self.ce_grpo_beta_1 is not None or self.ce_grpo_beta_2 is not None
