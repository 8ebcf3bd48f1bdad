"""Split a causal LM over the ranks of a mesh, and run it over micro-batches; one process is one rank.

transformers splits the modules of a layer by the plan in the model's configuration.

Every stage of a pipeline knows every forest, so hidden states and gradients are sent in their own lengths,
and a stage keeps those of the forests in flight only. (``torch.distributed.pipelining`` needs equal shapes, a
buffer per micro-batch, and at least as many micro-batches as stages.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from agentrl.data.forest import TokenForest
from agentrl.distributed.context_parallel import ContextParallel, check_context
from agentrl.distributed.expert_parallel import check_experts, is_experts, shard_experts
from agentrl.distributed.fsdp import (
    GradientReduction,
    choose_reduction,
    clip_gradients,
    local_part,
    mark_partial,
    set_reduction,
    shard_layers,
    shard_root,
    sum_partial_gradients,
)
from agentrl.distributed.mesh import Mesh
from agentrl.distributed.pipeline_stages import (
    assign_model_layers,
    check_stages,
    keep_stage,
    run_stage,
    sum_tied_gradients,
)
from agentrl.errors import ConfigError, ModelError
from agentrl.model.attention import ForestExecutor, build_executor, check_positions, set_attention
from agentrl.model.flops import Precision, Stopwatch
from agentrl.model.logprobs import ForwardOptions, OutputHead, forest_logprobs, output_head

PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
"""transformers' name for a module that every rank holds whole and applies to its own heads."""
_LINEAR = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input")
MicroBatches = Iterator[tuple[TokenForest, tuple[Tensor, ...]]]
"""Forests, each with what ``forest_logprobs`` returns of it."""


