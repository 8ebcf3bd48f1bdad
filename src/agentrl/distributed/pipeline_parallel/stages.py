"""Which layers a pipeline's stage holds, and a whole model cut down to one stage, its names kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from agentrl.data.forest import TokenForest, forest_from_sequences
from agentrl.errors import ConfigError, ModelError
from agentrl.model.attention.executor import ForestExecutor, build_executor
from agentrl.train.throughput import ModelShape

_PROJECTED = 0.5
"""The share of tokens that the output head is taken to project: those that are trained on."""

Swap = tuple[nn.Module, str, nn.Module]
"""A parent, the name of its child, and what stands there instead."""


def assign_layers(layers: int, stages: int, head: float = 0.0) -> list[range]:
    """Which of ``layers`` each stage holds, so that the slowest has least to do.

    The last stage also has the output head, the work of ``head`` layers; of what does not divide, earlier
    stages, which keep more micro-batches, get less. Raises ConfigError for more stages than layers.
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


def deal_model(model: Any, stages: int) -> list[range]:
    """``assign_layers`` for a causal LM; ModelError where its decoder has no list of them."""
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(
            f"the decoder of {type(model).__name__} has no list of layers to deal to stages",
            hint="set --pp_size 1",
        )
    shape = ModelShape.of(model.config)
    head = _PROJECTED * shape.hidden * shape.vocabulary * shape.layers / shape.layer_weights
    return assign_layers(len(layers), stages, head)


class Identity(nn.Module):
    """In place of what another stage computes: hidden states go through as they came."""

    def forward(self, hidden: Tensor, *unused: Any, **named: Any) -> Tensor:
        """``hidden``."""
        return hidden


class ReceivedStates(nn.Module):
    """In place of a later stage's embedding: the row of token i is the hidden state that came for it."""

    def __init__(self, embedding: nn.Embedding, *, keeps_weight: bool) -> None:
        super().__init__()
        self.num_embeddings = embedding.num_embeddings
        self.weight = embedding.weight if keeps_weight else None
        """Of a tied output head, under the name that the whole model has for it."""
        self.states: Tensor | None = None

    def forward(self, index: Tensor) -> Tensor:
        """Hidden states [..., H] of the tokens ``index``, with gradient."""
        return nn.functional.embedding(index, cast(Tensor, self.states))


@contextmanager
def receiving(model: Any, states: Tensor | None) -> Iterator[None]:
    """Let a later stage's embedding give ``states`` [n, H] for the indices 0 to n; None on the first."""
    if states is None:
        yield
        return
    table: ReceivedStates = model.get_input_embeddings()
    table.states = states
    try:
        yield
    finally:
        table.states = None


def run_stage(executor: ForestExecutor, forest: TokenForest, received: Tensor | None) -> Tensor:
    """Return hidden states [N, H] after this stage's layers; ``received`` from the stage before, or None."""
    if received is not None:
        forest = replace(forest, input_ids=np.arange(forest.tokens))
    with receiving(executor.model, received):
        return executor(forest)


def keep_stage(model: Any, stage: int, shares: Sequence[range]) -> None:
    """Cut ``model`` down to one stage's layers, in place; parameters keep the names of the whole model.

    A tied embedding stays, with both its names, on the first stage and on the last.
    """
    _put(_swaps(model, stage, shares))


@torch.no_grad()
def check_stages(model: Any, shares: Sequence[range]) -> None:
    """Refuse, before it is cut, a model whose stages after each other are not the whole; ModelError.

    Refused with ConfigError is one of which a stage would have nothing to train.
    """
    forest = forest_from_sequences([[0, 1, 2, 3, 4], [2, 1, 0]], [[False] * 5, [False] * 3])
    executor = build_executor(model, trains=model.training)
    whole = executor(forest)
    hidden = None
    for stage in range(len(shares)):
        with _cut(model, stage, shares):
            if not any(parameter.requires_grad for parameter in model.parameters()):
                raise ConfigError(
                    f"--freeze leaves nothing to train in stage {stage} of --pp_size {len(shares)}",
                    hint="freeze less, or lower --pp_size",
                )
            hidden = run_stage(executor, forest, hidden)
    error = float((cast(Tensor, hidden) - whole).abs().max())
    if not error <= 1e-2 * float(whole.abs().max()):
        raise ModelError(
            f"{type(model).__name__} is not its layers one after the other: in {len(shares)} stages its"
            f" hidden states differ by {error:.3g}",
            hint="set --pp_size 1",
        )


def tied_weight(model: Any) -> nn.Parameter | None:
    """The weight that the model's embedding, or what stands for it, shares with its head; None without."""
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    head = getattr(model.get_output_embeddings(), "weight", None)
    return cast(nn.Parameter, head) if head is not None and head is embedding else None


@contextmanager
def _cut(model: Any, stage: int, shares: Sequence[range]) -> Iterator[None]:
    swaps = _swaps(model, stage, shares)
    whole = [(parent, name, cast(nn.Module, getattr(parent, name))) for parent, name, _ in swaps]
    _put(swaps)
    try:
        yield
    finally:
        _put(whole)


def _put(swaps: Sequence[Swap]) -> None:
    for parent, name, module in swaps:
        setattr(parent, name, module)


def _swaps(model: Any, stage: int, shares: Sequence[range]) -> list[Swap]:
    """What ``keep_stage`` puts where."""
    decoder, embedding = model.get_decoder(), model.get_input_embeddings()
    is_first, is_last = stage == 0, stage == len(shares) - 1
    is_tied = tied_weight(model) is not None
    swaps: list[Swap] = [
        (decoder.layers, str(place), Identity())
        for place in range(len(decoder.layers))
        if place not in shares[stage]
    ]
    if not is_first:
        received = ReceivedStates(embedding, keeps_weight=is_last and is_tied)
        swaps.append((*_place(model, embedding), received))
    if not is_last:
        swaps += [(decoder, name, Identity()) for name in _after_layers(decoder)]
    if not is_last and not (is_first and is_tied):
        swaps.append((*_place(model, model.get_output_embeddings()), Identity()))
    return swaps


def _after_layers(decoder: nn.Module) -> list[str]:
    """What a decoder computes with weights after its layers: its final norm."""
    names = [name for name, _ in decoder.named_children()]
    return [
        name
        for name in names[names.index("layers") + 1 :]
        if next(decoder.get_submodule(name).parameters(), None) is not None
    ]


def _place(model: nn.Module, module: nn.Module) -> tuple[nn.Module, str]:
    """The parent of ``module`` within ``model``, and the name that it has there."""
    path = next(name for name, found in model.named_modules() if found is module)
    parent, _, name = path.rpartition(".")
    return model.get_submodule(parent), name
