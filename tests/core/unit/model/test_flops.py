"""FLOPs, attention pairs and peaks, compared with numbers counted by hand and by torch."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import chains, packed, tiny_model, tree
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, Qwen3MoeConfig

from agentrl.model.attention import build_executor
from agentrl.model.flops import (
    Backward,
    DevicePeak,
    ModelShape,
    Stopwatch,
    attention_pairs,
    device_peak,
    stated_peak,
)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_flops_are_those_that_torch_counts(kind: str) -> None:
    model, forest = tiny_model(kind), packed(chains())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        build_executor(model, "sdpa")(forest)
    shape = ModelShape.of(model.config)
    dense = forest.tokens**2
    counted = counter.get_total_flops()
    attention = 4 * dense * shape.layers * shape.heads * shape.head_dim
    linear = 2 * forest.tokens * shape.layer_weights
    assert counted in (linear, linear + attention)
    assert shape.step_flops(forest.tokens, 0, dense) == 3 * (linear + attention)


def test_products_that_a_frozen_weight_saves_do_not_count() -> None:
    model, forest = tiny_model("llama"), packed(chains())
    assert Backward.of(model) == Backward()
    model.requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(True)
    upper = Backward.of(model)
    assert (upper.inputs, upper.head) == (0.5, False)
    assert 0 < upper.weights < 0.5
    model.model.layers[1].requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)
    inputs = Backward.of(model)
    assert inputs == Backward(inputs=1.0, weights=0.0, head=False)
    shape = ModelShape.of(model.config)
    with FlopCounterMode(display=False) as counter:
        build_executor(model, "sdpa")(forest).sum().backward()
    counted = counter.get_flop_counts()["Global"]
    linear = sum(flops for operation, flops in counted.items() if "attention" not in str(operation))
    assert linear == shape.step_flops(forest.tokens, 0, 0, inputs)


def test_the_head_counts_for_the_tokens_that_pass_it() -> None:
    shape = ModelShape.of(tiny_model("llama").config)
    assert shape.step_flops(0, 10, 0) == 6 * 10 * shape.hidden * shape.vocabulary


def test_of_a_mixture_only_the_chosen_experts_count() -> None:
    config = Qwen3MoeConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_experts=8,
        num_experts_per_tok=2, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    assert ModelShape.of(config).layer_weights == 32 * 8 * 2 * (4 + 2) + 3 * 32 * 16 * 2 + 32 * 8


def test_a_plain_feed_forward_has_two_matrices() -> None:
    shape = ModelShape.of(GPT2Config(n_embd=32, n_layer=1, n_head=4))
    assert shape.layer_weights == 4 * 32 * 32 + 2 * 32 * 128


def test_pairs_are_the_ones_of_the_mask() -> None:
    forest = packed([tree(0), *chains(1, 2)])
    index = np.arange(forest.tokens)
    sees = (index[None, :] <= index[:, None]) & (index[:, None] < forest.subtree_end[None, :])
    assert attention_pairs(forest) == int(sees.sum())


def test_devices() -> None:
    assert stated_peak("NVIDIA H100 80GB HBM3") == 989e12
    assert stated_peak("NVIDIA H100 PCIe") == 756e12
    assert stated_peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert stated_peak("NVIDIA L40") == 181e12
    for other in ("NVIDIA RTX A1000", "NVIDIA RTX A4000", "NVIDIA RTX A4500", "A card of tomorrow"):
        assert stated_peak(other) is None
    assert device_peak(torch.device("meta"), torch.float32).share(1e9) is None


@pytest.mark.parametrize("speed", [1e6, 1e9, 1e13])
def test_the_peak_is_measured_on_products_of_layers_in_a_second(
    monkeypatch: pytest.MonkeyPatch, speed: float
) -> None:
    """At any speed: 1e6 FLOP/s is a CPU that emulates bfloat16 badly."""
    now, measured = [0.0], []

    def linear(inputs: torch.Tensor, weight: torch.Tensor) -> None:
        assert inputs.dtype == weight.dtype == torch.bfloat16
        measured.append(2 * inputs.numel() * weight.shape[0])
        now[0] += measured[-1] / speed

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    peak = device_peak.__wrapped__(torch.device("cpu"), torch.bfloat16)
    assert peak.flops == pytest.approx(speed, rel=1e-3)
    assert now[0] <= 1.0 or len(measured) == 1


def test_the_peak_of_a_cpu_is_measured_and_no_share_is_above_1() -> None:
    peak = replace(device_peak(torch.device("cpu"), torch.float32))
    assert peak.flops > 1e8
    assert peak.share(peak.flops / 4) == pytest.approx(0.25)
    faster = 2 * peak.flops
    assert peak.share(faster) == 1.0
    assert peak.share(faster / 4) == pytest.approx(0.25)


def test_more_than_a_data_sheet_states_is_no_share() -> None:
    assert DevicePeak(1e12).share(5e11) == 0.5
    assert DevicePeak(1e12).share(2e12) is None
    assert DevicePeak(None).share(1.0) is None


def test_laps_add_up_by_name() -> None:
    watch = Stopwatch(torch.device("cpu"))
    for name in ("one", "two", "one"):
        watch.lap(name)
    assert set(watch.seconds) == {"one", "two"}
    assert min(watch.seconds.values()) >= 0
