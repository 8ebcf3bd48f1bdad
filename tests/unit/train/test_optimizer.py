from __future__ import annotations

import pytest
from torch import nn

from agentrl.config.schema import OptimConfig
from agentrl.errors import ConfigError
from agentrl.train.optimizer import AdamArguments, build_optimizer, freeze, parse_optim_args


def test_optim_args_are_read() -> None:
    assert parse_optim_args("beta1=0.9, beta2=0.98") == AdamArguments(beta1=0.9, beta2=0.98)
    assert parse_optim_args("") == AdamArguments()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("beta3=0.9", "beta3"),
        ("beta1", "beta1"),
        ("beta1=x", "beta1 is 'x'"),
        ("beta2=1.0", "beta2 is 1.0"),
        ("eps=0", "eps is 0"),
        ("eps=nan", "eps is nan"),
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
    [("layers", "finds none of the model's 4"), ("(", "no regular expression"), (".", "nothing to train")],
)
def test_wrong_patterns_are_told(pattern: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        freeze(attention_model(), pattern)
