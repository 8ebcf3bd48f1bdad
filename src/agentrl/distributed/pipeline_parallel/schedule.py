"""Pipeline parallelism: forests pass the stages of a model one after the other, 1F1B.

Every stage knows every forest, so hidden states and gradients travel in their own lengths, and a stage holds
those of the forests under way alone. (``torch.distributed.pipelining`` wants equal shapes, keeps a buffer for
every micro-batch, and at least as many of these as stages.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from agentrl.data.forest import TokenForest
from agentrl.model.attention.compatibility import set_attention
from agentrl.train.clock import Stopwatch
from agentrl.train.step import Begin, ForwardOptions
from agentrl.train.step_loss import StepLoss


@dataclass(frozen=True, slots=True)
class InFlight:
    """A forest between its forward and its backward on this stage."""

    forest: TokenForest
    received: Tensor | None
    """Hidden states [N, H]; None on the first stage."""
    output: Tensor
    """Hidden states [N, H]; on the last stage the loss."""
    attention: str
    """The implementation that the forward used: recomputed activations need it in the backward."""


@dataclass(frozen=True)
class Pipeline:
    """This process's stage of a model; ``step.Stages``."""

    model: Any
    ranked: nn.Module
    """Runs the stage: (forest, options, hidden states or None) → hidden states, or logprobs and entropy."""
    group: ProcessGroup
    """The stages, in order."""
    tokens: Callable[[TokenForest], int]
    """How many tokens of a forest this process computes."""
    begin: Begin
    """Announces a micro-batch's backward."""

    def logprobs(
        self, forests: Sequence[TokenForest], options: ForwardOptions
    ) -> list[tuple[Tensor, Tensor]]:
        """Logprob and entropy (float32[T] each) of each forest's trainable tokens, on every stage."""
        computed: list[Tensor] = []
        for forest in forests:
            received, _ = self._exchange(states_of=forest)
            output = self.ranked(forest, options, received)
            if self._is_last:
                computed.append(torch.stack(output))
            else:
                self._exchange(states=output)
        counts = [forest.trainable_tokens for forest in forests]
        found = torch.empty(2, sum(counts), device=self.model.device)
        if self._is_last:
            found = torch.cat(computed, 1)
        dist.broadcast(found, group=self.group, group_src=self._stages - 1)
        return [(part[0], part[1]) for part in torch.split(found, counts, 1)]

    def train(
        self, forests: Sequence[TokenForest], options: ForwardOptions, loss: StepLoss, watch: Stopwatch
    ) -> None:
        """Forward and backward of all forests; the last stage adds to ``loss``.

        A stage runs as many forests ahead as stages follow it, then a forward and a backward in turn.
        """
        under_way: deque[InFlight] = deque()
        ahead = min(len(forests), self._stages - 1 - self._stage)
        for forest in forests[:ahead]:
            received, _ = self._exchange(states_of=forest)
            under_way.append(self._forward(forest, options, received, loss, watch))
            self._exchange(states=under_way[-1].output)
        received, _ = self._exchange(states_of=_at(forests, ahead))
        for place in range(ahead, len(forests)):
            newest = self._forward(forests[place], options, received, loss, watch)
            under_way.append(newest)
            oldest, following = under_way.popleft(), _at(forests, place + 1)
            _, gradient = self._exchange(states=newest.output, gradient_of=oldest.forest)
            is_final = following is None and not under_way
            done = self._backward(oldest, gradient, watch, is_final=is_final)
            received, _ = self._exchange(gradient=done, states_of=following)
        while under_way:
            oldest = under_way.popleft()
            _, gradient = self._exchange(gradient_of=oldest.forest)
            self._exchange(gradient=self._backward(oldest, gradient, watch, is_final=not under_way))

    def _forward(
        self,
        forest: TokenForest,
        options: ForwardOptions,
        received: Tensor | None,
        loss: StepLoss,
        watch: Stopwatch,
    ) -> InFlight:
        if received is not None:
            received.requires_grad_()
        output = self.ranked(forest, options, received)
        output = loss.add(forest, *output) if self._is_last else output
        watch.lap("forward")
        return InFlight(forest, received, output, self.model.config._attn_implementation)

    def _backward(
        self, item: InFlight, gradient: Tensor | None, watch: Stopwatch, *, is_final: bool
    ) -> Tensor | None:
        """Add up this stage's gradients; returns that of what it received."""
        set_attention(self.model, item.attention)
        self.begin(is_last=is_final)
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
        """Send ``states`` on and ``gradient`` back, and receive those of the given forests, all at once.

        What would be exchanged with a stage that is not there is None.
        """
        arriving, returning = self._room(states_of, self._stage - 1), self._room(gradient_of, self._stage + 1)
        operations = [
            dist.P2POp(operation, tensor.detach(), group=self.group, group_peer=peer)
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

    def _room(self, forest: TokenForest | None, peer: int) -> Tensor | None:
        """For hidden states [N, H] of ``forest``, or their gradient, from another stage."""
        if forest is None or not 0 <= peer < self._stages:
            return None
        width = self.model.config.get_text_config().hidden_size
        return torch.empty(self.tokens(forest), width, dtype=self.model.dtype, device=self.model.device)

    @property
    def _stage(self) -> int:
        return dist.get_rank(self.group)

    @property
    def _stages(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def _is_last(self) -> bool:
        return self._stage == self._stages - 1


def _at(forests: Sequence[TokenForest], place: int) -> TokenForest | None:
    return forests[place] if place < len(forests) else None
