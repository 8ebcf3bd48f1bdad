"""The models and layouts that train a step on fake GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from agentrl.config.schema import AdapterConfig, LossConfig, MemoryConfig, OptimConfig
from agentrl.model.flops import Precision
from fake_gpu.rank_step import StepSpec

LAYERS, HIDDEN, INNER, VOCABULARY = 3, 256, 512, 4096
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
EXPERTS, CHOSEN, EXPERT_INNER = 32, 4, 128
TOKENS, BATCHES = 1024, 2
TRAINED = TOKENS // 2
RANK = 8
"""Of LoRA."""

LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    1: {"one": {}},
    8: {
        "fsdp": {"dp_shard": 8},
        "hsdp": {"dp_replicate": 2, "dp_shard": 4},
        "tp": {"tp": 2, "dp_shard": 4},
        "cp": {"cp": 2, "dp_shard": 4},
        "pp": {"pp": 2, "dp_shard": 4},
        "ep": {"ep": 4, "dp_shard": 2},
    },
    64: {
        "fsdp": {"dp_shard": 64},
        "ep×tp": {"ep": 8, "tp": 2, "dp_shard": 4},
        "tp×cp": {"tp": 4, "cp": 2, "dp_shard": 8},
    },
}
"""World → name → sizes: each kind of split, and two at once, of different sizes, by which collectives differ.

64 ranks are more than a model has experts, and an adapter rows.
"""
LARGE = {
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32},
    "32b": {"hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64},
}
"""Shapes of Qwen3-8B, of 36 layers, and Qwen3-32B, of 64."""
LARGE_TOKENS = 32_768
MODELS = ("dense", "moe", "lora", "frozen", "reference")
_WHOLE_LAYERS = ("one", "fsdp", "hsdp", "cp")
"""The layouts in which adapters are trained. The others are refused."""
_MIXTURES = ("moe", "frozen", "reference")
"""The models that ranks of ``ep`` train, as mixtures of experts. The others are refused."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step that one rank trains."""

    model: str
    """One of ``MODELS``, or of ``LARGE``."""
    layout: dict[str, int] = field(default_factory=dict)
    """The fields of ``Layout``."""
    rank: int = 0
    checkpointing: str = "full"
    offload: bool = False
    """Whether the host's memory keeps what checkpointing saves."""
    layers: int = 0
    """Of a model in ``LARGE``, from which few are run and the others extrapolated."""
    planned: bool = False
    """Whether ``agentrl plan`` is asked too."""

    @property
    def is_mixture(self) -> bool:
        """Whether the model is a mixture of experts: ``moe``, and each that ranks of ``ep`` train."""
        return self.model == "moe" or self.layout.get("ep", 1) > 1


def layouts(model: str, world: int) -> list[str]:
    """Return the names of the layouts of ``world`` ranks in which ``model`` is trained."""
    return [
        name
        for name in LAYOUTS[world]
        if ("ep" not in name or model in _MIXTURES) and (model != "lora" or name in _WHOLE_LAYERS)
    ]


def model_config(case: Case, layers: int = LAYERS) -> Any:
    """Return the Hugging Face configuration of the model of ``case``."""
    shape: dict[str, Any] = {
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY, "tie_word_embeddings": False,
    }  # fmt: skip
    if case.is_mixture:
        mixture = {
            "num_experts": EXPERTS,
            "num_experts_per_tok": CHOSEN,
            "moe_intermediate_size": EXPERT_INNER,
        }
        return Qwen3MoeConfig(**shape, **mixture, norm_topk_prob=True)
    if case.model in LARGE:
        shape |= {**LARGE[case.model], "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
    return Qwen3Config(**shape, max_position_embeddings=LARGE_TOKENS)


def step_spec(case: Case, layers: int = 0) -> StepSpec:
    """Return the step of ``case``: the default precision of a GPU, gradients reduced in each micro-batch."""
    tokens = LARGE_TOKENS if case.model in LARGE else TOKENS
    frozen = r"embed_tokens|\.mlp\." if case.model == "frozen" else None
    return StepSpec(
        config=model_config(case, layers or LAYERS),
        precision=Precision(products=torch.bfloat16),
        max_tokens=tokens,
        chain_tokens=tokens // 2,
        trained_tokens=TRAINED,  # more would be more chunks of logits, one after the other
        micro_batches=BATCHES,
        checkpointing=case.checkpointing,  # type: ignore[arg-type]
        memory=MemoryConfig(gradient_reduction="every", activation_offload=case.offload),
        optim=OptimConfig(freeze=frozen),
        adapter=AdapterConfig(lora_rank=RANK if case.model == "lora" else 0),
        loss=LossConfig(kl_coef=0.1 if case.model == "reference" else 0.0),
    )
