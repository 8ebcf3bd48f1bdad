"""A spread model on one process, and how the process works with the others on a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from agentrl.data.forest import TokenForest
from agentrl.distributed.accumulation import Reduction, set_reduction, whole_step
from agentrl.distributed.context_parallel.model import Context
from agentrl.distributed.gradients import clip_gradients, sum_partial_gradients
from agentrl.distributed.mesh import Mesh
from agentrl.distributed.pipeline_parallel.schedule import Pipeline
from agentrl.distributed.pipeline_parallel.stages import run_stage, sum_tied_gradients
from agentrl.losses.compute import Denominators
from agentrl.losses.metrics import TokenMetrics
from agentrl.model.attention.executor import ForestExecutor, build_executor
from agentrl.model.logprobs import token_logprobs
from agentrl.model.output_head import OutputHead, output_head
from agentrl.train.step import ForwardOptions, Ranks, count_step


def shard_layers(model: Any, mesh: Mesh) -> None:
    """Shard each decoder layer over ``Layout.shard``, copied over ``dp_replicate``; gradients are sums."""
    layers: Sequence[nn.Module] = model.get_decoder().layers
    for layer in layers:
        fully_shard(layer, mesh=mesh.dense["dp_replicate", "shard"])


class RankedModel(nn.Module):
    """A parallelized causal LM on one process: logprobs of the forests that fall to it."""

    def __init__(self, model: Any, mesh: Mesh) -> None:
        super().__init__()
        self.model = model
        self._mesh = mesh
        if mesh.layout.shard * mesh.layout.dp_replicate > 1:
            fully_shard(self, mesh=mesh.dense["dp_replicate", "shard"], reshard_after_forward=False)
            for module in self.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
                    module.set_gradient_divide_factor(1.0)

    def forward(
        self, forest: TokenForest, options: ForwardOptions, received: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Logprob (float32[T], with gradient) and entropy (float32[T]) of each trainable token.

        A stage of layers before the last returns hidden states [N, H]; one after the first is given them.
        """
        if self._mesh.layout.cp > 1:
            return self._run_shared(forest, options, received)
        device = self.model.device
        with torch.autocast(device.type, options.autocast_dtype, options.autocast_dtype is not None):
            hidden = run_stage(self._executor(options), forest, received)
        if not self._mesh.is_last_stage:
            return hidden.to(self.model.dtype).contiguous()
        parent = torch.from_numpy(forest.parent[forest.target]).to(device)
        ids = torch.from_numpy(forest.input_ids[forest.target]).to(device)
        return token_logprobs(
            hidden,
            self._head(),
            parent,
            ids,
            temperature=torch.from_numpy(forest.temperature),
            entropy_gradient=options.entropy_gradient,
            chunk_size=options.chunk_size,
            vocab_chunk_size=options.vocab_chunk_size,
        )

    def _run_shared(
        self, forest: TokenForest, options: ForwardOptions, received: Tensor | None
    ) -> tuple[Tensor, Tensor] | Tensor:
        """``forward`` where processes share the tokens: hidden states [n, H] are those of this one's."""
        context = Context(self.model, self._mesh.group("cp"))
        hidden = context.run(forest, options, received)
        if not self._mesh.is_last_stage:
            return hidden.to(self.model.dtype).contiguous()
        return context.logprobs(forest, options, hidden, self._head())

    def _executor(self, options: ForwardOptions) -> ForestExecutor:
        """Return what runs forests."""
        is_sharded = isinstance(self, FSDPModule)
        model = self.model
        return build_executor(model, options.executor, trains=model.training, equal_calls=is_sharded)

    def tokens(self, forest: TokenForest) -> int:
        """How many of the tokens of ``forest`` this process computes, padding included."""
        if self._mesh.layout.cp > 1:
            return Context(self.model, self._mesh.group("cp")).tokens(forest)
        return forest.tokens

    def _head(self) -> OutputHead:
        """The output head, or this process's rows of it."""
        head = output_head(self.model)
        if not isinstance(head.weight, DTensor):
            return head
        weight, group = head.weight.to_local(), self._mesh.group("tp")
        bias = head.bias.to_local() if isinstance(head.bias, DTensor) else head.bias
        return replace(head, weight=weight, bias=bias, group=group, first=dist.get_rank(group) * len(weight))


@dataclass(frozen=True)
class Parallel:
    """How this process works with the others on one step; every process calls the same methods."""

    mesh: Mesh
    ranked: RankedModel
    reduction: Reduction = "last"
    """Of gradients."""

    @property
    def place(self) -> tuple[int, int]:
        """How many shares a step's data have, and which of them is this process's."""
        return self.mesh.layout.data, self.mesh.data_rank

    @property
    def ranks(self) -> Ranks:
        """What ``forward_backward`` needs."""
        return Ranks(
            logprobs=self.ranked, join=self._join, total=self.total, begin=self._begin, stages=self._stages()
        )

    def step(self) -> AbstractContextManager[None]:
        """A block in which a step is computed; see ``whole_step``."""
        return whole_step(self.ranked)

    def count(self, forests: Sequence[TokenForest]) -> Denominators:
        """The denominators of the step of which ``forests`` are this process's share."""
        own = count_step(forests)
        counts = torch.tensor([own.tokens, own.trajectories], dtype=torch.float64)
        tokens, trajectories = self.total(counts.to(self.ranked.model.device)).tolist()
        return Denominators(round(tokens), trajectories)

    def add(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Each count summed over the processes that train different data."""
        values = torch.tensor(list(counts.values()), device=self.ranked.model.device)
        return dict(zip(counts, self.total(values).tolist(), strict=True))

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of ``tensor`` over the processes that train different data."""
        tensor = tensor.clone()
        for group in self._data_groups():
            dist.all_reduce(tensor, dist.ReduceOp.SUM, group)
        return tensor

    def clip(self, max_norm: float) -> float:
        """Complete the gradients and clip them; returns the norm that they had."""
        if self.mesh.layout.tp > 1:
            sum_partial_gradients(self.ranked, self.mesh.group("tp"))
        if self.mesh.layout.pp == 1:
            return clip_gradients(self.ranked.parameters(), max_norm)
        stages = self.mesh.group("pp")
        elsewhere = sum_tied_gradients(self.ranked.model, stages)
        return clip_gradients(self.ranked.parameters(), max_norm, stages, elsewhere)

    def _join(self, loss: float, metrics: TokenMetrics) -> tuple[float, TokenMetrics]:
        for group in [self.mesh.group("pp"), *self._data_groups()]:
            found: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(found, (loss, metrics), group=group)
            pairs = cast("list[tuple[float, TokenMetrics]]", found)
            loss = sum(pair[0] for pair in pairs)
            metrics = sum((pair[1] for pair in pairs), TokenMetrics())
        return loss, metrics

    def _stages(self) -> Pipeline | None:
        if self.mesh.layout.pp == 1:
            return None
        stages = self.mesh.group("pp")
        return Pipeline(self.ranked.model, self.ranked, stages, self.ranked.tokens, self._begin)

    def _begin(self, *, is_last: bool) -> None:
        set_reduction(self.ranked, self.reduction, is_last=is_last)

    def _data_groups(self) -> list[ProcessGroup]:
        return [self.mesh.group(name) for name in ("ep", "dp_shard", "dp_replicate")]
