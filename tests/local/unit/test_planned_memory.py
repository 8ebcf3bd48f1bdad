"""The closed forms of a step's memory; ``tests/fake_gpu`` compares more layouts with simulated steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_gpu.rank_step import StepSpec, measure_step, planned_memory
from real_step import real_peak
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from agentrl.config.schema import AdapterConfig, MemoryConfig, OptimConfig
from agentrl.distributed.mesh import Layout
from agentrl.local.plan.memory import PARTS
from agentrl.model.flops import Precision
from agentrl.model.logprobs import ForwardOptions

SIZES: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True,
}  # fmt: skip


def spec(config: PretrainedConfig | None = None, **changes: Any) -> StepSpec:
    """Two micro-batches of 1024 tokens in two chains."""
    plain = StepSpec(
        config=config or Qwen3Config(**SIZES), precision=Precision(), max_tokens=1024, chain_tokens=512,
        trained_tokens=512, micro_batches=2, on_gpu=False, fused_norms=False,
    )  # fmt: skip
    return replace(plain, **changes)


SPECS = {
    "none": spec(), "single": spec(micro_batches=1), "full": spec(checkpointing="full"),
    "selective": spec(checkpointing="selective"), "llama": spec(LlamaConfig(**SIZES)),
    "lora": spec(adapter=AdapterConfig(lora_rank=8)),
    "frozen": spec(optim=OptimConfig(freeze="embed_tokens")),
    "experts": spec(
        Qwen3MoeConfig(**SIZES, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("planned", SPECS.values(), ids=SPECS)
def test_the_peak_is_that_of_a_real_step(planned: StepSpec) -> None:
    found = planned_memory(planned, Layout())
    assert sum(found.parts.values()) == found.peak
    assert set(found.parts) <= set(PARTS)
    assert found.peak == pytest.approx(real_peak(planned), rel=0.1)


@pytest.mark.parametrize(
    "layout", [Layout(dp_shard=2), Layout(tp=2), Layout(cp=2), Layout(pp=2)], ids=["fsdp", "tp", "cp", "pp"]
)
def test_the_peak_of_a_layout_is_that_of_a_simulated_step(layout: Layout) -> None:
    planned = spec()
    assert planned_memory(planned, layout).peak == pytest.approx(measure_step(planned, layout).peak, rel=0.1)


def part(name: str, planned: StepSpec, layout: Layout | None = None) -> int:
    return planned_memory(planned, layout or Layout()).parts.get(name, 0)


def test_what_each_flag_changes() -> None:
    plain, shards = spec(), Layout(dp_shard=4)
    assert part("parameters", plain, shards) == pytest.approx(part("parameters", plain) / 4, rel=0.01)
    offloaded = spec(memory=MemoryConfig(optimizer_offload=True))
    assert part("optimizer states", offloaded) < part("optimizer states", plain) / 2
    last = spec(memory=MemoryConfig(gradient_reduction="last"))
    every = spec(memory=MemoryConfig(gradient_reduction="every"))
    assert part("gradients", last, shards) == pytest.approx(4 * part("gradients", every, shards), rel=0.01)
    assert part("activations", spec(fused_norms=True)) < part("activations", plain)
    entropy = spec(options=ForwardOptions(entropy_gradient=True))
    assert part("logits and loss", entropy) > 1.5 * part("logits and loss", plain)
    assert part("reference model", spec(reference=1.0)) == part("parameters", plain)
    kept = [planned_memory(spec(checkpointing=mode), Layout()).peak for mode in ("none", "selective", "full")]
    assert kept == sorted(kept, reverse=True)
    full = spec(checkpointing="full")
    moved = replace(full, memory=MemoryConfig(activation_offload=True))
    assert part("activations", moved) < part("activations", full)
