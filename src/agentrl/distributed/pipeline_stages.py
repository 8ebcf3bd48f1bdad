"""Pipeline stages: which layers each holds, a model reduced to one stage, gradients of a tied embedding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from agentrl.data.forest import TokenForest, forest_from_sequences
from agentrl.distributed.fsdp import local_part
from agentrl.errors import ConfigError, ModelError
from agentrl.model.attention import ForestExecutor, build_executor
from agentrl.model.check_model import small_copy
from agentrl.model.flops import ModelShape
from agentrl.model.load import is_empty

_PROJECTED = 0.5
"""The fraction of tokens that the output head is assumed to project: the trained ones."""

Replacement = tuple[nn.Module, str, nn.Module]
"""(parent, name of its child, the module to put there)."""


def assign_layers(layers: int, stages: int, head: float = 0.0) -> list[range]:
    """Return the layers of each stage, with the smallest possible load on the slowest stage.

    The last stage also computes the output head, which costs as much as ``head`` layers. Earlier stages keep
    more micro-batches in memory, so that a remainder goes to later ones. Raises ConfigError for more stages
    than layers.
    """
    if stages > layers:
        raise ConfigError(
            f"--pp_size is {stages}, and the model has {layers} layers: a stage would have none",
            hint=f"set --pp_size {layers} or less",
        )
    if stages == 1:
        return [range(layers)]
    last = min(
        range(layers - stages + 1, 0, -1),
        key=lambda count: max(count + head, -(-(layers - count) // (stages - 1))),
    )
    bounds = [(layers - last) * stage // (stages - 1) for stage in range(stages)]
    return [*map(range, bounds[:-1], bounds[1:]), range(layers - last, layers)]


def assign_model_layers(model: Any, stages: int) -> list[range]:
    """Return ``assign_layers`` for a causal LM; ModelError if its decoder has no list of layers."""
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(
            f"the decoder of {type(model).__name__} has no list of layers to split into stages",
            hint="set --pp_size 1",
        )
    shape = ModelShape.of(model.config)
    head = _PROJECTED * shape.hidden * shape.vocabulary * shape.layers / shape.layer_weights
    return assign_layers(len(layers), stages, head)


class Identity(nn.Module):
    """Stands in for a module of another stage: returns hidden states unchanged."""

    def forward(self, hidden: Tensor, *unused: Any, **named: Any) -> Tensor:
        """Return ``hidden``."""
        return hidden


class ReceivedStates(nn.Module):
    """Stands in for the embedding on a later stage: row i is the hidden state received for token i."""

    def __init__(self, embedding: nn.Embedding, *, keeps_weight: bool) -> None:
        super().__init__()
        self.num_embeddings = embedding.num_embeddings
        self.weight = embedding.weight if keeps_weight else None
        """The tied output head's weight, under the name that it has in the whole model."""
        self.states: Tensor | None = None

    def forward(self, index: Tensor) -> Tensor:
        """Return the received hidden states [..., H] of the tokens ``index``, with gradient."""
        return nn.functional.embedding(index, cast(Tensor, self.states))


@contextmanager
def receiving(model: Any, states: Tensor | None) -> Iterator[None]:
    """Set what a later stage's embedding returns for indices 0 to n: ``states`` [n, H]; None on the first."""
    if states is None:
        yield
        return
    table: ReceivedStates = model.get_input_embeddings()
    table.states = states
    try:
        yield
    finally:
        # Let go of them: they hold the graph of the backward.
        table.states = None


def run_stage(executor: ForestExecutor, forest: TokenForest, received: Tensor | None) -> Tensor:
    """Return hidden states [N, H] after this stage's layers; ``received`` from the stage before, or None."""
    if received is not None:
        forest = replace(forest, input_ids=np.arange(forest.tokens))
    with receiving(executor.model, received):
        return executor(forest)


def keep_stage(model: Any, stage: int, stage_layers: Sequence[range]) -> None:
    """Reduce ``model`` to one stage's layers, in place; parameters keep their names.

    A tied embedding stays on the first and on the last stage, under both its names.
    """
    _replace(_replacements(model, stage, stage_layers))


def check_stages(model: Any, stage_layers: Sequence[range]) -> None:
    """Raise ModelError if the stages of ``model``, run one after the other, do not equal the whole model.

    Call it before ``keep_stage``. Raises ConfigError if a stage would have nothing to train. Of a model on
    the meta device it runs stages of a small random copy.
    """
    if any(parameter.requires_grad for parameter in model.parameters()):
        _check_trained(model, stage_layers)
    if is_empty(model):
        model = small_copy(model)
        count = len(model.get_decoder().layers)
        stage_layers = assign_layers(count, min(count, len(stage_layers)))
    _check_equal(model, stage_layers)


def _check_trained(model: Any, stage_layers: Sequence[range]) -> None:
    for stage in range(len(stage_layers)):
        with _reduced(model, stage, stage_layers):
            if not any(parameter.requires_grad for parameter in model.parameters()):
                raise ConfigError(
                    f"--freeze leaves nothing to train in stage {stage} of --pp_size {len(stage_layers)}",
                    hint="freeze less, or lower --pp_size",
                )


