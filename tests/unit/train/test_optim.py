from __future__ import annotations

import pytest
import torch
from torch import nn

from agentrl.config.schema import OptimConfig
from agentrl.errors import ConfigError
from agentrl.train.optim import AdamArguments, build_optimizer, build_scheduler, parse_optim_args


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


def rates(kind: str, total: int | None, steps: int, warmup: int = 0) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    config = OptimConfig(lr_scheduler_type=kind, warmup_steps=warmup)  # type: ignore[arg-type]
    scheduler = build_scheduler(optimizer, config, total)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_schedules() -> None:
    assert rates("constant", None, 3) == [1.0, 1.0, 1.0]
    assert rates("constant", None, 3, warmup=1) == pytest.approx([0.5, 1.0, 1.0])
    assert rates("linear", 4, 5) == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert rates("cosine", 4, 5) == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466, 0.0])


def test_a_falling_schedule_needs_an_end() -> None:
    with pytest.raises(ConfigError, match="cosine has no end"):
        rates("cosine", None, 1)
