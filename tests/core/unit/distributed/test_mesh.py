from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from agentrl.config.schema import TrainConfig
from agentrl.distributed.apply import check_divides
from agentrl.distributed.fsdp import clip_gradients
from agentrl.distributed.mesh import Layout, plan_layout
from agentrl.errors import ConfigError


def test_dp_shard_is_what_the_others_leave() -> None:
    config = TrainConfig(dp_replicate_size=2, tp_size=2)
    assert plan_layout(config, 8) == Layout(dp_replicate=2, dp_shard=2, tp=2)
    assert plan_layout(TrainConfig(), 1) == Layout()


def test_an_equation_that_does_not_hold_is_stated() -> None:
    with pytest.raises(ConfigError, match="pp 1 × dp_replicate 1 × dp_shard × cp 1 × ep 1 × tp 4 = 6"):
        plan_layout(TrainConfig(tp_size=4), 6)


@pytest.mark.parametrize(("size", "what"), [(3, "4 attention heads"), (4, "2 key-value heads")])
def test_heads_that_do_not_split_are_refused(size: int, what: str) -> None:
    config = tiny_model("llama", vocab_size=60).config
    with pytest.raises(ConfigError, match=f"{what}, which --tp_size {size} does not divide"):
        check_divides("Llama", config, size)


def test_a_vocabulary_that_does_not_split_names_the_size_that_would() -> None:
    with pytest.raises(ConfigError, match=r"61 ids of vocabulary[\s\S]*to 62"):
        check_divides("Llama", tiny_model("llama").config, 2)


def test_clipping_without_meshes_is_that_of_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.zeros(n)) for n in (3, 5)] for _ in range(2))
    for mine, other in zip(ours, theirs, strict=True):
        mine.grad = torch.randn_like(mine)
        other.grad = mine.grad.clone()
    expected = float(torch.nn.utils.clip_grad_norm_(theirs, 0.5))
    assert clip_gradients(ours, 0.5) == pytest.approx(expected)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