@torch.no_grad()
def _check_equal(model: Any, stage_layers: Sequence[range]) -> None:
    forest = forest_from_sequences([[0, 1, 2, 3, 4], [2, 1, 0]], [[False] * 5, [False] * 3])
    executor = build_executor(model, trains=model.training)
    whole = executor(forest)
    hidden = None
    for stage in range(len(stage_layers)):
        with _reduced(model, stage, stage_layers):
            hidden = run_stage(executor, forest, hidden)
    error = float((cast(Tensor, hidden) - whole).abs().max())
    # Ask for `not ≤`: a NaN is greater than nothing.
    if not error <= 1e-2 * float(whole.abs().max()):
        raise ModelError(
            f"{type(model).__name__} does not run its layers one after the other: the hidden states of"
            f" {len(stage_layers)} stages differ by {error:.3g} from those of the whole model",
            hint="set --pp_size 1",
        )


def tied_weight(model: Any) -> nn.Parameter | None:
    """Return the weight that the embedding, or its stand-in, shares with the output head; None if untied."""
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    head = getattr(model.get_output_embeddings(), "weight", None)
    return cast(nn.Parameter, head) if head is not None and head is embedding else None


@contextmanager
def _reduced(model: Any, stage: int, stage_layers: Sequence[range]) -> Iterator[None]:
    replacements = _replacements(model, stage, stage_layers)
    whole = [(parent, name, cast(nn.Module, getattr(parent, name))) for parent, name, _ in replacements]
    _replace(replacements)
    try:
        yield
    finally:
        _replace(whole)


def _replace(replacements: Sequence[Replacement]) -> None:
    for parent, name, module in replacements:
        setattr(parent, name, module)


def _replacements(model: Any, stage: int, stage_layers: Sequence[range]) -> list[Replacement]:
    """Return the modules that ``keep_stage`` puts in place of other stages'."""
    decoder, embedding = model.get_decoder(), model.get_input_embeddings()
    is_first, is_last = stage == 0, stage == len(stage_layers) - 1
    is_tied = tied_weight(model) is not None
    replacements: list[Replacement] = [
        (decoder.layers, str(index), Identity())
        for index in range(len(decoder.layers))
        if index not in stage_layers[stage]
    ]
    if not is_first:
        received = ReceivedStates(embedding, keeps_weight=is_last and is_tied)
        replacements.append((*_place(model, embedding), received))
    if not is_last:
        replacements += [(decoder, name, Identity()) for name in _after_layers(decoder)]
    if not is_last and not (is_first and is_tied):
        replacements.append((*_place(model, model.get_output_embeddings()), Identity()))
    return replacements


def _after_layers(decoder: nn.Module) -> list[str]:
    """Return the names of a decoder's modules with weights after its layers: the final norm."""
    names = [name for name, _ in decoder.named_children()]
    return [
        name
        for name in names[names.index("layers") + 1 :]
        if next(decoder.get_submodule(name).parameters(), None) is not None
    ]


def _place(model: nn.Module, module: nn.Module) -> tuple[nn.Module, str]:
    """Return the parent of ``module`` within ``model``, and its name there."""
    path = next(name for name, found in model.named_modules() if found is module)
    parent, _, name = path.rpartition(".")
    return model.get_submodule(parent), name


def sum_tied_gradients(model: Any, stages: ProcessGroup) -> nn.Parameter | None:
    """Sum the gradients of the two copies of a tied embedding, on the first and last stage; collective.

    Both get the same bits, and so stay equal. Returns the parameter to leave out of the gradient norm here:
    the last stage's copy, since the first stage counts it.
    """
    stage, last = dist.get_rank(stages), dist.get_world_size(stages) - 1
    weight = tied_weight(model)
    if stage not in (0, last) or weight is None or not weight.requires_grad:
        return None
    own = _placed_gradient(weight)
    sent, other = own.contiguous(), torch.empty_like(own, memory_format=torch.contiguous_format)
    # Exchange between the two: a sum over the group needs the stages between, which have no such weight.
    peer = last - stage
    # Start both together: a send that waits for its receive would wait on both stages.
    operations = [
        dist.P2POp(dist.isend, sent, group=stages, group_peer=peer),
        dist.P2POp(dist.irecv, other, group=stages, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    own.add_(other)
    return weight if stage == last else None


def _placed_gradient(weight: nn.Parameter) -> Tensor:
    """Return the local part of the gradient of ``weight``, after redistributing it like ``weight``.

    The gradient of a tensor-parallel embedding arrives whole on every rank.
    """
    # Send zeros where no micro-batch gave a gradient: the other stage waits for them.
    gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
    if isinstance(gradient, DTensor) and isinstance(weight, DTensor):
        gradient = gradient.redistribute(weight.device_mesh, weight.placements)
    weight.grad = gradient
    return local_part(gradient)
