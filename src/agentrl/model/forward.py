"""Turn hidden states of a forest into logprobs of its trainable tokens, and check a model before training."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn

from agentrl.data.forest import ForestRouting, Ints, TokenForest, forest_from_sequences, merge_prefixes
from agentrl.documents.model_call import ExpertShape, SamplingMask
from agentrl.documents.record import TopLogprobs
from agentrl.errors import ModelError
from agentrl.losses.loss import TEACHER
from agentrl.model.attention.executor import build_executor
from agentrl.model.attention.sdpa import set_attention
from agentrl.model.load import allocate, compute_buffers, disable_dropout, is_empty
from agentrl.model.logprobs import (
    DEFAULT_CHUNK,
    DEFAULT_VOCAB_CHUNK,
    KeptIds,
    OutputHead,
    Projection,
    output_head,
    token_logprobs,
)
from agentrl.model.routing import RouterReplay, find_routers
from agentrl.model.vision import reads_images

_CHUNK = 1024
"""Ids whose rows of the output head are in memory at a time."""
_LEAST = 1e-6
"""Smallest probability of all other ids together."""


def reverse_kl(
    hidden: Tensor,
    head: OutputHead,
    parent: Tensor,
    target_ids: Tensor,
    temperature: Tensor,
    logprobs: Tensor,
    top: TopLogprobs,
    kept: SamplingMask | None = None,
) -> Tensor:
    """Return Σ π·(log π − log π_teacher) of each token in nats, float32[T], with gradient; 0 without ids.

    The outcomes are the teacher's likeliest ids and, as one, all others: by the log-sum inequality at most
    the KL over the whole vocabulary. An id beyond the head's rows, of a teacher with more padding, is one of
    the others, and so is one that a token of ``kept`` was not sampled from: π of it is 0.
    hidden [N, H] and ``logprobs`` float32[T] (of ``target_ids``) carry gradients; the rest is as for
    ``token_logprobs``. A logit is projected for the ids of ``top`` and for the target alone: their difference
    and the target's logprob give the logprob of an id.
    """
    device = hidden.device
    token = np.repeat(np.arange(len(top)), top.ids.counts)
    known = (top.ids.ids < head.vocabulary) & _are_kept(token, top.ids.ids, kept)
    row, ids, wanted = (
        torch.from_numpy(values[known]).to(device)
        for values in (token, top.ids.ids, top.logprobs.astype(np.float32))
    )
    divisor = temperature.to(device)
    normalizer = _logits(hidden, head, parent, target_ids, divisor) - logprobs
    found = _logits(hidden, head, parent[row], ids, divisor[row]) - normalizer[row]
    share = found.exp()

    def summed(values: Tensor) -> Tensor:
        return values.new_zeros(len(top)).index_add(0, row, values)

    # Bound it: rounding may add the known shares up to 1, and a rest of 0 has no logarithm.
    rest, teacher_rest = ((1 - summed(each)).clamp(min=_LEAST) for each in (share, wanted.exp()))
    has_any = torch.from_numpy(top.ids.counts > 0).to(device)
    return torch.where(has_any, summed(share * (found - wanted)) + rest * (rest / teacher_rest).log(), 0.0)


def _are_kept(
    token: NDArray[np.int64], ids: NDArray[np.int64], kept: SamplingMask | None
) -> NDArray[np.bool_]:
    """Return bool[K]: whether token[i] could have been sampled as ids[i]."""
    if kept is None:
        return np.ones(len(ids), np.bool_)
    width = 1 + max(ids.max(initial=0), kept.ids.max(initial=0))
    allowed = np.repeat(np.arange(len(kept)), kept.counts) * width + kept.ids
    found: NDArray[np.bool_] = (kept.counts[token] == 0) | np.isin(token * width + ids, allowed)
    return found


def _logits(hidden: Tensor, head: OutputHead, place: Tensor, ids: Tensor, divisor: Tensor) -> Tensor:
    """Return the logit / temperature of ids[i] at hidden[place[i]], float32[K], with gradient."""
    products: Tensor = _ChosenProducts.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, place, ids, head
    )
    logits = products * head.scale
    if head.softcap is not None:
        logits = head.softcap * (logits / head.softcap).tanh()
    return logits / divisor


class _ChosenProducts(torch.autograd.Function):
    """Multiplies hidden[place[i]] by row ids[i] of the head alone.

    Autograd of ``weight[ids]`` would make a gradient of the whole head for each chunk, and add them up in the
    dtype of the products. Here one float32 tensor takes all of them, as in ``_ChunkedLogprobs``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        place: Tensor,
        ids: Tensor,
        head: OutputHead,
    ) -> Tensor:
        products = hidden.new_zeros(len(ids), dtype=torch.float32)
        for here in _chunks(len(ids)):
            row, is_own = head.own_rows(ids[here])
            part = (hidden[place[here]].float() * weight[row].float()).sum(-1)
            if bias is not None:
                part += bias[row].float()
            # Leave 0 for rows of other ranks, which the sum below adds.
            products[here] = part * is_own
        if head.group is not None:
            distributed.all_reduce(products, distributed.ReduceOp.SUM, head.group)
        ctx.save_for_backward(hidden, weight, bias, place, ids)
        ctx.head = head
        return products

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, place, ids = ctx.saved_tensors
        head: OutputHead = ctx.head
        totals = [
            torch.zeros_like(each, dtype=torch.float32) if each is not None and needed else None
            for each, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        ]
        for here in _chunks(len(ids)):
            row, is_own = head.own_rows(ids[here])
            grad, at = (grads[0][here] * is_own)[:, None], place[here]
            for total, index, part in zip(
                totals, (at, row, row), (weight[row], hidden[at], torch.ones_like(grad)), strict=True
            ):
                if total is not None:
                    values = grad * part.float()
                    total.index_put_((index,), values.view(-1, *total.shape[1:]), accumulate=True)
        if totals[0] is not None and head.group is not None:
            distributed.all_reduce(totals[0], distributed.ReduceOp.SUM, head.group)
        rounded = [
            None if total is None else total.to(each.dtype)
            for total, each in zip(totals, (hidden, weight, bias), strict=True)
        ]
        return (*rounded, None, None, None)


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK))


