"""Flags that reproduce published losses: of papers, other systems and the original (docs/losses.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.losses.settings import LossSettings


@dataclass(frozen=True, slots=True)
class Recipe:
    """A row of the table: the flags that reproduce a published loss."""

    name: str
    expected: float
    """The loss of ``golden.STEP``."""
    source: str
    flags: Mapping[str, Any]
    """Flags of the loss, by name."""
    others: str = ""
    """Other flags, as on the command line."""

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


def _of(loss: str, **flags: Any) -> dict[str, Any]:
    return {"loss_calculater": loss, **flags}


_TOKENS = _of("GRPO", token_level_loss=True)
_RECOMPUTED = {"old_logprobs": "recompute"}
_NO_DUAL_CLIP = {"dual_clip": math.inf}
_SEVERAL = "--mini_batches 4"
_WHITENED = "--advantage_whitening batch --min_score_spread 0 --drop_zero_advantage false"

RECIPES: tuple[Recipe, ...] = (
    Recipe("GRPO", -0.1126, "arXiv 2402.03300", _of("GRPO"), "--advantage grpo"),
    Recipe(
        "GRPO with its KL", -0.1031, "arXiv 2402.03300", _of("GRPO", kl_coef=0.04, kl_estimator="k3"),
        "--advantage grpo",
    ),
    Recipe(
        "DAPO", -0.1875, "arXiv 2503.14476: dynamic sampling, overlong filtering and shaping",
        _TOKENS | {"epsilon_higher": 0.08},
        "--advantage grpo --min_score_spread 0.1 --reserve_context_error_count 0"
        " --overlong_limit 20480 --overlong_buffer 4096",
    ),
    Recipe(
        "Dr. GRPO", -0.0814, "arXiv 2503.20783, with the generation budget in place of 4",
        _of("GRPO", loss_length_divisor=4), "--advantage dr_grpo",
    ),
    Recipe("GSPO", -0.0628, "arXiv 2507.18071", _of("GSPO"), "--advantage grpo"),
    Recipe("CISPO", 0.4781, "arXiv 2506.13585", _of("CISPO"), "--advantage grpo"),
    Recipe("SAPO", -0.6646, "arXiv 2511.20347", _of("SAPO"), "--advantage grpo"),
    Recipe("DPPO", -0.1423, "arXiv 2602.04879", _of("DPPO"), "--advantage grpo"),
    Recipe(
        "prime-rl", -0.1399, "prime-rl: `dppo_mask_low` and `dppo_mask_high` 0.2, `kl_tau` 0.001",
        _of("DPPO", dppo_kl_coef=0.001), "--advantage dr_grpo",
    ),
    Recipe(
        "REINFORCE++", 0.1074, "arXiv 2501.03262; OpenRLHF, verl", _TOKENS, f"--advantage reward {_WHITENED}",
    ),
    Recipe(
        "REINFORCE++-baseline", 0.1096, "arXiv 2501.03262; OpenRLHF, verl",
        _TOKENS | {"kl_coef": 0.01, "kl_estimator": "k2"}, f"--advantage dr_grpo {_WHITENED}",
    ),
    Recipe("MINIRL", -0.0101, "arXiv 2512.01374", _of("MINIRL")),
    Recipe(
        "KL of DeepSeek-V3.2", -0.0509, "arXiv 2512.02556; NeMo-RL, verl `k3+`, TRL and slime offer it",
        _of("GRPO", kl_coef=0.04),
    ),
    Recipe(
        "verl", 0.1986, "verl: `token-mean`, `clip_ratio_c` 3", _TOKENS | {"dual_clip": 3.0} | _RECOMPUTED,
        _SEVERAL,
    ),
    Recipe(
        "verl, GSPO", 0.3923, "verl: `loss_mode` gspo, `seq-mean-token-mean`",
        _of("GSPO") | _NO_DUAL_CLIP | _RECOMPUTED, _SEVERAL,
    ),
    Recipe(
        "verl, decoupled correction", -0.3686, "verl: `rollout_is` token, threshold 2",
        _TOKENS | {"dual_clip": 3.0, "importance_correction": "tis:2"} | _RECOMPUTED, _SEVERAL,
    ),
    Recipe(
        "verl, bypass with rejection", -0.0122, "verl: `bypass_mode`, `rollout_rs` token_k1",
        _TOKENS | {"dual_clip": 3.0, "importance_correction": "token_mask:0.5:2"},
    ),
    Recipe(
        "verl, rejection by KL", 0.3878, "verl: `bypass_mode`, `rollout_rs` seq_mean_k3",
        _TOKENS | {"dual_clip": 3.0, "importance_correction": "seq_kl:0.1"},
    ),
    Recipe(
        "NeMo-RL", -0.7063, "NeMo-RL: importance sampling correction, no cap",
        _TOKENS | {"importance_correction": "tis:inf"} | _NO_DUAL_CLIP | _RECOMPUTED, _SEVERAL,
    ),
    Recipe(
        "AReaL, decoupled", -0.1013, "arXiv 2505.24298; `behav_imp_weight_cap` 5",
        _TOKENS | {"importance_correction": "icepop:0:5"} | _NO_DUAL_CLIP | _RECOMPUTED, _SEVERAL,
    ),
    Recipe(
        "AReaL, A-3PO", -0.4863, "arXiv 2512.06547",
        _TOKENS | {"importance_correction": "icepop:0:5", "old_logprobs": "loglinear"} | _NO_DUAL_CLIP,
    ),
    Recipe(
        "slime", -0.3722, "slime: `--eps-clip-high 0.28 --use-tis`, a mean per sample",
        _of("GRPO", epsilon_higher=0.08, importance_correction="tis:2") | _NO_DUAL_CLIP | _RECOMPUTED,
        _SEVERAL,
    ),
    Recipe(
        "TRL", -0.4674, "TRL: `loss_type` dapo, `sequence_truncate`, cap 3",
        _TOKENS | {"importance_correction": "seq_tis:3"} | _NO_DUAL_CLIP | _RECOMPUTED, _SEVERAL,
    ),
    Recipe(
        "the original's GRPO", -0.0841, "its README; `scripts/grpo.sh`",
        _TOKENS | {"epsilon": 0.2, "epsilon_higher": 0.1, "importance_weight_cap_ratio": 4.0},
        "--clamp_advantage_by_score true",
    ),
    Recipe(
        "the original's MINIRL", -0.0101, "its README; `scripts/minirl.sh`",
        _of("MINIRL", token_level_loss=False, skip_length_normalization=True, strict_in_bound=True,
            epsilon=0.2, epsilon_higher=0.1),
        "--clamp_advantage_by_score true",
    ),
)  # fmt: skip


def table() -> str:
    """Return the table in Markdown."""
    return "\n".join([HEAD, *(recipe.row for recipe in RECIPES)])
