"""AdamW's arguments and groups, frozen parameters, and learning rates by step."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, get_scheduler
from transformers.trainer_utils import SchedulerType

from agentrl.config.schema import OptimConfig
from agentrl.errors import ConfigError
from agentrl.train.optimizer import (
    AdamArguments,
    build_optimizer,
    build_scheduler,
    freeze,
    parse_optim_args,
    schedule_length,
)

KINDS = get_args(get_type_hints(OptimConfig)["lr_scheduler_type"])
OWN_METRIC = {"reduce_lr_on_plateau", "greedy"}
ANOTHER_WARM_UP = {"cosine_warmup_with_min_lr"}


def test_optim_args_are_read() -> None:
    assert parse_optim_args("beta1=0.9, beta2=0.98") == AdamArguments(beta1=0.9, beta2=0.98)
    assert parse_optim_args("") == AdamArguments()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("beta3=0.9", "unknown key 'beta3'\n.*did you mean 'beta"),
        ("beta1", "beta1 is ''; it must be a number"),
        ("beta1=x", "beta1 is 'x'"),
        ("beta2=1.0", "beta2 is '1.0'; it must be below 1"),
        ("eps=0", "eps is '0'; it must be above 0"),
        ("eps=nan", "eps is 'nan'; it must be a finite number"),
    ],
)
def test_wrong_optim_args_are_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_optim_args(text)


def test_norms_and_biases_are_not_decayed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1, learning_rate=0.5))
    decayed, spared = optimizer.param_groups
    assert decayed["weight_decay"] == 0.1
    assert [p.dim() for p in decayed["params"]] == [2]
    assert spared["weight_decay"] == 0.0
    assert len(spared["params"]) == 3


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
UNDECAYED = {
    "gpt_oss": (
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        "experts.down_proj_bias experts.gate_up_proj_bias input_layernorm.weight k_proj.bias norm.weight"
        " o_proj.bias post_attention_layernorm.weight q_proj.bias router.bias self_attn.sinks v_proj.bias",
    ),
    "cohere": ({"use_qk_norm": True}, "input_layernorm.weight k_norm.weight norm.weight q_norm.weight"),
    "qwen2": (
        {},
        "input_layernorm.weight k_proj.bias norm.weight post_attention_layernorm.weight q_proj.bias"
        " v_proj.bias",
    ),
    "mamba": ({"state_size": 4}, "conv1d.bias dt_proj.bias mixer.A_log mixer.D norm.weight norm_f.weight"),
}
"""Model type → (arguments of its config, ends of the names of its parameters without weight decay)."""


@pytest.mark.parametrize("kind", UNDECAYED)
def test_norms_and_biases_of_any_shape_are_not_decayed(kind: str) -> None:
    arguments, expected = UNDECAYED[kind]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **arguments))
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1))
    spared = {id(p) for group in optimizer.param_groups if not group["weight_decay"] for p in group["params"]}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in spared]
    assert sorted({".".join(name.split(".")[-2:]) for name in names}) == expected.split()


def attention_model() -> nn.Module:
    model = nn.Module()
    model.embed, model.head, model.proj = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False), nn.Linear(3, 3)
    model.head.weight = model.embed.weight
    return model


def test_frozen_parameters_are_counted_and_left_out_of_the_optimizer() -> None:
    model = attention_model()
    assert freeze(model, None) == 0
    assert freeze(model, r"^head\.|bias$") == 7 * 3 + 3
    assert not model.embed.weight.requires_grad
    optimizer = build_optimizer(model, OptimConfig())
    assert [p for group in optimizer.param_groups for p in group["params"]] == [model.proj.weight]


@pytest.mark.parametrize(
    ("pattern", "says"),
    [("layers", "finds none of the model's 4"), ("(", "not a regular expression"), (".", "nothing to train")],
)
def test_wrong_patterns_are_told(pattern: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        freeze(attention_model(), pattern)


def run(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


def rates(kind: str, total: int | None, steps: int, **flags: Any) -> list[float]:
    optimizer = sgd()
    config = OptimConfig(lr_scheduler_type=kind, learning_rate=1.0, **flags)  # type: ignore[arg-type]
    return run(build_scheduler(optimizer, config, total), optimizer, steps)


def test_every_schedule_of_transformers_that_needs_no_metric_is_offered() -> None:
    assert set(KINDS) == {kind.value for kind in SchedulerType} - OWN_METRIC - ANOTHER_WARM_UP


ARGUMENTS = {"cosine_with_min_lr": {"min_lr_rate": 0.1}, "warmup_stable_decay": {"num_decay_steps": 3}}


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("total", [4, 5, 8, 21])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_step_after_warm_up_has_the_rate_of_transformers(kind: str, total: int, warmup: int) -> None:
    given = {name: min(value, total - warmup) for name, value in ARGUMENTS.get(kind, {}).items()}
    if kind == "constant":
        warmup = 0  # transformers' constant schedule has none
    optimizer = sgd()
    theirs = run(
        get_scheduler(kind, optimizer, warmup, total, scheduler_specific_kwargs=given), optimizer, total
    )
    ours = rates(kind, total, total, warmup_steps=warmup, lr_scheduler_kwargs=json.dumps(given))
    assert ours[warmup:] == pytest.approx(theirs[warmup:], rel=1e-9)
    assert ours[:warmup] == pytest.approx([(step + 1) / (warmup + 1) for step in range(warmup)])


@pytest.mark.parametrize("total", [1, 2, 3, 5, 10, 11, 40])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_step_learns_and_a_falling_curve_falls_also_in_few_steps(kind: str, total: int) -> None:
    given = json.dumps({"min_lr_rate": 0.1} if kind == "cosine_with_min_lr" else {})
    for warmup in ({}, {"warmup_ratio": 0.2}, {"warmup_steps": total}):
        assert min(rates(kind, total, total + 2, lr_scheduler_kwargs=given, **warmup)) > 0.0
    falls = total > 1 and not kind.startswith("constant")
    assert (rates(kind, total, total, lr_scheduler_kwargs=given)[-1] < 1.0) == falls


@pytest.mark.parametrize(
    ("items", "per_step", "passes", "expected"),
    [(5, 2, 1, 3), (4, 2, 2, 4), (4, 2, 1, 2), (1, 4, 1, 1), (5, 2, 3, 8), (0, 4, 1, 1)],
)
def test_a_rest_that_fills_no_step_is_a_step_of_the_schedule(
    items: int, per_step: int, passes: int, expected: int
) -> None:
    assert schedule_length(items, per_step, passes) == expected


def test_schedules() -> None:
    assert rates("constant", None, 3) == [1.0, 1.0, 1.0]
    assert rates("constant", None, 3, warmup_steps=1) == pytest.approx([0.5, 1.0, 1.0])
    assert rates("linear", 4, 6) == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.25, 0.25])
    assert rates("linear", 8, 4, warmup_ratio=0.25) == pytest.approx([1 / 3, 2 / 3, 1.0, 5 / 6])
    assert rates("cosine", 4, 5) == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466, 0.1464466], abs=1e-7)
    assert rates("warmup_stable_decay", 20, 20)[:19] == [1.0] * 19
    assert rates("warmup_stable_decay", 20, 20)[19] == 0.5
    assert rates("inverse_sqrt", None, 17, warmup_steps=4)[16] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("kind", "total", "flags", "says"),
    [
        ("cosine", None, {}, "cosine has no end"),
        ("constant", None, {"warmup_ratio": 0.1}, "number of steps that is unknown"),
        ("cosine_with_min_lr", 9, {}, "min_lr"),
        ("linear", 9, {"lr_scheduler_kwargs": '{"cycles": 2}'}, "cycles"),
        ("constant", 9, {"lr_scheduler_kwargs": '{"num_cycles": 2}'}, "num_cycles, which .* constant"),
        ("warmup_stable_decay", 9, {"lr_scheduler_kwargs": '{"warmup_type": "cosine"}'}, "warmup_type"),
        ("linear", 9, {"lr_scheduler_kwargs": "[1]"}, "lr_scheduler_kwargs is"),
        ("linear", 9, {"lr_scheduler_kwargs": "{"}, "lr_scheduler_kwargs is"),
        ("linear", 9, {"warmup_ratio": 1.0}, "warmup_ratio is 1.0"),
        ("linear", 9, {"warmup_ratio": 0.1, "warmup_steps": 2}, "set the same thing"),
    ],
)
def test_wrong_schedules_are_named(kind: str, total: int | None, flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        rates(kind, total, 1, **flags)