logger = logging.getLogger(__name__)
_VOCABULARY, _FEATURES, _LAYERS = 64, 64, 3
_LOGITS = 10.0
"""Standard deviation of the copy's logits: as large as a trained model's, so that a cap on them shows."""
_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOptions:
    """How a forward computes logprobs. No option changes a loss by more than rounding."""

    chunk_size: int = DEFAULT_CHUNK
    """Tokens per chunk of the projection onto the vocabulary."""
    vocab_chunk_size: int = DEFAULT_VOCAB_CHUNK
    """Vocabulary entries per chunk of the projection."""
    entropy_gradient: bool = False
    """Give entropies a gradient."""
    divergence: bool = False
    """Return the divergence from a teacher too, for forests with the teacher's likeliest ids."""


def forest_logprobs(
    hidden: Tensor,
    head: OutputHead,
    forest: TokenForest,
    options: ForwardOptions,
    *,
    chosen: Ints | None = None,
    parent: Ints | None = None,
) -> tuple[Tensor, ...]:
    """Return logprob (float32[T], with gradient) and entropy (float32[T]) of trainable tokens.

    With ``options.divergence``, a forest that has a teacher's likeliest ids gives a third tensor, the
    ``reverse_kl`` (float32[T], with gradient) to the teacher.

    Both are of softmax(logits / temperature), at the temperature that each token was sampled with and over
    the ids that it was sampled from.
    ``hidden`` [N, H] has a row per token of ``forest``. For a part of the tokens, ``chosen`` (int64[t])
    selects trainable tokens, and ``parent`` (int64[t]) is the row of ``hidden`` that predicts each one.
    """
    target = forest.target if chosen is None else forest.target[chosen]
    temperature = forest.temperature if chosen is None else forest.temperature[chosen]
    rows = forest.parent[target] if parent is None else parent
    mask = forest.sampling_mask
    if mask is not None and chosen is not None:
        mask = mask.select(chosen)
    parents, ids = (torch.from_numpy(array).to(hidden.device) for array in (rows, forest.input_ids[target]))
    logprobs, entropy = token_logprobs(
        hidden,
        head,
        parents,
        ids,
        temperature=torch.from_numpy(temperature),
        kept=None if mask is None else KeptIds.of(mask, hidden.device),
        entropy_gradient=options.entropy_gradient,
        chunk_size=options.chunk_size,
        vocab_chunk_size=options.vocab_chunk_size,
    )
    top = None if forest.columns is None else forest.columns.top.get(TEACHER)
    if top is None or not options.divergence:
        return logprobs, entropy
    if chosen is not None:
        top = top.select(chosen)
    divergence = reverse_kl(hidden, head, parents, ids, torch.from_numpy(temperature), logprobs, top, mask)
    return logprobs, entropy, divergence


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
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        return
    is_tied = head.weight is embedding.weight
    size = min(_VOCABULARY, embedding.num_embeddings)
    embedding.weight = nn.Parameter(embedding.weight[:size])
    # Drop the padding id: torch refuses one beyond the rows that are left.
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
