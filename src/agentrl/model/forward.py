"""Turn hidden states of a forest into logprobs of its trainable tokens, and check a model before training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.data.forest import Ints, TokenForest, forest_from_sequences
from agentrl.data.prefix_merging import merge_prefixes
from agentrl.model.attention.compatibility import set_attention
from agentrl.model.attention.executor import build_executor
from agentrl.model.empty import is_empty
from agentrl.model.load import reads_images
from agentrl.model.logprobs import DEFAULT_CHUNK, token_logprobs
from agentrl.model.output_head import DEFAULT_VOCAB_CHUNK, OutputHead, check_output_head
from agentrl.model.small_copy import small_copy


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOptions:
    """How a forward computes logprobs. No option changes a loss by more than rounding."""

    chunk_size: int = DEFAULT_CHUNK
    """Tokens per chunk of the projection onto the vocabulary."""
    vocab_chunk_size: int = DEFAULT_VOCAB_CHUNK
    """Vocabulary entries per chunk of the projection."""
    entropy_gradient: bool = False
    """Give entropies a gradient."""


def forest_logprobs(
    hidden: Tensor,
    head: OutputHead,
    forest: TokenForest,
    options: ForwardOptions,
    *,
    chosen: Ints | None = None,
    parent: Ints | None = None,
) -> tuple[Tensor, Tensor]:
    """Return logprob (float32[T], with gradient) and entropy (float32[T]) of trainable tokens.

    Both are of softmax(logits / temperature), at the temperature that each token was sampled with.
    ``hidden`` [N, H] has a row per token of ``forest``. For a part of the tokens, ``chosen`` (int64[t])
    selects trainable tokens, and ``parent`` (int64[t]) is the row of ``hidden`` that predicts each one.
    """
    target = forest.target if chosen is None else forest.target[chosen]
    temperature = forest.temperature if chosen is None else forest.temperature[chosen]
    rows = forest.parent[target] if parent is None else parent
    return token_logprobs(
        hidden,
        head,
        torch.from_numpy(rows).to(hidden.device),
        torch.from_numpy(forest.input_ids[target]).to(hidden.device),
        temperature=torch.from_numpy(temperature),
        entropy_gradient=options.entropy_gradient,
        chunk_size=options.chunk_size,
        vocab_chunk_size=options.vocab_chunk_size,
    )


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
