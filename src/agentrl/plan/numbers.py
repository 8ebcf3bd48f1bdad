"""Count the weights of a causal LM by part: layers, experts, embedding, head, and what is trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from agentrl.distributed.expert_parallel import find_experts
from agentrl.distributed.mesh import Layout
from agentrl.distributed.pipeline_parallel.stages import assign_model_layers
from agentrl.model.flops import ModelShape


@dataclass(frozen=True, slots=True)
class Numbers:
    """The weights of a part of the model: how many, and how many of them are trained."""

    dense: int = 0
    experts: int = 0
    trained: int = 0
    trained_experts: int = 0

    @classmethod
    def of(cls, named: Iterable[tuple[str, nn.Parameter]], experts: Iterable[str]) -> Self:
        """Count parameters, those of modules called ``experts`` apart."""
        prefixes = tuple(f"{name}." for name in experts)
        dense = expert = trained = trained_expert = 0
        for name, parameter in named:
            size, is_expert = parameter.numel(), name.startswith(prefixes) if prefixes else False
            dense += size * (not is_expert)
            expert += size * is_expert
            trained += size * (parameter.requires_grad and not is_expert)
            trained_expert += size * (parameter.requires_grad and is_expert)
        return cls(dense, expert, trained, trained_expert)

    def local(self, layout: Layout) -> Numbers:
        """Return those of a rank before FSDP2 shards them: tensor and expert parallelism divide them."""
        tp, holders = layout.tp, layout.tp * layout.ep
        return Numbers(
            self.dense // tp, self.experts // holders, self.trained // tp, self.trained_experts // holders
        )

    def sharded(self, layout: Layout) -> tuple[float, float]:
        """Return a rank's shard of all, and of the trained ones."""
        dense, experts = layout.shard, layout.dp_shard * layout.cp
        return (
            self.dense / dense + self.experts / experts,
            self.trained / dense + self.trained_experts / experts,
        )

    def __add__(self, other: Numbers) -> Numbers:
        return Numbers(
            self.dense + other.dense, self.experts + other.experts, self.trained + other.trained,
            self.trained_experts + other.trained_experts,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelNumbers:
    """What the memory of a step depends on in a causal LM: its weights by part, its norms, its experts."""

    module: Any
    shape: ModelShape
    layers: tuple[Numbers, ...]
    embedding: Numbers
    """With what else is outside the layers and the head."""
    head: Numbers
    """Zeros if the head is the embedding."""
    largest: int
    """Numbers of the largest trained parameter."""
    trains_head: bool
    norms: int
    """Norms of the hidden width in a layer."""
    norms_heads: bool
    """Queries and keys are normalized."""
    norm: str
    """The class of these norms."""

    @classmethod
    def of(cls, module: Any) -> Self:
        """Read a causal LM, also on the meta device, with its adapters and frozen parameters."""
        shape, decoder = ModelShape.of(module.config), module.get_decoder()
        whole = list(module.named_parameters())
        listed = getattr(decoder, "layers", None)
        found = listed if isinstance(listed, nn.ModuleList) else ()
        layers = [Numbers.of(layer.named_parameters(), find_experts(layer)) for layer in found]
        total = Numbers.of(whole, find_experts(module))
        weight = module.get_output_embeddings().weight
        is_tied = weight is module.get_input_embeddings().weight
        head = Numbers() if is_tied else Numbers.of((("head", weight),), ())
        if not layers:  # its layers have another name: all alike
            size, count = total.dense - head.dense - shape.vocabulary * shape.hidden, shape.layers
            layers = [Numbers(size // count, 0, size * total.trained // (total.dense * count))] * count
        inside = sum(layers, head)
        norms = [(name, item) for name, item in (found[0] if found else decoder).named_modules()
                 if "norm" in name.lower() and getattr(item, "weight", None) is not None]  # fmt: skip
        return cls(
            module=module, shape=shape, layers=tuple(layers),
            embedding=Numbers(total.dense - inside.dense, 0, total.trained - inside.trained), head=head,
            largest=max((item.numel() for _, item in whole if item.requires_grad), default=0),
            trains_head=weight.requires_grad,
            norms=sum(item.weight.numel() == shape.hidden for _, item in norms) if found else 2,
            norms_heads=any(name.endswith("q_norm") for name, _ in norms),
            norm=type(norms[0][1]).__name__ if norms else "RMSNorm",
        )  # fmt: skip

    def stages(self, layout: Layout) -> list[range]:
        """Return the layers of each pipeline stage."""
        return [range(len(self.layers))] if layout.pp == 1 else assign_model_layers(self.module, layout.pp)
