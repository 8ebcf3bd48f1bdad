"""Flags that reproduce published losses: of papers, other systems and the original (docs/losses.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.losses.settings import LossSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A row of the table: the flags that reproduce a published loss."""

    name: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Flags of the loss, by name."""
    others: str = ""
    """Other flags, as on the command line."""
    source: str
    expected: float
    """The loss of ``golden.STEP``."""

    @property
    def settings(self) -> LossSettings:
        """The settings of the loss."""
        return LossSettings(**self.flags)

    @property
    def whitens(self) -> bool:
        """Whether the advantages of a step are whitened."""
        return "--advantage_whitening batch" in self.others

    @property
    def row(self) -> str:
        """The row in Markdown."""
        words = [f"--{name} {str(value).lower() if isinstance(value, bool) else value}"
                 for name, value in self.flags.items()]  # fmt: skip
        given = f"`{' '.join([*words, *filter(None, [self.others])])}`"
        return f"| {self.name} | {given} | {self.source} | {self.expected:+.4f} |"


HEAD = "| whose | flags | source | golden |\n|---|---|---|---|"

_TOKENS = {"loss_calculater": "GRPO", "token_level_loss": True}
_RECOMPUTED = {"old_logprobs": "recompute"}
_NO_DUAL_CLIP = {"dual_clip": math.inf}
_SEVERAL = "--mini_batches 4"
_WHITENED = "--advantage_whitening batch --min_score_spread 0 --drop_zero_advantage false"

RECIPES: tuple[Recipe, ...] = (
    Recipe(
        name="GRPO", flags={"loss_calculater": "GRPO"}, others="--advantage grpo", source="arXiv 2402.03300",
        expected=-0.1126,
    ),
    Recipe(
        name="GRPO with its KL",
        flags={"loss_calculater": "GRPO", "kl_coef": 0.04, "kl_estimator": "k3"},
        others="--advantage grpo", source="arXiv 2402.03300", expected=-0.1031,
    ),
    Recipe(
        name="DAPO", flags=_TOKENS | {"epsilon_higher": 0.08},
        others="--advantage grpo --min_score_spread 0.1 --reserve_context_error_count 0"
        " --overlong_limit 20480 --overlong_buffer 4096",
        source="arXiv 2503.14476: dynamic sampling, overlong filtering and shaping", expected=-0.1875,
    ),
    Recipe(
        name="Dr. GRPO", flags={"loss_calculater": "GRPO", "loss_length_divisor": 4},
        others="--advantage dr_grpo", source="arXiv 2503.20783, with the generation budget in place of 4",
        expected=-0.0814,
    ),
    Recipe(
        name="GSPO", flags={"loss_calculater": "GSPO"}, others="--advantage grpo", source="arXiv 2507.18071",
        expected=-0.0628,
    ),
    Recipe(
        name="CISPO", flags={"loss_calculater": "CISPO"}, others="--advantage grpo",
        source="arXiv 2506.13585", expected=0.4781,
    ),
    Recipe(
        name="SAPO", flags={"loss_calculater": "SAPO"}, others="--advantage grpo", source="arXiv 2511.20347",
        expected=-0.6646,
    ),
    Recipe(
        name="DPPO", flags={"loss_calculater": "DPPO"}, others="--advantage grpo", source="arXiv 2602.04879",
        expected=-0.1423,
    ),
    Recipe(
        name="prime-rl", flags={"loss_calculater": "DPPO", "dppo_kl_coef": 0.001},
        others="--advantage dr_grpo",
        source="prime-rl: `dppo_mask_low` and `dppo_mask_high` 0.2, `kl_tau` 0.001", expected=-0.1399,
    ),
    Recipe(
        name="REINFORCE++", flags=_TOKENS, others=f"--advantage reward {_WHITENED}",
        source="arXiv 2501.03262; OpenRLHF, verl", expected=0.1074,
    ),
    Recipe(
        name="REINFORCE++-baseline", flags=_TOKENS | {"kl_coef": 0.01, "kl_estimator": "k2"},
        others=f"--advantage dr_grpo {_WHITENED}", source="arXiv 2501.03262; OpenRLHF, verl", expected=0.1096,
    ),
    Recipe(name="MINIRL", flags={"loss_calculater": "MINIRL"}, source="arXiv 2512.01374", expected=-0.0101),
    Recipe(
        name="KL of DeepSeek-V3.2", flags={"loss_calculater": "GRPO", "kl_coef": 0.04},
        source="arXiv 2512.02556; NeMo-RL, verl `k3+`, TRL and slime offer it", expected=-0.0509,
    ),
    Recipe(
        name="verl", flags=_TOKENS | {"dual_clip": 3.0} | _RECOMPUTED, others=_SEVERAL,
        source="verl: `token-mean`, `clip_ratio_c` 3", expected=0.1986,
    ),
    Recipe(
        name="verl, GSPO", flags={"loss_calculater": "GSPO"} | _NO_DUAL_CLIP | _RECOMPUTED, others=_SEVERAL,
        source="verl: `loss_mode` gspo, `seq-mean-token-mean`", expected=0.3923,
    ),
    Recipe(
        name="verl, decoupled correction",
        flags=_TOKENS | {"dual_clip": 3.0, "importance_correction": "tis:2"} | _RECOMPUTED, others=_SEVERAL,
        source="verl: `rollout_is` token, threshold 2", expected=-0.3686,
    ),
    Recipe(
        name="verl, bypass with rejection",
        flags=_TOKENS | {"dual_clip": 3.0, "importance_correction": "token_mask:0.5:2"},
        source="verl: `bypass_mode`, `rollout_rs` token_k1", expected=-0.0122,
    ),
    Recipe(
        name="verl, rejection by KL",
        flags=_TOKENS | {"dual_clip": 3.0, "importance_correction": "seq_kl:0.1"},
        source="verl: `bypass_mode`, `rollout_rs` seq_mean_k3", expected=0.3878,
    ),
    Recipe(
        name="NeMo-RL",
        flags=_TOKENS | {"importance_correction": "tis:inf"} | _NO_DUAL_CLIP | _RECOMPUTED, others=_SEVERAL,
        source="NeMo-RL: importance sampling correction, no cap", expected=-0.7063,
    ),
    Recipe(
        name="AReaL, decoupled",
        flags=_TOKENS | {"importance_correction": "icepop:0:5"} | _NO_DUAL_CLIP | _RECOMPUTED,
        others=_SEVERAL,
        source="arXiv 2505.24298; `behav_imp_weight_cap` 5", expected=-0.1013,
    ),
    Recipe(
        name="AReaL, A-3PO",
        flags=_TOKENS | {"importance_correction": "icepop:0:5", "old_logprobs": "loglinear"} | _NO_DUAL_CLIP,
        source="arXiv 2512.06547", expected=-0.4863,
    ),
    Recipe(
        name="slime",
        flags={"loss_calculater": "GRPO", "epsilon_higher": 0.08, "importance_correction": "tis:2"}
        | _NO_DUAL_CLIP
        | _RECOMPUTED,
        others=_SEVERAL, source="slime: `--eps-clip-high 0.28 --use-tis`, a mean per sample",
        expected=-0.3722,
    ),
    Recipe(
        name="TRL",
        flags=_TOKENS | {"importance_correction": "seq_tis:3"} | _NO_DUAL_CLIP | _RECOMPUTED,
        others=_SEVERAL,
        source="TRL: `loss_type` dapo, `sequence_truncate`, cap 3", expected=-0.4674,
    ),
    Recipe(
        name="the original's GRPO",
        flags=_TOKENS | {"epsilon": 0.2, "epsilon_higher": 0.1, "importance_weight_cap_ratio": 4.0},
        others="--clamp_advantage_by_score true", source="its README; `scripts/grpo.sh`", expected=-0.0841,
    ),
    Recipe(
        name="the original's MINIRL",
        flags={
            "loss_calculater": "MINIRL", "token_level_loss": False, "skip_length_normalization": True,
            "strict_in_bound": True, "epsilon": 0.2, "epsilon_higher": 0.1,
        },
        others="--clamp_advantage_by_score true", source="its README; `scripts/minirl.sh`", expected=-0.0101,
    ),
)  # fmt: skip


def table() -> str:
    """Return the table in Markdown."""
    return "\n".join([HEAD, *(recipe.row for recipe in RECIPES)])