class ParallelModel(nn.Module):
    """A causal LM as the ranks of ``mesh`` compute it together. Every rank calls the same methods.

    ``parallelize`` makes one from a model and a mesh. By default it is a whole model in one process.
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
        return [self(forest, options.for_logprobs) for forest in forests]

    def micro_batches(
        self, forests: Sequence[TokenForest], options: ForwardOptions, watch: Stopwatch | None = None
    ) -> MicroBatches:
        """Run one forest after the other forward, and yield each with its logprobs.

        Call the backward of a forest's part of the loss before asking for the next forest: the memory of one
        is in use at a time. Of a pipeline, the last stage alone yields; the others run all forests forward
        and backward meanwhile, and ``watch`` gets their times.
        """
        # Keep those without trainable tokens if there are other ranks: their collectives wait for this one.
        # If none has trainable tokens, run one: the optimizer skips parameters that have no gradient.
        if self.mesh.layout.world == 1:
            forests = [forest for forest in forests if forest.trainable_tokens] or forests[:1]
        for number, forest in enumerate(forests, 1):
            values = self(forest, options)
            set_reduction(self, self._reduction, is_last=number == len(forests))
            yield forest, values

    def release_gathered(self) -> None:
        """Shard again what a forward without a backward has left gathered; an optimizer knows the shards."""
        if isinstance(self, FSDPModule):
            self.reshard()

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
        elif received is None:
            hidden = self.executor(forest)
        else:
            hidden = run_stage(self.executor, forest, received)
        if not self.mesh.is_last_stage:
            # Copy if need be: only contiguous tensors can be sent.
            return hidden.contiguous()
        if self._context is not None:
            return self._context.logprobs(hidden, self._head(), forest, options)
        return forest_logprobs(hidden, self._head(), forest, options)

    def values(self, forests: Sequence[TokenForest], head: nn.Module) -> list[Tensor]:
        """Return the values of ``head`` (float32[T]) before each trainable token of each forest.

        Call it under ``torch.no_grad``.
        """
        options = ForwardOptions(value_head=head, values_alone=True)
        return [self(forest, options)[0] for forest in forests]

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


@dataclass(frozen=True, slots=True)
class InFlight:
    """A forest between its forward and its backward on a stage before the last."""

    forest: TokenForest
    received: Tensor | None
    """Hidden states [N, H]; None on the first stage."""
    output: Tensor
    """Hidden states [N, H]."""
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
            output = self(forest, options.for_logprobs, received)
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

    def micro_batches(
        self, forests: Sequence[TokenForest], options: ForwardOptions, watch: Stopwatch | None = None
    ) -> MicroBatches:
        """Yield, on the last stage, each forest with its logprobs; run the others' layers meanwhile (1F1B).

        The last stage runs the backward of a forest right after its forward. A stage before it first runs as
        many forests forward as stages follow it. Then it alternates one forward and one backward, and at the
        end it runs the remaining backwards.
        """
        if not self._is_last:
            self._run_all(forests, options, watch or Stopwatch(self.model.device))
            return
        received, _ = self._exchange(states_of=_at(forests, 0))
        for number, forest in enumerate(forests, 1):
            values = self(forest, options, cast(Tensor, received).requires_grad_())
            set_reduction(self, self._reduction, is_last=number == len(forests))
            yield forest, values
            # The caller has run the backward: the states' gradient goes to the stage before.
            gradient = cast(Tensor, received).grad
            received, _ = self._exchange(gradient=gradient, states_of=_at(forests, number))

    def _run_all(self, forests: Sequence[TokenForest], options: ForwardOptions, watch: Stopwatch) -> None:
        """Run the layers of a stage before the last forward and backward over all forests."""
        in_flight: deque[InFlight] = deque()
        ahead = min(len(forests), self._stages - 1 - self._stage)
        for forest in forests[:ahead]:
            received, _ = self._exchange(states_of=forest)
            in_flight.append(self._forward(forest, options, received, watch))
            self._exchange(states=in_flight[-1].output)
        received, _ = self._exchange(states_of=_at(forests, ahead))
        for index in range(ahead, len(forests)):
            newest = self._forward(forests[index], options, received, watch)
            in_flight.append(newest)
            oldest = in_flight.popleft()
            _, gradient = self._exchange(states=newest.output, gradient_of=oldest.forest)
            done = self._backward(oldest, gradient, watch, is_last=False)
            received, _ = self._exchange(gradient=done, states_of=_at(forests, index + 1))
        while in_flight:
            oldest = in_flight.popleft()
            _, gradient = self._exchange(gradient_of=oldest.forest)
            self._exchange(gradient=self._backward(oldest, gradient, watch, is_last=not in_flight))

    def _forward(
        self, forest: TokenForest, options: ForwardOptions, received: Tensor | None, watch: Stopwatch
    ) -> InFlight:
        if received is not None:
            received.requires_grad_()
        output = self(forest, options, received)
        watch.lap("forward")
        return InFlight(forest, received, output, self.model.config._attn_implementation)

    def _backward(
        self, item: InFlight, gradient: Tensor | None, watch: Stopwatch, *, is_last: bool
    ) -> Tensor | None:
        """Add up this stage's gradients; return the gradient of the hidden states that it received."""
        set_attention(self.model, item.attention)
        set_reduction(self, self._reduction, is_last=is_last)
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
        # Start all at once: two stages that both sent first would wait for each other.
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


def _at(forests: Sequence[TokenForest], index: int) -> TokenForest | None:
    return forests[index] if index < len(forests) else None


def split_layers(model: Any, mesh: Mesh) -> None:
    """Split a Hugging Face causal LM by its configuration's plan, and its vocabulary by rows.

    Modules that each rank applies to its own heads (norms of queries and keys) stay whole, and are marked for
    ``sum_partial_gradients``. Raises as ``layer_styles``.
    """
    styles = layer_styles(model, mesh.layout.tp)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head.weight is embedding.weight
    for name, module in model.named_modules():
        if model.tp_plan.get(replace_layer_number_by_wildcard(name)) == PARTIAL_GRADIENT:
            # transformers' hook sums what earlier micro-batches have accumulated, once more with each: the
            # exactness suite's gradient norm is then 4.5 times what it should be.
            mark_partial(module)
    apply_tensor_parallelism(model, mesh.dense["tp"], styles)
    # Tie again: the split gave the embedding another parameter, and the head still has the whole one.
    if is_tied:
        head.weight = embedding.weight


