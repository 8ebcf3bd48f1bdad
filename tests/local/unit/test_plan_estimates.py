"""Estimated seconds of a step, and the services that they ask for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Qwen3Config

from agentrl.distributed.mesh import Layout
from agentrl.local.plan.memory import PlannedModel, open_model
from agentrl.local.plan.search import (
    PlannedServices,
    StepTime,
    Workload,
    estimate_step,
    parse_gpus,
    size_services,
)

WORK = Workload(
    groups=4, group_size=8, trajectory_tokens=4000, turns=10, trained_share=0.5,
    computed_tokens=128_000, max_tokens=4000, passes=1,
)  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> PlannedModel:
    """A model of 0.2 billion parameters."""
    Qwen3Config(
        vocab_size=32_000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=12,
        num_attention_heads=16, num_key_value_heads=8, head_dim=64, max_position_embeddings=8192,
    ).save_pretrained(tmp_path)  # fmt: skip
    return open_model(tmp_path, 4000)


def seconds(
    model: PlannedModel, layout: Layout, checkpointing: str = "none", *, always: bool = False
) -> StepTime:
    """The estimate for ``layout`` on H100s."""
    return estimate_step(
        model, WORK, layout, parse_gpus(f"{layout.world}xH100"), checkpointing=checkpointing,
        reduces_always=always, element_bytes=2, trained=1.0, mfu=0.4,
    )  # fmt: skip


def test_ranks_share_the_computation(model: PlannedModel) -> None:
    alone = seconds(model, Layout())
    assert alone.gather == alone.exchange == alone.bubble == 0
    for layout in (Layout(dp_shard=4), Layout(tp=4), Layout(cp=4), Layout(pp=4)):
        assert seconds(model, layout).compute == pytest.approx(alone.compute / 4, rel=0.01)


def test_each_dimension_costs_what_it_exchanges(model: PlannedModel) -> None:
    assert seconds(model, Layout(dp_shard=4)).gather > 0
    assert seconds(model, Layout(dp_shard=4), always=True).gather > seconds(model, Layout(dp_shard=4)).gather
    assert seconds(model, Layout(tp=4)).exchange > 0
    assert seconds(model, Layout(pp=4)).bubble == pytest.approx(seconds(model, Layout(pp=4)).compute * 3 / 32)
    assert seconds(model, Layout(), "full").compute == pytest.approx(seconds(model, Layout()).compute * 4 / 3)


def services(model: PlannedModel, step: float) -> PlannedServices:
    """The services of a step of ``step`` seconds."""
    gpu = parse_gpus("H100").gpu
    return size_services(model, WORK, step, gpu, request_tokens_per_second=50, tool_seconds=1)


def test_services_follow_the_rate_of_the_trainer(model: PlannedModel) -> None:
    slow, fast = services(model, 32.0), services(model, 3.2)
    assert slow.trajectories_per_second == 1
    assert slow.turns_per_second == 10
    assert slow.generated_per_second == 2000
    assert slow.in_flight == 2000 // 50 + 10
    assert slow.sampler_cores == pytest.approx(10 * 1.4e-3)  # the figure of docs/benchmarks.md
    assert slow.samplers == slow.engines == 1
    assert fast.sampler_cores == pytest.approx(10 * slow.sampler_cores)
    assert fast.stored_gib_per_hour == pytest.approx(10 * slow.stored_gib_per_hour)


def test_an_engine_gets_the_gpus_that_its_weights_need(model: PlannedModel) -> None:
    large = replace(model, parameters=70_000_000_000)
    assert services(large, 32.0).engine_tp > services(model, 32.0).engine_tp == 1
