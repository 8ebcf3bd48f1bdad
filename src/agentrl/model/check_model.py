"""Check, before training, that executors and output head compute what the model itself computes."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agentrl.data.forest import ForestRouting, forest_from_sequences, merge_prefixes
from agentrl.documents.model_call import ExpertShape
from agentrl.errors import ModelError
from agentrl.model.attention import build_executor, set_attention
from agentrl.model.load import allocate, compute_buffers, disable_dropout, is_empty
from agentrl.model.logprobs import DEFAULT_VOCAB_CHUNK, Projection, output_head
from agentrl.model.routing import RouterReplay, find_routers
from agentrl.model.vision import reads_images

logger = logging.getLogger(__name__)
_VOCABULARY, _FEATURES, _LAYERS = 64, 64, 3
_LOGITS = 10.0
"""Standard deviation of the copy's logits: as large as a trained model's, so that a cap on them shows."""
_TOLERANCE = 1e-2


@torch.no_grad()
def check_model(model: Any) -> None:
    """Raise ModelError for a model that cannot be trained exactly through executors and ``output_head``.

    Compares the model's own logits of two sequences with a common prefix with those of each executor that
    may run it. Of a model on the meta device, which several ranks will split, it checks a small random copy
    in float32: what makes a model inexact is its class and its configuration, and the copy has both. (Split,
    its own forward may not run: a stage has no logits, and tensor-parallel ranks may not have a head of the
    model's.) So it does of a bfloat16 model without images: in a trained one, rounding alone can change a
    logit by a quarter.
    """
    is_rounded = model.dtype == torch.bfloat16 and not reads_images(model.config)
    if is_rounded or is_empty(model):
        model = small_copy(model)
    vocabulary = model.config.get_text_config().vocab_size
    common = [index % vocabulary for index in range(8)]
    sequences = [[*common, 2 % vocabulary, 0, 1], [*common, 3 % vocabulary, 1]]
    forest = merge_prefixes(forest_from_sequences(sequences, [[False] * len(ids) for ids in sequences]))
    set_attention(model, "sdpa")
    alone = [
        model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]
        for ids in sequences
    ]
    logits = torch.cat([alone[0], alone[1][len(common) :]])
    for name in build_executor(model).choices(forest):
        check_output_head(model, build_executor(model, name)(forest), logits)


@torch.no_grad()
def check_replay(model: Any, shape: ExpertShape) -> None:
    """Raise ModelError if a small copy of ``model`` does not use the experts that it is given."""
    small = small_copy(model)
    forest = forest_from_sequences([[0, 1, 2, 3]], [[False] * 4])
    layers = len(small.get_decoder().layers)
    wanted = np.arange(shape.top_k) + np.zeros((forest.tokens, layers, 1))
    forest = replace(forest, routing=ForestRouting(wanted.astype(np.int16)))
    replay = RouterReplay.install(small, shape)
    build_executor(small, trains=False)(forest)
    if replay.choices != forest.tokens * len(find_routers(small)):
        raise ModelError(
            f"{type(model).__name__} does not pass its decoder's arguments to the attention of each layer",
            hint="set --router_replay off",
        )


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
        torch.default_generator.manual_seed(0)  # torch.manual_seed would reseed every GPU too
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
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear | None):
        return
    is_tied = head is not None and head.weight is embedding.weight
    size = min(_VOCABULARY, embedding.num_embeddings)
    embedding.weight = nn.Parameter(embedding.weight[:size])
    # Drop the padding id: torch refuses one beyond the rows that are left.
    embedding.num_embeddings, embedding.padding_idx = size, None
    model.config.get_text_config().vocab_size = size
    if head is None:  # a reward model's decoder
        return
    head.weight = embedding.weight if is_tied else nn.Parameter(head.weight[:size])
    head.out_features = size
    if head.bias is not None:
        head.bias = nn.Parameter(head.bias[:size])


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


@torch.no_grad()
def check_output_head(model: nn.Module, hidden: Tensor, logits: Tensor) -> None:
    """Raise ModelError if ``output_head`` of ``hidden`` [n, H] is not the model's own ``logits`` [n, V].

    Such a head does something that the model's config does not declare.
    """
    head = output_head(model)
    blocks = Projection(head, DEFAULT_VOCAB_CHUNK).blocks(hidden, 1.0)  # each block overwrites the last
    ours = torch.cat([block.clone() for _, block in blocks], -1)
    error = float((ours - logits.float()).abs().max())
    # Negate <=, so that NaN is refused too.
    if not error <= _TOLERANCE * max(1.0, float(logits.abs().max())):
        raise ModelError(
            f"the logits of {type(model).__name__} differ by {error:.3g} from its linear head's",
            hint="use a model whose logits are a linear layer of the last hidden state",
        )
