"""Run a causal LM over micro-batches on the ranks of a mesh; a single process is a mesh of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from agentrl.data.forest import TokenForest
from agentrl.distributed.context_parallel import ContextParallel
from agentrl.distributed.fsdp import (
    GradientReduction,
    clip_gradients,
    local_part,
    set_reduction,
    sum_partial_gradients,
)
from agentrl.distributed.mesh import Mesh
from agentrl.distributed.pipeline_stages import run_stage, sum_tied_gradients
from agentrl.errors import ModelError
from agentrl.model.attention.executor import ForestExecutor, build_executor
from agentrl.model.flops import Stopwatch
from agentrl.model.forward import ForwardOptions, forest_logprobs
from agentrl.model.logprobs import OutputHead, output_head

MicroBatches = Iterator[tuple[TokenForest, tuple[Tensor, ...]]]
"""Forests, each with what ``forest_logprobs`` returns of it."""


class ParallelModel(nn.Module):
    """A causal LM as the ranks of ``mesh`` compute it together. Every rank calls the same methods.

    ``apply.parallelize`` makes one from a model and a mesh. By default it is a whole model in one process.
    """

    def __init__(
        self,
        model: Any,
        mesh: Mesh | None = None,
        *,
        executor: str = "auto",
        trains: bool = True,
        reduction: GradientReduction = "last",
        products: torch.dtype | None = None,
    ) -> None:
        """``executor``, ``trains``: see ``build_executor``; ``reduction``: see ``fsdp.set_reduction``.

        ``products`` is the dtype of matrix products and hidden states; by default, that of the weights.
        """
        super().__init__()
        self.model = model
        self.mesh = mesh or Mesh()
        self.products: torch.dtype = products or model.dtype
        self._executor_name, self._trains, self._reduction = executor, trains, reduction
        self._context = (
            ContextParallel(model, self.mesh.group("cp"), executor, trains=trains)
            if self.mesh.layout.cp > 1
            else None
        )

    @cached_property
    def executor(self) -> ForestExecutor:
        """What runs forests. It is chosen once, at the first use: then the model is on its device."""
        is_sharded = self.mesh.layout.uses_fsdp
        return build_executor(self.model, self._executor_name, trains=self._trains, equal_calls=is_sharded)

    def logprobs(
        self, forests: Sequence[TokenForest], options: ForwardOptions
    ) -> list[tuple[Tensor, Tensor]]:
        """Return logprob and entropy (float32[T] each) of each forest's trainable tokens.

        Call it under ``torch.no_grad``.
        """
        # Ask for no divergence: it would be a third result, which the loss alone reads.
        return [self(forest, replace(options, divergence=False)) for forest in forests]

    def micro_batches(
        self, forests: Sequence[TokenForest], options: ForwardOptions, watch: Stopwatch | None = None
    ) -> MicroBatches:
        """Run one forest after the other forward, and yield each with its logprobs.

        Call the backward of a forest's part of the loss before asking for the next forest: the memory of one
        is in use at a time. Of a pipeline, the last stage alone yields; the others run all forests forward
        and backward meanwhile, and ``watch`` gets their times.
        """
        # Keep those without trainable tokens if there are other ranks: their collectives wait for this one.
        if self.mesh.layout.world == 1:
            forests = [forest for forest in forests if forest.trainable_tokens]
        for number, forest in enumerate(forests, 1):
            values = self(forest, options)
            set_reduction(self, self._reduction, is_last=number == len(forests))
            yield forest, values

    def clip_gradients(self, max_norm: float) -> float:
        """Complete the gradients and clip them by their joint norm; return the norm before."""
        layout = self.mesh.layout
        if not self.is_sharded and layout.world == 1:
            return float(nn.utils.clip_grad_norm_(self.parameters(), max_norm))
        if layout.tp > 1:
            sum_partial_gradients(self, self.mesh.group("tp"))
        if layout.pp == 1:
            return clip_gradients(self.parameters(), max_norm)
        stages = self.mesh.group("pp")
        duplicate = sum_tied_gradients(self.model, stages)
        return clip_gradients(self.parameters(), max_norm, stages, duplicate)

    def forward(
        self, forest: TokenForest, options: ForwardOptions, received: Tensor | None = None
    ) -> tuple[Tensor, ...] | Tensor:
        """Return what ``forest_logprobs`` does of each trainable token.

        A pipeline stage before the last returns hidden states [n, H] instead. One after the first gets those
        of the stage before as ``received``.
        """
        if forest.images is not None and self.mesh.layout.world > 1:
            raise ModelError(
                f"the data hold images, and {self.mesh.layout.world} ranks share the model: images are"
                " trained in one process",
                hint="train with one process, or sample without images",
            )
        if self._context is not None:
            hidden = self._context.run(forest, received)
        else:
            hidden = run_stage(self.executor, forest, received)
        if not self.mesh.is_last_stage:
            # Copy if need be: only contiguous tensors can be sent.
            return hidden.contiguous()
        if self._context is not None:
            return self._context.logprobs(hidden, self._head(), forest, options)
        return forest_logprobs(hidden, self._head(), forest, options)

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 holds the parameters, on a mesh of one rank or more."""
        return isinstance(self, FSDPModule)

    def tokens(self, forest: TokenForest) -> int:
        """Return how many tokens of ``forest`` this rank computes, padding included."""
        return forest.tokens if self._context is None else self._context.tokens(forest)

    def _head(self) -> OutputHead:
        """Return the output head, or this rank's rows of it."""
        head = output_head(self.model)
        if not isinstance(head.weight, DTensor):
            return head
        weight, group = head.weight.to_local(), self.mesh.group("tp")
        bias = None if head.bias is None else local_part(head.bias)
        return replace(head, weight=weight, bias=bias, group=group, first=dist.get_rank(group) * len(weight))
