"""Run a causal LM over micro-batches on the ranks of a mesh; a single process is a mesh of one rank.

Pipeline stages run in 1F1B order. Every stage knows every forest, so hidden states and gradients are sent in
their own lengths, and a stage keeps those of the forests in flight only. (``torch.distributed.pipelining``
needs equal shapes, a buffer per micro-batch, and at least as many micro-batches as stages.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from agentrl.data.forest import TokenForest
from agentrl.distributed.context_parallel import ContextParallel
from agentrl.distributed.fsdp import GradientReduction, clip_gradients, set_reduction, sum_partial_gradients
from agentrl.distributed.mesh import Mesh
from agentrl.distributed.pipeline_stages import run_stage, sum_tied_gradients
from agentrl.errors import ModelError
from agentrl.model.attention.executor import ForestExecutor, build_executor
from agentrl.model.attention.sdpa import set_attention
from agentrl.model.flops import Stopwatch
from agentrl.model.forward import ForwardOptions, forest_logprobs
from agentrl.model.output_head import OutputHead, output_head

ForestLoss = Callable[[TokenForest, Tensor, Tensor], Tensor]
"""(forest, logprobs float32[T], entropies float32[T]) → the forest's part of the step's loss, a scalar."""


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
        return [self(forest, options) for forest in forests]

    def forward_backward(
        self, forests: Sequence[TokenForest], options: ForwardOptions, loss: ForestLoss, watch: Stopwatch
    ) -> None:
        """Add the gradients of each forest's ``loss`` to the parameters; time ``forward`` and ``backward``.

        A rank among several runs forests without trainable tokens too, because other ranks wait for it.
        """
        if self.mesh.layout.world == 1:
            forests = [forest for forest in forests if forest.trainable_tokens]
        for place, forest in enumerate(forests, 1):
            part = loss(forest, *self(forest, options))
            watch.lap("forward")
            self._before_backward(is_last=place == len(forests))
            torch.autograd.backward(part)
            watch.lap("backward")

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
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Return logprob (float32[T], with gradient) and entropy (float32[T]) of each trainable token.

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
        elif received is None:
            hidden = self.executor(forest)
        else:
            hidden = run_stage(self.executor, forest, received)
        if not self.mesh.is_last_stage:
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

    def _before_backward(self, *, is_last: bool) -> None:
        set_reduction(self, self._reduction, is_last=is_last)

    def _head(self) -> OutputHead:
        """Return the output head, or this rank's rows of it."""
        head = output_head(self.model)
        if not isinstance(head.weight, DTensor):
            return head
        weight, group = head.weight.to_local(), self.mesh.group("tp")
        bias = head.bias.to_local() if isinstance(head.bias, DTensor) else head.bias
        return replace(head, weight=weight, bias=bias, group=group, first=dist.get_rank(group) * len(weight))


@dataclass(frozen=True, slots=True)
class InFlight:
    """A forest between its forward and its backward on this stage."""

    forest: TokenForest
    received: Tensor | None
    """Hidden states [N, H]; None on the first stage."""
    output: Tensor
    """Hidden states [N, H]; on the last stage the loss."""
    attention: str
    """The attention implementation of the forward: the backward needs it to recompute activations."""


