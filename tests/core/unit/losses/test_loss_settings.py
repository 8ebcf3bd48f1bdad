"""Flags that could not act, or would act twice, are refused, and the error says how to fix them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from model_calls import record
from parsed_flags import parsed
from token_batches import random_batch, step_loss, token_metrics

from agentrl.config.load import Configs
from agentrl.config.schema import GROUPS, GroupConfig, LossConfig
from agentrl.documents.status import StopReason
from agentrl.documents.training import earned_advantage
from agentrl.errors import ConfigError
from agentrl.losses.compute import old_logprobs
from agentrl.losses.loss import LOSSES, ComparedTrajectories
from agentrl.losses.settings import LossSettings, check_loss, unclipped_flags
from agentrl.scoring.groups import Step, decide_group


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ({"importance_correction": "tis"}, "--old_logprobs recompute"),
        ({"importance_correction": "seq_tis:3"}, "--old_logprobs recompute"),
        ({"importance_correction": "tis,seq_mask", "loss_calculater": "CISPO"}, "--old_logprobs recompute"),
        ({"importance_correction": "tis,seq_tis", "old_logprobs": "recompute"}, "keep one of them"),
        ({"importance_correction": "kpop,seq_icepop", "old_logprobs": "recompute"}, "token_mask:low:high"),
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


BASE: Mapping[str, Any] = {"mini_batches": 4}
TAUGHT: Mapping[str, Any] = {"columns": "teacher"}
OPD: Mapping[str, Any] = {**TAUGHT, "drop_zero_advantage": False, "min_score_spread": 0.0}
WITH: Mapping[str, Mapping[str, Any]] = {
    "distill_coef": TAUGHT, "kl_estimator": {"kl_coef": 0.3}, "out_of_date_decay": {
        "importance_weight_cap_ratio": 2.0, "epsilon": 0.2, "strict_in_bound": False,
    },
    "step_advantage_weight": {"step_advantage": "gigpo"},
    "multi_objective_aggregation": {"advantage": "grpo"}, "baseline": {"advantage": "reward"},
    "baseline_versions": {"advantage": "reward", "baseline": "window"},
}  # fmt: skip
"""What a flag needs, to act with any loss."""
LOSS: Mapping[str, tuple[Any, ...]] = {
    "token_level_loss": (True, False), "skip_length_normalization": (True, False),
    "loss_length_divisor": (5,), "strict_in_bound": (True, False), "epsilon": (0.05, 0.5),
    "epsilon_higher": (0.03, 0.6), "importance_weight_cap_ratio": (1.0, 3.0), "out_of_date_decay": (0.7,),
    "importance_correction": (
        "tis:1.2", "seq_tis:1.5", "icepop:0.8:1.2", "seq_icepop:0.8:1.2", "kpop:0.05", "token_mask:0.8:1.25",
        "seq_mask:0.9:1.1", "seq_kl:0.05",
    ),
    "old_logprobs": ("recompute", "loglinear"), "kl_coef": (0.3,), "kl_estimator": ("k1", "k2", "k3"),
    "entropy_coef": (0.2,), "distill_coef": (0.4,), "dual_clip": (1.1, math.inf), "ce_grpo_beta_1": (0.5,),
    "ce_grpo_beta_2": (0.5,), "sapo_tau_pos": (2.0,), "sapo_tau_neg": (3.0,), "dppo_kl_coef": (0.1,),
    "m2_threshold": (0.01,),
    "preference_beta": (0.7,), "kto_threshold": (0.3,), "kto_desirable_weight": (2.0,),
    "kto_undesirable_weight": (2.0,), "loss_args": ('{"x": 1}',),
}  # fmt: skip
"""Other values than the default of each flag of the loss."""
GROUP: Mapping[str, tuple[Any, ...]] = {
    "advantage": ("grpo", "dr_grpo", "maxrl", "reward"), "adv_scaling": (3.0, 0.5, 0.0, -1.0),
    "right_threshold": (0.65,), "clamp_advantage_by_score": (True,), "balance_sample": (True,),
    "drop_zero_advantage": (False,), "minimal_advantage": (0.2,), "min_turns": (3,),
    "efficient_rewarding": (True,), "reserve_context_error_count": (0,), "min_score_spread": (0.5,),
    "overlong_limit": (100,), "overlong_buffer": (10,), "overlong_penalty": (0.5,),
    "step_advantage": ("gigpo",), "step_advantage_weight": (2.0,), "turn_discount": (0.5,),
    "multi_objective_aggregation": ("normalize_then_sum",), "baseline": ("window",),
    "baseline_versions": (2,),
}  # fmt: skip
"""The same of each flag of groups, except those whose values are names of something of the user's."""
NAMES = {"loss_calculater", "group_filter", "columns"}


