"""Simulated steps; ``scripts/bench/plan.py`` compares them with real ones in six layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from real_step import real_peak
from tiny_models import tiny_model

from agentrl.config.schema import LossConfig
from agentrl.distributed.mesh import Layout
from agentrl.errors import ConfigError
from agentrl.model.flops import Precision
from agentrl.model.logprobs import ForwardOptions
from fake_gpu.layer_kinds import Depth, extrapolate
from fake_gpu.memory_tracker import Peak, Segment
from fake_gpu.rank_step import StepSpec, measure_step


def spec(kind: str = "qwen3", **changes: Any) -> StepSpec:
    """One micro-batch of 128 tokens in two chains."""
    config = tiny_model(kind, vocab_size=64).config
    plain = StepSpec(
        config=config,
        precision=Precision(),
        max_tokens=128,
        chain_tokens=64,
        trained_tokens=64,
        on_gpu=False,
        fused_norms=False,
    )
    return replace(plain, **changes)


def test_the_simulated_peak_is_that_of_a_real_step() -> None:
    planned = spec()
    found = measure_step(planned, Layout())
    assert sum(found.parts.values()) == found.peak
    assert found.peak == pytest.approx(real_peak(planned), rel=0.1)


def test_a_loss_with_a_reference_model_and_an_entropy_bonus_is_simulated() -> None:
    planned = spec(
        loss=LossConfig(kl_coef=0.1, entropy_coef=0.1), options=ForwardOptions(entropy_gradient=True)
    )
    assert measure_step(planned, Layout()).peak > measure_step(spec(), Layout()).peak


def test_fsdp_shards_weights_and_moments_and_leaves_no_process_group() -> None:
    planned = spec(max_tokens=64, trained_tokens=16)
    whole, half = (measure_step(planned, layout).parts for layout in (Layout(), Layout(dp_shard=2)))
    for part in ("parameters", "optimizer states"):
        assert half[part] == pytest.approx(whole[part] / 2, rel=0.05)
    assert half["gathered parameters"] > 0
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(), {"checkpointing": "full", "on_gpu": True}),
        (Layout(dp_shard=2, tp=2), {"micro_batches": 2}),
        (Layout(pp=2), {"micro_batches": 3, "checkpointing": "selective"}),
    ],
)
def test_extrapolated_layers_need_what_simulated_ones_do(layout: Layout, changes: dict[str, Any]) -> None:
    planned = spec(max_tokens=64, trained_tokens=16, **changes)
    planned.config.num_hidden_layers = layers = 5 * layout.pp  # one more than are simulated
    planned.config.layer_types = ["full_attention"] * layers
    found, whole = measure_step(planned, layout), measure_step(planned, layout, all_layers=True)
    assert found.peak == whole.peak
    for part in {*found.parts, *whole.parts}:
        difference = found.parts.get(part, 0) - whole.parts.get(part, 0)
        assert abs(difference) < 0.01 * whole.peak, part


def test_each_kind_of_layer_is_extrapolated() -> None:
    asked: list[Depth | None] = []

    def simulate(depth: Depth | None) -> dict[Segment, Peak]:
        asked.append(depth)
        dense, sparse = depth or (1, 40)
        return {("forward",): Peak({"weights": 5 + 3 * dense + 7 * sparse}, "activations")}

    assert extrapolate([0] + [1] * 40, simulate)[("forward",)].total == 5 + 3 + 7 * 40
    assert asked == [(1, 2), (1, 3)]


def test_tensor_parallel_shapes_are_not_memory() -> None:
    """DTensor infers shapes with tensors as large as the whole embedding."""
    planned = spec(max_tokens=64, trained_tokens=16)
    planned.config.vocab_size = 40_000
    planned.config.tie_word_embeddings = True
    whole, half = (measure_step(planned, layout) for layout in (Layout(), Layout(tp=2)))
    assert half.peak < 0.75 * whole.peak


def test_a_layout_that_the_trainer_refuses_is_refused() -> None:
    with pytest.raises(ConfigError, match="which --tp_size 4 does not divide"):
        measure_step(spec(), Layout(tp=4))
    assert not dist.is_initialized()
