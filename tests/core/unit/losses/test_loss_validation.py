"""Settings that could not act, or would act twice, are refused, and the error says how to fix them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from parsed_flags import parsed

from agentrl.errors import ConfigError
from agentrl.losses.loss import LOSSES
from agentrl.losses.settings import LossSettings, check_loss, unclipped_flags


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ({"importance_correction": "tis"}, "--old_logprobs recompute"),
        ({"importance_correction": "seq_tis:3"}, "--old_logprobs recompute"),
        ({"importance_correction": "tis,seq_mask", "loss_calculater": "CISPO"}, "--old_logprobs recompute"),
        ({"importance_correction": "tis,seq_tis", "old_logprobs": "recompute"}, "keep one of them"),
        ({"importance_correction": "icepop,seq_tis", "old_logprobs": "loglinear"}, "token_mask:low:high"),
        ({"dual_clip": 3.0, "loss_calculater": "CISPO"}, "--loss_calculater GRPO or GSPO"),
        ({"ce_grpo_beta_1": 0.5, "loss_calculater": "MINIRL"}, "--loss_calculater GRPO or GSPO"),
        ({"importance_weight_cap_ratio": 4.0, "strict_in_bound": True}, "--strict_in_bound false"),
        ({"importance_weight_cap_ratio": 4.0, "loss_calculater": "MINIRL"}, "--strict_in_bound false"),
        ({"skip_length_normalization": True, "token_level_loss": True}, "--token_level_loss false"),
        ({"strict_in_bound": True, "ce_grpo_beta_2": 0.5}, "leave those two out"),
        ({"epsilon": 0.3, "loss_calculater": "CrossEntropy"}, "leave it out"),
        ({"importance_correction": "icepop", "loss_calculater": "CrossEntropy"}, "leave it out"),
        ({"kl_estimator": "k3"}, "add --kl_coef"),
        ({"old_logprobs": "recompute", "loss_calculater": "DPPO"}, "leave it out"),
        ({"dppo_kl_coef": 0.1}, "--loss_calculater DPPO"),
        ({"sapo_tau_neg": 2.0}, "--loss_calculater SAPO"),
        ({"epsilon": 0.3, "loss_calculater": "SAPO"}, "bound staleness with --importance_weight_cap_ratio"),
        ({"loss_length_divisor": 10, "token_level_loss": True}, "--token_level_loss false"),
        ({"loss_length_divisor": 10, "loss_calculater": "CISPO"}, "--token_level_loss false"),
        ({"entropy_coef": 0.1, "loss_calculater": "CrossEntropy"}, "leave it out"),
        ({"kl_coef": 0.1, "loss_calculater": "CrossEntropy"}, "leave it out"),
        ({"preference_beta": 0.2}, "--loss_calculater DPO or KTO"),
        ({"token_level_loss": True, "loss_calculater": "DPO"}, "leave it out"),
        ({"kl_coef": 0.1, "loss_calculater": "KTO"}, "leave it out"),
        # What a value alone makes meaningless:
        ({"epsilon": -0.1}, "in [0, 1]"),
        ({"epsilon_higher": math.nan}, "≥ 0"),
        ({"dual_clip": 1.0}, "> 1"),
        ({"importance_weight_cap_ratio": 0.5}, "≥ 1"),
        ({"out_of_date_decay": -1.0}, "≥ 0"),
        ({"loss_length_divisor": 0}, "≥ 1"),
        *(({"entropy_coef": value}, "≥ 0") for value in (-0.1, math.nan, math.inf)),
        *(({"kl_coef": value}, "≥ 0") for value in (-1.0, math.nan)),
        *(({name: value}, "> 0") for name in ("sapo_tau_pos", "sapo_tau_neg")
          for value in (0.0, -1.0, math.nan, math.inf)),
    ],
)  # fmt: skip
def test_what_cannot_act_is_refused_with_its_hint(flags: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        LossSettings(**flags)
    assert f"--{next(iter(flags))} is {flags[next(iter(flags))]}" in str(refused.value)
    assert hint in str(refused.value.hint)


@pytest.mark.parametrize(
    "flags",
    [
        {"importance_correction": "icepop,seq_mask,token_mask,seq_kl"},
        {"importance_correction": "tis,icepop", "old_logprobs": "recompute"},
        {"importance_correction": "tis", "old_logprobs": "behavior", "loss_calculater": "MINIRL"},
        {"importance_weight_cap_ratio": math.inf, "loss_calculater": "MINIRL"},
        {"dual_clip": 3.0, "loss_calculater": "GSPO"},
        {"token_level_loss": True, "loss_calculater": "MINIRL"},
        {"epsilon": 0.3, "loss_calculater": "SAPO", "importance_weight_cap_ratio": 4.0},
    ],
)
def test_what_acts_is_accepted(flags: dict[str, Any]) -> None:
    LossSettings(**flags)


@pytest.mark.parametrize("loss", LOSSES.names())
def test_a_losss_own_defaults_may_be_given(loss: str) -> None:
    given = LossSettings(loss_calculater=loss, **LOSSES.get(loss).defaults)
    assert given == LossSettings(loss_calculater=loss)


def test_what_bounds_a_ratio_of_one() -> None:
    given = frozenset({"epsilon", "dual_clip", "kl_coef", "importance_correction"})
    recompute = LossSettings(old_logprobs="recompute")
    assert unclipped_flags(given, recompute, 1) == ["dual_clip", "epsilon"]
    assert unclipped_flags(given, recompute, 2) == []
    bounded = LossSettings(old_logprobs="recompute", importance_weight_cap_ratio=4.0)
    assert unclipped_flags(given, bounded, 1) == ["dual_clip"]
    for old in ("behavior", "loglinear"):
        assert unclipped_flags(given, LossSettings(old_logprobs=old), 1) == []


RECOMPUTE = ["--old_logprobs", "recompute"]


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ([*RECOMPUTE, "--epsilon", "0.2"], "--num_epochs_per_batch"),
        ([*RECOMPUTE, "--dual_clip", "3", "--importance_weight_cap_ratio", "4"], "--num_epochs_per_batch"),
        ([*RECOMPUTE, "--ce_grpo_beta_1", "0.5"], "--old_logprobs behavior"),
        ([*RECOMPUTE, "--epsilon", "0.2", "--mini_batches", "2", "--groups_per_step", "1"], "--mini_batches"),
        (["--out_of_date_decay", "0.5"], "--importance_weight_cap_ratio 4"),
        (["--out_of_date_decay", "0.5", "--loss_calculater", "MINIRL"], "--strict_in_bound false"),
        (["--importance_correction", "tis"], "--old_logprobs recompute"),
        ([*RECOMPUTE, "--epsilon", "0.2", "--mini_batches", "2"], None),
        ([*RECOMPUTE, "--epsilon", "0.2", "--importance_weight_cap_ratio", "4"], None),
        ([*RECOMPUTE, "--importance_correction", "tis"], None),
        (["--out_of_date_decay", "0.5", "--staleness_policy", "decay"], None),
        (["--out_of_date_decay", "0.5", "--importance_weight_cap_ratio", "4"], None),
    ],
)
def test_flags_of_the_loss_that_cannot_act_are_refused_at_start(flags: list[str], hint: str | None) -> None:
    configs = parsed(*flags)
    if hint is None:
        check_loss(configs)
        return
    with pytest.raises(ConfigError) as refused:
        check_loss(configs)
    assert hint in str(refused.value.hint)
