"""FLOPs, pairs and efficiencies, against figures counted by hand and by torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import chains, packed, tiny_model, trajectory, tree
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, Qwen3MoeConfig

from agentrl.data.prefix_merging import merge_prefixes
from agentrl.model.attention.executor import build_executor
from agentrl.train.clock import Stopwatch, peak_flops
from agentrl.train.throughput import (
    ModelShape,
    StepSeconds,
    attention_pairs,
    call_tokens,
    sharing_metrics,
    step_metrics,
    table_peak,
)

SECONDS = StepSeconds(forward=1.0, backward=2.0, optimizer=1.0)


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


def test_calls_as_rows_of_their_own() -> None:
    rng = np.random.default_rng(0)
    chain = trajectory(rng, [(0, 20, -1)], [(4, 8), (11, 20)])
    assert call_tokens([chain]) == 8 + 20
    assert call_tokens([tree()]) == 6 + (10 + 5) + (10 + 4) + (6 + 7)
    two_versions = replace(chain, spans=tuple(replace(span, call=0) for span in chain.spans))
    assert call_tokens([two_versions]) == 20


def test_a_step() -> None:
    data = [tree(0), tree(0)]
    shared = merge_prefixes(packed(data))
    shape = ModelShape.of(tiny_model("llama").config)
    metrics = step_metrics([shared], SECONDS, shape, 1e9, positions=2 * shared.tokens)
    assert metrics["tokens_per_second"] == pytest.approx(shared.tokens / 4)
    assert metrics["padding_efficiency"] == 0.5
    flops = shape.step_flops(shared.tokens, shared.trainable_tokens, attention_pairs(shared))
    assert metrics["mfu"] == pytest.approx(flops / 4 / 1e9)
    halved = step_metrics([shared], SECONDS, shape, 1e9, sharers=2)
    assert halved["mfu"] == pytest.approx(metrics["mfu"] / 2)
    assert metrics["seconds_forward_backward"] == 3.0
    saved = sharing_metrics(metrics | {"tokens": shared.tokens}, call_tokens(data))
    assert saved["unique_tokens"] == shared.tokens < 52
    assert saved["total_tokens"] == 96
    assert saved["sharing_ratio"] == pytest.approx(96 / shared.tokens)
    assert saved["total_tokens_per_second"] == pytest.approx(24)


def test_devices() -> None:
    assert table_peak("NVIDIA H100 80GB HBM3") == 989e12
    assert table_peak("NVIDIA H100 PCIe") == 756e12
    assert table_peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert table_peak("A card of tomorrow") is None
    assert peak_flops(torch.device("cpu"), torch.float32) > 1e8


def test_laps_add_up_by_name() -> None:
    watch = Stopwatch(torch.device("cpu"))
    for name in ("one", "two", "one"):
        watch.lap(name)
    assert set(watch.seconds) == {"one", "two"}
    assert min(watch.seconds.values()) >= 0