class PipelineModel(ParallelModel):
    """A ``ParallelModel`` of which each rank holds one stage of layers."""

    def logprobs(
        self, forests: Sequence[TokenForest], options: ForwardOptions
    ) -> list[tuple[Tensor, Tensor]]:
        """Return logprob and entropy (float32[T] each) of each forest's trainable tokens, on every stage.

        Call it under ``torch.no_grad``.
        """
        computed: list[Tensor] = []
        for forest in forests:
            received, _ = self._exchange(states_of=forest)
            output = self(forest, options, received)
            if self._is_last:
                computed.append(torch.stack(output))
            else:
                self._exchange(states=output)
        counts = [forest.trainable_tokens for forest in forests]
        found = torch.empty(2, sum(counts), device=self.model.device)
        if self._is_last:
            found = torch.cat(computed, 1)
        dist.broadcast(found, group=self._group, group_src=self._stages - 1)
        return [(part[0], part[1]) for part in torch.split(found, counts, 1)]

    def forward_backward(
        self, forests: Sequence[TokenForest], options: ForwardOptions, loss: ForestLoss, watch: Stopwatch
    ) -> None:
        """Run forward and backward of all forests; only the last stage calls ``loss``.

        A stage first runs as many forests forward as stages follow it. Then it alternates one forward and one
        backward (1F1B), and at the end it runs the remaining backwards.
        """
        in_flight: deque[InFlight] = deque()
        ahead = min(len(forests), self._stages - 1 - self._stage)
        for forest in forests[:ahead]:
            received, _ = self._exchange(states_of=forest)
            in_flight.append(self._forward(forest, options, received, loss, watch))
            self._exchange(states=in_flight[-1].output)
        received, _ = self._exchange(states_of=_at(forests, ahead))
        for place in range(ahead, len(forests)):
            newest = self._forward(forests[place], options, received, loss, watch)
            in_flight.append(newest)
            oldest, following = in_flight.popleft(), _at(forests, place + 1)
            _, gradient = self._exchange(states=newest.output, gradient_of=oldest.forest)
            is_last = following is None and not in_flight
            done = self._backward(oldest, gradient, watch, is_last=is_last)
            received, _ = self._exchange(gradient=done, states_of=following)
        while in_flight:
            oldest = in_flight.popleft()
            _, gradient = self._exchange(gradient_of=oldest.forest)
            self._exchange(gradient=self._backward(oldest, gradient, watch, is_last=not in_flight))

    def _forward(
        self,
        forest: TokenForest,
        options: ForwardOptions,
        received: Tensor | None,
        loss: ForestLoss,
        watch: Stopwatch,
    ) -> InFlight:
        if received is not None:
            received.requires_grad_()
        output = self(forest, options, received)
        output = loss(forest, *output) if self._is_last else output
        watch.lap("forward")
        return InFlight(forest, received, output, self.model.config._attn_implementation)

    def _backward(
        self, item: InFlight, gradient: Tensor | None, watch: Stopwatch, *, is_last: bool
    ) -> Tensor | None:
        """Add up this stage's gradients; return the gradient of the hidden states that it received."""
        set_attention(self.model, item.attention)
        self._before_backward(is_last=is_last)
        torch.autograd.backward(item.output, gradient)
        watch.lap("backward")
        return None if item.received is None else item.received.grad

    def _exchange(
        self,
        *,
        states: Tensor | None = None,
        gradient: Tensor | None = None,
        states_of: TokenForest | None = None,
        gradient_of: TokenForest | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Send hidden states forward and a gradient backward, and receive those of other forests, at once.

        Sends ``states`` to the next stage and ``gradient`` to the previous one. Returns the hidden states of
        ``states_of`` from the previous stage and the gradient of ``gradient_of`` from the next one. The
        first stage has no previous and the last no next one; what they would receive is None.
        """
        arriving = self._buffer(states_of, self._stage - 1)
        returning = self._buffer(gradient_of, self._stage + 1)
        operations = [
            dist.P2POp(operation, tensor.detach(), group=self._group, group_peer=peer)
            for operation, tensor, peer in (
                (dist.isend, gradient, self._stage - 1),
                (dist.irecv, arriving, self._stage - 1),
                (dist.isend, states, self._stage + 1),
                (dist.irecv, returning, self._stage + 1),
            )
            if tensor is not None and 0 <= peer < self._stages
        ]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return arriving, returning

    def _buffer(self, forest: TokenForest | None, peer: int) -> Tensor | None:
        """Return a buffer for hidden states [N, H] of ``forest``, or their gradient, from stage ``peer``."""
        if forest is None or not 0 <= peer < self._stages:
            return None
        width = self.model.config.get_text_config().hidden_size
        return torch.empty(self.tokens(forest), width, dtype=self.products, device=self.model.device)

    @property
    def _group(self) -> ProcessGroup:
        return self.mesh.group("pp")

    @property
    def _stage(self) -> int:
        return self.mesh.coordinate("pp")

    @property
    def _stages(self) -> int:
        return self.mesh.layout.pp

    @property
    def _is_last(self) -> bool:
        return self.mesh.is_last_stage


def _at(forests: Sequence[TokenForest], place: int) -> TokenForest | None:
    return forests[place] if place < len(forests) else None