def with_loss(name: str, flags: Mapping[str, Any]) -> Configs:
    """The flags of a run. Raises ConfigError if one of them is refused."""
    needed = OPD if LOSSES.get(name).ignores_score else {}
    values = {**BASE, **needed, **flags, "loss_calculater": name}
    configs = Configs.of(GROUPS, values, values)
    check_loss(configs)
    return configs


def learned(configs: Configs) -> list[Any]:
    """Loss, gradient and metrics of some random batches."""
    settings, found = LossSettings.of_run(configs), []
    for seed in range(4):
        batch = random_batch(seed, spread=0.7)
        start, rows = batch.old_logprobs, batch.trajectories
        compared = ComparedTrajectories(
            number=torch.arange(rows), score=torch.tensor([0.0, 1.0, 0.4, 0.9]),
            group=torch.tensor([0, 0, 1, 1]),
            log_ratio=torch.zeros(rows).index_add(0, batch.row, batch.log_ratio.detach()),
        )  # fmt: skip
        batch = replace(
            batch, reference_logprobs=start - 0.3, entropy=batch.logprobs.exp() * 3, compared=compared,
            old_logprobs=old_logprobs(settings.old_logprobs, start, batch.behavior_logprobs, batch.age),
            columns=batch.columns if settings.distill_coef else {},
        )  # fmt: skip
        loss, result = step_loss(batch, settings)
        (gradient,) = torch.autograd.grad(loss, batch.logprobs)
        report = token_metrics(batch, result, batch.logprobs.detach()).report()
        found.append([loss.item(), gradient.tolist(), report])
    return found


def chosen(configs: Configs) -> list[Any]:
    """Which model calls of some random groups are trained, with their advantages if the loss reads them."""
    rules, loss, found = configs[GroupConfig], LossSettings.of_run(configs).loss, []
    for seed in range(20):
        rng = random.Random(seed)
        scores = [[rng.choice([0.0, 0.2, 0.6, 0.6, 0.8, 1.0]) for _ in range(6)] for _ in "ab"]
        records = [
            record(
                place, scores[0][place] if seed % 3 else 0.6, turns=rng.randint(1, 5),
                generated_tokens=rng.choice([40, 95, 120]),
                stop_reason=rng.choice([StopReason.ANSWERED, StopReason.LENGTH_LIMIT]),
                score_details={"turn_rewards": [0.0, rng.choice([0.0, 0.2])]}
                if seed % 3 == 0
                else {"parts": {name: {"weight": 0.5, "score": scores[at][place]}
                                for at, name in enumerate("ab")}},
            )
            for place in range(6)
        ]  # fmt: skip
        steps = {
            item.id: [Step(index=at, role=None, anchor=rng.choice("ab")) for at in range(item.turns)]
            for item in records
        }
        mean = 0.1 * rules.baseline_versions  # the mean score of a window of so many versions
        for item in decide_group(records, rules, random.Random(0), steps=steps, baseline=mean):
            for call in range(2):
                value = item.advantage
                if value is not None:
                    value = earned_advantage(value, item.turn_advantages, call)
                is_trained = value is not None and abs(value) >= rules.minimal_advantage
                is_trained = is_trained and not (rules.drop_zero_advantage and value == 0)
                found.append((is_trained, value if is_trained and loss.reads_advantage else None))
        found.append(sum(record.score > rules.right_threshold for record in records))  # the pass rate
    return found


def test_the_tables_have_every_flag() -> None:
    """A new flag comes here, with a value at which it changes something."""
    known = {item.name for group in (LossConfig, GroupConfig) for item in fields(group)}
    assert known - NAMES == LOSS.keys() | GROUP.keys()


@pytest.mark.parametrize("flag", [*LOSS, *GROUP])
@pytest.mark.parametrize("loss", sorted(LOSSES.names()))
def test_a_flag_changes_something_or_is_refused_with_a_hint(loss: str, flag: str) -> None:
    effect = learned if flag in LOSS else chosen
    acts: list[bool] = []
    refused: list[str | None] = []
    for value in (LOSS | GROUP)[flag]:
        needed = WITH.get(flag, {})
        try:
            without = with_loss(loss, needed)
            configs = with_loss(loss, {**needed, flag: value})
        except ConfigError as error:
            refused.append(error.hint)
            continue
        settings = [LossSettings.of_run(each) for each in (without, configs)]
        before, after = settings if flag in LOSS else [each[GroupConfig] for each in (without, configs)]
        if getattr(before, flag) == getattr(after, flag):
            continue  # the loss's own default
        acts.append(effect(configs) != effect(without))
    assert all(refused)
    assert not acts or any(acts), f"--{flag} is accepted with {loss}, and changes nothing"


