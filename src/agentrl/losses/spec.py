"""SPECS: the paper's defaults of each loss; free of torch, so that configuration can read them."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

from agentrl.errors import ConfigError

CLIPPED_SURROGATE = frozenset({"dual_clip", "ce_grpo_beta_1", "ce_grpo_beta_2"})
"""Flags of the clipped surrogate, which GRPO and GSPO share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """The defaults of a loss, and the flags that it reads.

    The first fields carry the names of their flags (``OWN_DEFAULTS``).
    """

    token_level_loss: bool
    skip_length_normalization: bool = False
    strict_in_bound: bool = False
    importance_weight_cap_ratio: float = math.inf
    """inf: no bounds on staleness unless they are strict."""
    epsilon: float = 0.2
    epsilon_higher: float = 0.0
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    own_flags: frozenset[str] = frozenset()
    """Flags that only some losses read, and this one does."""
    clips: bool = True
    """False if only the bounds on staleness read ``epsilon`` and ``epsilon_higher``."""
    from_policy: bool = True
    """True if a policy sampled the tokens: bounds, corrections and a KL apply."""
    contains_weight: bool = False
    """True if w = π_old/μ is a factor of the loss."""
    reads_trajectory: bool = False
    """True if a token's loss depends on the other tokens of its trajectory."""


OWN_DEFAULTS = (
    "token_level_loss", "skip_length_normalization", "strict_in_bound", "importance_weight_cap_ratio",
    "epsilon", "epsilon_higher", "sapo_tau_pos", "sapo_tau_neg",
)  # fmt: skip
"""Flags whose default is the loss's own."""

SPECS: dict[str, LossSpec] = {
    # arXiv 2402.03300: the mean over trajectories of a trajectory's mean.
    "GRPO": LossSpec(token_level_loss=False, own_flags=CLIPPED_SURROGATE),
    # arXiv 2507.18071: 3e-4 and 4e-4 on the trajectory's ratio.
    "GSPO": LossSpec(
        token_level_loss=False, epsilon=3e-4, epsilon_higher=1e-4, own_flags=CLIPPED_SURROGATE,
        reads_trajectory=True,
    ),
    # arXiv 2506.13585: the weight lies in [0, 1 + 4].
    "CISPO": LossSpec(token_level_loss=True, epsilon=1.0, epsilon_higher=3.0),
    # arXiv 2512.01374: a trajectory counts with its sum; the bounds are those of scripts/minirl.sh.
    "MINIRL": LossSpec(
        token_level_loss=False, skip_length_normalization=True, strict_in_bound=True, epsilon_higher=0.1,
        contains_weight=True,
    ),
    # arXiv 2511.20347: temperatures of the gate for A > 0 and for the others.
    "SAPO": LossSpec(
        token_level_loss=False, own_flags=frozenset({"sapo_tau_pos", "sapo_tau_neg"}), clips=False
    ),
    "CrossEntropy": LossSpec(token_level_loss=True, from_policy=False),
}  # fmt: skip


def get_spec(name: str) -> LossSpec:
    """Return the spec of the loss called ``name``; ConfigError naming the nearest one for an unknown name."""
    if name in SPECS:
        return SPECS[name]
    by_lower = {known.lower(): known for known in SPECS}
    nearest = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.0)[0]
    raise ConfigError(
        f"unknown --loss_calculater {name!r}; choose one of {', '.join(SPECS)}",
        hint=f"did you mean {by_lower[nearest]!r}?",
    )
