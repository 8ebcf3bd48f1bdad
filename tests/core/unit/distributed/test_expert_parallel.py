from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model
from torch import nn
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from agentrl.distributed.expert_parallel import (
    check_experts,
    exchange,
    find_experts,
    is_experts,
    own_pairs,
    run_rows,
)
from agentrl.distributed.mesh import Layout
from agentrl.errors import ConfigError

IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]


def test_the_experts_of_each_layer_are_found_and_nothing_else() -> None:
    found = find_experts(tiny_model("qwen3_moe"))
    assert list(found) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert find_experts(tiny_model("qwen3")) == {}


def test_experts_that_are_called_in_another_way_are_none() -> None:
    config = Llama4TextConfig(hidden_size=8, intermediate_size=8, num_local_experts=4)
    assert not is_experts(Llama4TextExperts(config))


def test_experts_with_a_parameter_that_all_of_them_have_in_common_are_none() -> None:
    experts = find_experts(tiny_model("qwen3_moe"))["model.layers.0.mlp.experts"]
    assert is_experts(experts)
    experts.norm = nn.LayerNorm(experts.num_experts)
    assert not is_experts(experts)


@pytest.mark.parametrize("layout", [Layout(ep=3), Layout(ep=16), Layout(tp=3), Layout(ep=4, tp=4)])
def test_experts_that_do_not_divide_are_refused(layout: Layout) -> None:
    told = f"8 experts in [\\s\\S]*--ep_size {layout.ep} × --tp_size {layout.tp} = {layout.ep * layout.tp} "
    with pytest.raises(ConfigError, match=told):
        check_experts(tiny_model("qwen3_moe"), layout)


def test_a_layout_that_divides_the_experts_is_taken() -> None:
    check_experts(tiny_model("qwen3_moe"), Layout(ep=4, tp=2))


def test_a_dense_model_has_no_experts_to_share() -> None:
    model = tiny_model("qwen3")
    check_experts(model, Layout(tp=2))
    with pytest.raises(ConfigError, match=r"--ep_size 2: Qwen3ForCausalLM[\s\S]*set --ep_size 1"):
        check_experts(model, Layout(ep=2))


@pytest.mark.parametrize(("count", "tp"), [(8, 1), (4, 1), (2, 2), (1, 4), (1, 8)])
def test_each_pair_is_sent_by_one_process_of_tp_and_lies_by_expert(count: int, tp: int) -> None:
    expert = torch.randint(8, (40,), generator=torch.Generator().manual_seed(0))
    pairs = [own_pairs(expert, count, tp, rank) for rank in range(tp)]
    assert torch.cat(pairs).sort().values.tolist() == list(range(40))
    for rank, mine in enumerate(pairs):
        places = list(zip(expert[mine].tolist(), mine.tolist(), strict=True))
        assert places == sorted(places)
        assert {place // count % tp for place, _ in places} <= {rank}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_go_through_their_experts(implementation: str) -> None:
    experts = _experts(implementation)
    rows = torch.randn(6, 32)
    index = torch.tensor([0, 0, 3, 3, 3, 7])
    expected = torch.cat([
        experts(row[None], chosen[None, None], torch.ones(1, 1))
        for row, chosen in zip(rows, index, strict=True)
    ])  # fmt: skip
    torch.testing.assert_close(run_rows(experts, rows, index), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_a_row_every_parameter_gets_a_gradient_of_zeros(implementation: str) -> None:
    experts = _experts(implementation)
    rows = torch.zeros(0, 32, requires_grad=True)
    result = run_rows(experts, rows, torch.zeros(0, dtype=torch.int64))
    assert result.shape == (0, 32)
    result.sum().backward()
    assert rows.grad is not None
    for parameter in experts.parameters():
        assert not parameter.grad.any()


def test_a_process_that_has_all_experts_exchanges_nothing() -> None:
    rows = torch.zeros(3, 2)
    assert exchange(rows, [3], [3], None) is rows  # type: ignore[arg-type]


def _experts(implementation: str) -> nn.Module:
    model = tiny_model("qwen3_moe", experts_implementation=implementation)
    return find_experts(model)["model.layers.0.mlp.experts"]  # type: ignore[no-any-return]