@pytest.mark.parametrize("loss", sorted(LOSSES.names()))
@pytest.mark.parametrize(
    ("flag", "value", "needed", "acts"),
    [
        ("reference_model", "models/x", {}, None), ("reference_model", "models/x", {"kl_coef": 0.1}, True),
        ("out_of_date_decay", 0.5, {**WITH["out_of_date_decay"], "max_staleness": 0}, False),
        ("out_of_date_decay", 0.5, {**WITH["out_of_date_decay"], "sync_sampling": True}, False),
        ("importance_correction", "token_mask:0:inf", {}, False), ("importance_correction", ",", {}, False),
        ("staleness_policy", "decay", {"out_of_date_decay": 0.5}, None),
        ("staleness_policy", "mask", {}, True),
        ("advantage_whitening", "batch", {"drop_zero_advantage": False}, None),
        ("old_logprobs", "loglinear", {"max_staleness": 0}, False),
        ("old_logprobs", "loglinear", {"max_staleness": 0, "staleness_policy": "drop"}, False),
        ("old_logprobs", "version", {"max_staleness": 0}, False),
    ],
)  # fmt: skip
def test_flags_of_training_act_or_are_refused(
    loss: str, flag: str, value: Any, needed: Mapping[str, Any], acts: bool | None
) -> None:
    """None: it depends on the loss: on whether it reads the advantage, or compares with a reference."""
    declared = LOSSES.get(loss)
    if acts is None:
        acts = declared.compares if flag == "reference_model" else declared.reads_advantage
    if (flag == "old_logprobs" or "kl_coef" in needed) and not declared.from_policy:
        acts = False
    if acts:
        with_loss(loss, {**needed, flag: value})
        return
    with pytest.raises(ConfigError) as refused:
        with_loss(loss, {**needed, flag: value})
    assert refused.value.hint


@pytest.mark.parametrize("older", [{"oversample_groups": 2}, {"max_trained_count": 2}])
def test_tokens_become_old_on_policy_only_by_extra_groups_and_repetition(older: Mapping[str, Any]) -> None:
    narrowed = {"importance_weight_cap_ratio": 4.0, "out_of_date_decay": 0.5, "max_staleness": 0}
    with_loss("GRPO", {**narrowed, **older})
    for flags in (narrowed, {**narrowed, **older, "staleness_policy": "drop"}):
        with pytest.raises(ConfigError, match="older than"):
            with_loss("GRPO", flags)


def test_a_what_if_is_not_refused_for_flags_that_made_its_data() -> None:
    configs = Configs.of(GROUPS, {"loss_calculater": "DPO", "adv_scaling": 2.0}, ())
    check_loss(configs, {"loss_calculater"})
    with pytest.raises(
        ConfigError, match=r"--adv_scaling 2\.0 with --loss_calculater DPO: the loss reads no"
    ):
        check_loss(configs, {"adv_scaling"})


@pytest.mark.parametrize(
    ("name", "flags", "says"),
    [
        ("MINIRL", {"importance_correction": "tis:inf", "old_logprobs": "recompute"}, "neither drops nor"),
        ("MINIRL", {"skip_length_normalization": False, "loss_length_divisor": 5}, "not its mean"),
        ("KTO", {"kto_desirable_weight": 0.0, "kto_undesirable_weight": 0.0}, "nothing would be trained"),
        ("OPD", {"distill_coef": 0.0}, "OPD would train nothing"),
    ],
)
def test_values_with_which_a_loss_does_nothing_are_refused(
    name: str, flags: Mapping[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        with_loss(name, flags)
    assert refused.value.hint


def test_an_uncapped_weight_acts_on_a_loss_that_has_none() -> None:
    with_loss("GRPO", {"importance_correction": "tis:inf", "old_logprobs": "recompute"})


def correction(*flags: str) -> tuple[str, str]:
    configs = parsed(*flags)
    check_loss(configs)
    settings = LossSettings.of_run(configs)
    return settings.old_logprobs, settings.importance_correction


FP8 = ("--rollout_quantization", "fp8")


def test_the_default_correction_is_for_quantized_rollouts_only() -> None:
    assert correction() == ("behavior", "")
    assert correction(*FP8) == ("recompute", "tis:2")
    assert correction(*FP8, "--loss_calculater", "MINIRL") == ("recompute", "tis:2")


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        (["--importance_correction", "token_mask"], ("behavior", "token_mask")),
        (["--importance_correction", ""], ("behavior", "")),
        (["--old_logprobs", "recompute"], ("recompute", "")),
        (["--epsilon", "0.3"], ("behavior", "")),
        (["--loss_calculater", "DPPO"], ("behavior", "")),
        (["--loss_calculater", "CrossEntropy"], ("behavior", "")),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_is_given_stays(flags: list[str], kept: tuple[str, str]) -> None:
    assert correction(*FP8, *flags) == kept


def test_a_clip_that_several_updates_read_goes_with_the_correction() -> None:
    assert correction(*FP8, "--epsilon", "0.3", "--mini_batches", "2") == ("recompute", "tis:2")
