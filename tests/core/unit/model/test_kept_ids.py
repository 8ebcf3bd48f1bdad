"""Logprobs over the ids that each token was sampled from, against a softmax over these in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import chains, model_logprobs, packed, tiny_model, tree

from agentrl.data.forest import concatenate, merge_prefixes, restrict
from agentrl.documents.model_call import SamplingMask
from agentrl.model.logprobs import KeptIds, OutputHead, token_logprobs

N, T, H, V = 30, 23, 16, 53


def rows(seed: int, targets: np.ndarray, vocabulary: int = V) -> list[list[int]]:
    """Of each target, the target and up to a third of the vocabulary; every fourth one keeps all ids."""
    rng = np.random.default_rng(seed)
    picked = [rng.choice(vocabulary, rng.integers(1, vocabulary // 3), replace=False) for _ in targets]
    return [
        [] if place % 4 == 0 else sorted({int(target), *(int(id) for id in ids)})
        for place, (target, ids) in enumerate(zip(targets, picked, strict=True))
    ]


def excluded(kept: list[list[int]], vocabulary: int = V) -> torch.Tensor:
    """bool[T, V]."""
    mask = torch.ones(len(kept), vocabulary, dtype=torch.bool)
    for row, ids in enumerate(kept):
        mask[row, ids or slice(None)] = False
    return mask


@pytest.mark.parametrize(("chunk_size", "vocab_chunk_size"), [(1, V), (8, 7), (T, 1), (1000, 1000)])
@pytest.mark.parametrize(("temperature", "scale", "softcap"), [(0.7, 1.0, None), (1.3, 0.5, 5.0)])
def test_values_and_gradients_of_a_renormalized_softmax(
    chunk_size: int, vocab_chunk_size: int, temperature: float, scale: float, softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=generator).requires_grad_() for shape in ((N, H), (V, H), (V,))]
    hidden, weight, bias = inputs
    parent = torch.randint(0, N, (T,), generator=generator)
    target = torch.randint(0, V, (T,), generator=generator)
    upstream = torch.randn(2, T, generator=generator)
    kept = rows(1, target.numpy())
    ours = token_logprobs(
        hidden, OutputHead(weight, bias, scale, softcap), parent, target, temperature=temperature,
        kept=KeptIds.of(SamplingMask.of(kept), hidden.device), entropy_gradient=True,
        chunk_size=chunk_size, vocab_chunk_size=vocab_chunk_size,
    )  # fmt: skip
    logits = scale * (hidden.double()[parent] @ weight.double().T + bias.double())
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = (logits / temperature).masked_fill(excluded(kept), -torch.inf).log_softmax(-1)
    finite = logprobs.masked_fill(excluded(kept), 0.0)
    theirs = (logprobs.gather(-1, target[:, None])[:, 0], -(logprobs.exp() * finite).sum(-1))
    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    gradients = [
        torch.autograd.grad(sum((part * up).sum() for part, up in zip(both, upstream, strict=True)), inputs)
        for both in (ours, theirs)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_a_slice_of_the_vocabulary_excludes_its_own_ids() -> None:
    kept = rows(2, np.arange(T))
    mask = KeptIds.of(SamplingMask.of(kept), torch.device("cpu"))
    for tokens in (slice(0, 9), slice(9, T), slice(0, 1)):
        logits = torch.zeros(tokens.stop - tokens.start, 20)
        mask.apply(logits, tokens, 30)
        assert torch.equal(logits < 0, excluded(kept)[tokens, 30:50])


def test_a_forest_keeps_the_mask_of_its_tokens_through_cuts_and_merges() -> None:
    model = tiny_model("qwen3")
    vocabulary = model.config.vocab_size
    forest = packed([*chains(), tree()])
    targets = forest.input_ids[forest.target]
    kept = rows(3, targets, vocabulary)
    masked = replace(forest, sampling_mask=SamplingMask.of(kept))
    ours = model_logprobs(model, masked)
    whole = model_logprobs(model, forest)
    is_whole = np.array([not ids for ids in kept])
    torch.testing.assert_close(ours[is_whole], whole[is_whole])
    assert bool((ours[~is_whole] > whole[~is_whole]).all())
    torch.testing.assert_close(model_logprobs(model, merge_prefixes(masked)), ours)
    both = concatenate([forest, masked])
    torch.testing.assert_close(model_logprobs(model, both), torch.cat([whole, ours]))
    chosen = np.arange(len(targets)) % 3 == 1
    torch.testing.assert_close(model_logprobs(model, restrict(masked, chosen)), ours[chosen])