def layer_styles(model: Any, size: int) -> dict[str, str]:
    """Return transformers' style of splitting each module and parameter over ``size`` ranks, by name.

    Raises ConfigError for heads, sizes or layers that cannot be split.
    """
    kind, config = type(model).__name__, model.config.get_text_config()
    check_divides(kind, config, size)
    if not getattr(config, "base_model_tp_plan", None):
        raise ConfigError(f"--tp_size: {kind} has no tensor-parallel plan", hint="set --tp_size 1")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        if module is embedding:
            style: str | None = "embedding_rowwise"
        elif module is head:
            style = None if head.weight is embedding.weight else "colwise"
        else:
            style = _layer_style(model, name, module)
        if style is not None:
            parameters = [f"{name}.{parameter}" for parameter, _ in module.named_parameters(recurse=False)]
            styles |= dict.fromkeys([*parameters, name], style)
    return styles


def _layer_style(model: Any, name: str, module: nn.Module) -> str | None:
    """Return transformers' style of splitting ``module``; None for one that stays as it is."""
    style: str | None = model.tp_plan.get(replace_layer_number_by_wildcard(name))
    if style in (None, PARTIAL_GRADIENT) or is_experts(module):
        return None
    if style not in _LINEAR or not isinstance(module, nn.Linear):
        raise ConfigError(
            f"--tp_size: {type(model).__name__} has {name} ({type(module).__name__}, plan {style!r}), which"
            " cannot be split over processes",
            hint="set --tp_size 1, or train a model with separate projections (Llama, Qwen3, Mistral)",
        )
    return style


def check_divides(name: str, config: Any, size: int) -> None:
    """Raise ConfigError if ``size`` does not divide heads, features or vocabulary."""
    for key, what in (
        ("num_attention_heads", "attention heads"),
        ("num_key_value_heads", "key-value heads"),
        ("intermediate_size", "intermediate features"),
        ("vocab_size", "ids of vocabulary"),
    ):
        count = getattr(config, key, None)
        if count is not None and count % size:
            hint = "choose a --tp_size that divides them"
            if key == "vocab_size":
                hint += f", or resize the model's embeddings to {-(-count // size) * size}"
            raise ConfigError(f"{name} has {count} {what}, which --tp_size {size} does not divide", hint=hint)


def parallelize(
    model: Any,
    mesh: Mesh,
    *,
    max_tokens: int,
    reduction: GradientReduction = "last",
    precision: Precision | None = None,
    runs: type[ParallelModel] = ParallelModel,
) -> ParallelModel:
    """Split ``model``, whole and equal on every rank, over ``mesh`` in index, and return what runs it.

    Split parameters become DTensors, of which each rank holds its part. A pipeline stage keeps its own layers
    only. ``max_tokens`` is the size of a micro-batch. ``precision`` is by default that of the weights. A
    single process without a policy of mixed precision keeps the model as it is. ``runs`` is the class that
    runs a model without stages.

    Raises ConfigError for a model that the layout cannot split, and ModelError for one that computes more
    than its layers in sequence where stages need that.
    """
    layout, policy = mesh.layout, None if precision is None else precision.policy
    # Choose before the split, after which a rank sees only its part of the bytes.
    reduction = choose_reduction(reduction, model, layout)
    stages = assign_model_layers(model, layout.pp) if layout.pp > 1 else None
    # Check everything before the first change: a model that is refused stays whole.
    check_positions(model, max_tokens)
    if layout.cp > 1:
        check_context(model, max_tokens)
    check_experts(model, layout)
    if stages:
        check_stages(model, stages)
    if layout.tp > 1:
        split_layers(model, mesh)
    if stages:
        keep_stage(model, mesh.coordinate("pp"), stages)
    if layout.ep * layout.tp > 1:
        shard_experts(model, mesh, policy)
    uses_fsdp = layout.uses_fsdp or policy is not None
    if uses_fsdp:
        shard_layers(model, mesh, policy)
    kind = PipelineModel if stages else runs
    products = model.dtype if precision is None else precision.products
    parallel = kind(model, mesh, reduction=reduction, products=products)
    if uses_fsdp:
        shard_root(parallel, mesh, policy)
    return parallel
