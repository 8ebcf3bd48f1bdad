"""Flags of memory and speed of a training step; none of them changes a loss beyond rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentrl.config.fields import flag, require_positive


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What a training step keeps in memory, and how its kernels are made."""

    activation_checkpointing: Literal["none", "full", "selective"] = flag(
        "none",
        "activations recomputed in the backward: none, all of a layer (full; the same as"
        " --gradient_checkpointing), or all but the results of matrix products and attention (selective)",
    )
    activation_offload: bool = flag(False, "keep what checkpointing full saves in the host's memory")
    optimizer_offload: bool = flag(False, "keep AdamW's moments in the host's memory, a tensor at a time")
    fused_adamw: bool = flag(True, "AdamW as one kernel; off for parameters that are sharded over ranks")
    gradient_reduction: Literal["last", "every"] = flag(
        "last",
        "in several processes, gradients are reduced in a step's last micro-batch (until then each process"
        " holds those of the whole model), or in every one (it holds its share)",
    )
    torch_compile: bool = flag(False, "compile the decoder layers with torch.compile")
    loss_vocab_chunk_size: int | None = flag(
        None, "vocabulary entries per chunk of the logprob projection (default: 8192)"
    )

    def __post_init__(self) -> None:
        require_positive(self, "loss_vocab_chunk_size")
