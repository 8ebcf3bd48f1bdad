"""Copy a model's architecture at a small size, with random weights, to check how it computes."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import nn

from agentrl.model.empty import allocate, compute_buffers
from agentrl.model.load import disable_dropout

logger = logging.getLogger(__name__)

_VOCABULARY, _FEATURES, _LAYERS = 64, 64, 3
_LOGITS = 10.0
"""Standard deviation of the copy's logits: as large as a trained model's, so that a cap on them shows."""


def list_kinds(model: Any) -> list[int]:
    """Return the kind of each layer of a causal LM, from 0; empty if its decoder has no list of layers."""
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return []
    attention = getattr(model.config.get_text_config(), "layer_types", None) or [""] * len(layers)
    numbers: dict[Any, int] = {}
    return [
        numbers.setdefault((_shapes(layer), kind), len(numbers))
        for layer, kind in zip(layers, attention, strict=False)
    ]


@torch.no_grad()
def small_copy(model: Any) -> Any:
    """Return a model of the same class on the CPU, in float32, with random weights and without adapters.

    It has the same attention, but few layers (the first ones, up to one of each kind), few ids and narrow
    MLPs. The global random state stays as it is.
    """
    small = _build(model)
    _cut_layers(small, list_kinds(model))
    _cut_vocabulary(small)
    allocate(small, torch.device("cpu"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _randomize(small)
        compute_buffers(small, ())
    disable_dropout(small)
    return small.eval()


def _build(model: Any) -> Any:
    """Return an empty model like ``model`` with narrow MLPs, or with its own if its class needs those."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    for name, value in vars(text).items():
        if name.endswith("intermediate_size") and isinstance(value, int):
            setattr(text, name, min(value, _FEATURES))
    with torch.device("meta"):
        try:
            return type(model)(config)
        except (ValueError, RuntimeError, AssertionError) as error:
            logger.info("%s is checked with all of its features: %s", type(model).__name__, error)
            return type(model)(copy.deepcopy(model.config))


def _cut_layers(model: Any, kinds: list[int]) -> None:
    if not kinds:
        return
    decoder, text = model.get_decoder(), model.config.get_text_config()
    count = max(_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds)))
    decoder.layers = decoder.layers[:count]
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:count]
    text.num_hidden_layers = len(decoder.layers)


def _cut_vocabulary(model: Any) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        return
    is_tied = head.weight is embedding.weight
    size = min(_VOCABULARY, embedding.num_embeddings)
    embedding.weight = nn.Parameter(embedding.weight[:size])
    embedding.num_embeddings, embedding.padding_idx = size, None
    head.weight = embedding.weight if is_tied else nn.Parameter(head.weight[:size])
    head.out_features = size
    if head.bias is not None:
        head.bias = nn.Parameter(head.bias[:size])
    model.config.get_text_config().vocab_size = size


def _randomize(model: Any) -> None:
    """Draw weights with which every layer contributes to the logits, at any size."""
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(std=weight.shape[-1] ** -0.5)
        else:
            weight.normal_(mean=1.0, std=0.1)
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        head.weight.mul_(_LOGITS)


def _shapes(layer: nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
