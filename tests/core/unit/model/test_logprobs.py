"""Chunked logprobs against log_softmax over the vocabulary, or over the ids that a token was sampled from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from peak_memory import peak_allocated
from tiny_models import chains, model_logprobs, packed, tiny_model, tree

from agentrl.data.forest import concatenate, merge_prefixes, restrict
from agentrl.documents.model_call import SamplingMask
from agentrl.documents.record import TopLogprobs
from agentrl.errors import ModelError
from agentrl.model import logprobs as chunked
from agentrl.model.check_model import check_output_head
from agentrl.model.logprobs import KeptIds, OutputHead, output_head, reverse_kl, token_logprobs

N, T, H, V = 40, 29, 16, 53


def tensors(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(N, H, generator=generator).to(dtype).requires_grad_(),
        "weight": torch.randn(V, H, generator=generator).to(dtype).requires_grad_(),
        "bias": torch.randn(V, generator=generator).to(dtype).requires_grad_(),
        "parent": torch.randint(0, N, (T,), generator=generator),
        "target": torch.randint(0, V, (T,), generator=generator),
        "upstream": torch.randn(T, generator=generator),
    }


def reference(
    t: dict[str, torch.Tensor], temperature: torch.Tensor | float, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = scale * (t["hidden"].float()[t["parent"]] @ t["weight"].float().T + t["bias"].float())
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature[:, None]
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs.gather(-1, t["target"][:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


TEMPERATURES = {
    "1": 1.0, "below 1": 0.7, "above 1": 1.3, "one for each target": torch.linspace(0.4, 1.6, T),
    "the same for each target": torch.full((T,), 0.7),
}  # fmt: skip


@pytest.mark.parametrize(("chunk_size", "vocab_chunk_size"), [(1, 53), (8, 7), (29, 1), (1000, 1000)])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, 5.0)])
@pytest.mark.parametrize("heat", TEMPERATURES)
def test_values_and_gradients(
    chunk_size: int, vocab_chunk_size: int, heat: str, scale: float, softcap: float | None
) -> None:
    t, temperature = tensors(), TEMPERATURES[heat]
    head = OutputHead(t["weight"], t["bias"], scale, softcap)
    logprobs, entropy = token_logprobs(
        t["hidden"], head, t["parent"], t["target"],
        temperature=temperature, chunk_size=chunk_size, vocab_chunk_size=vocab_chunk_size,
    )  # fmt: skip
    expected, expected_entropy = reference(t, temperature, scale, softcap)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-5)
    assert not entropy.requires_grad
    inputs = (t["hidden"], t["weight"], t["bias"])
    ours = torch.autograd.grad((logprobs * t["upstream"]).sum(), inputs)
    theirs = torch.autograd.grad((expected * t["upstream"]).sum(), inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [8, 1000])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, 5.0)])
@pytest.mark.parametrize("heat", ["1", "one for each target"])
@pytest.mark.parametrize("reads_logprobs", [True, False])
def test_the_gradient_of_the_entropy(
    chunk_size: int, scale: float, softcap: float | None, heat: str, reads_logprobs: bool
) -> None:
    t, temperature = tensors(), TEMPERATURES[heat]
    both = token_logprobs(
        t["hidden"], OutputHead(t["weight"], t["bias"], scale, softcap), t["parent"], t["target"],
        temperature=temperature, entropy_gradient=True, chunk_size=chunk_size, vocab_chunk_size=7,
    )  # fmt: skip
    inputs = (t["hidden"], t["weight"], t["bias"])
    gradients = []
    for logprobs, entropy in (both, reference(t, temperature, scale, softcap)):
        loss = (entropy * t["upstream"].flip(0)).sum()
        if reads_logprobs:
            loss = loss + (logprobs * t["upstream"]).sum()
        gradients.append(torch.autograd.grad(loss, inputs))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_bfloat16_weights_give_float32_logits() -> None:
    t = tensors(dtype=torch.bfloat16)
    head = OutputHead(t["weight"], t["bias"])
    logprobs, _ = token_logprobs(t["hidden"], head, t["parent"], t["target"], chunk_size=8)
    expected, _ = reference(t, 1.0, 1.0, None)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    assert t["weight"].grad.dtype == torch.bfloat16


def test_a_frozen_head_gets_no_gradient() -> None:
    t = tensors()
    head = OutputHead(t["weight"].detach())
    token_logprobs(t["hidden"], head, t["parent"], t["target"])[0].sum().backward()
    assert t["hidden"].grad is not None
    assert t["weight"].grad is None


def test_logits_far_apart_neither_overflow_nor_lose_the_entropy() -> None:
    t = tensors()
    scaled = t["weight"].detach() * 100
    logprobs, entropy = token_logprobs(
        t["hidden"], OutputHead(scaled), t["parent"], t["target"], vocab_chunk_size=5
    )
    exact = torch.log_softmax(t["hidden"].double()[t["parent"]] @ scaled.double().T, -1)
    chosen = exact.gather(-1, t["target"][:, None])[:, 0]
    torch.testing.assert_close(logprobs, chosen.float(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy, -(exact.exp() * exact).sum(-1).float(), rtol=1e-4, atol=1e-4)


def test_logits_that_are_not_finite_are_not_hidden() -> None:
    t = tensors()
    weight = t["weight"].detach().clone()
    weight[50, 0] = float("nan")
    logprobs, _ = token_logprobs(t["hidden"], OutputHead(weight), t["parent"], t["target"])
    assert bool(logprobs.isnan().all())


def test_no_targets() -> None:
    t = tensors()
    none = torch.zeros(0, dtype=torch.int64)
    logprobs, entropy = token_logprobs(t["hidden"], OutputHead(t["weight"]), none, none)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert not t["hidden"].grad.any()


def test_memory_is_that_of_the_gradients_and_one_block_of_logits() -> None:
    tokens, vocabulary, hidden_size, chunk, vocab_chunk = 4096, 6000, 64, 256, 1024
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    head = OutputHead(torch.randn(vocabulary, hidden_size, requires_grad=True))
    target = torch.randint(0, vocabulary, (tokens,))
    every = torch.arange(tokens)

    def run() -> None:
        logprobs, _ = token_logprobs(
            hidden, head, every, target, chunk_size=chunk, vocab_chunk_size=vocab_chunk
        )
        logprobs.sum().backward()

    gradients = 4 * hidden_size * (tokens + vocabulary)
    block = 4 * chunk * vocab_chunk
    assert gradients + block < peak_allocated(run) <= gradients + 1.2 * block + 32 * tokens
    assert 4 * tokens * vocabulary > 20 * (gradients + block)


def test_numbers_that_mean_nothing_are_refused() -> None:
    t = tensors()
    head = OutputHead(t["weight"])
    for says, wrong in (
        ("temperature is 0", {"temperature": 0}),
        (r"temperature is -0\.5", {"temperature": torch.ones(T).index_fill(0, torch.tensor([3]), -0.5)}),
        ("temperature is nan", {"temperature": torch.full((T,), float("nan"))}),
        (r"temperature has shape \[1\]", {"temperature": torch.ones(1)}),
        ("chunk_size is 0", {"chunk_size": 0}),
    ):
        with pytest.raises(ValueError, match=says):
            token_logprobs(t["hidden"], head, t["parent"], t["target"], **wrong)


def test_the_head_of_a_model() -> None:
    model = tiny_model("llama", tied=True)
    head = output_head(model)
    assert head.weight is model.get_input_embeddings().weight
    assert (head.bias, head.scale, head.softcap) == (None, 1.0, None)
    model.config.final_logit_softcapping = 30.0
    model.config.logits_scaling = 4.0
    assert (output_head(model).scale, output_head(model).softcap) == (0.25, 30.0)
    model.lm_head = torch.nn.Identity()
    with pytest.raises(ModelError, match="ends in Identity"):
        output_head(model)


def test_a_head_is_checked_over_several_blocks_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "DEFAULT_VOCAB_CHUNK", 7)
    model = tiny_model("qwen3")
    hidden = torch.randn(5, model.config.hidden_size)
    logits = hidden @ output_head(model).weight.T.detach()
    check_output_head(model, hidden, logits)
    with pytest.raises(ModelError, match="linear head"):
        check_output_head(model, hidden, logits + 1.0 + logits.abs().max())


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


VOCABULARY, TOKENS, HIDDEN = 13, 5, 4
PARENT = torch.tensor([0, 1, 1, 2, 4])
TARGET = torch.tensor([3, 0, 12, 7, 5])
TEMPERATURE = torch.tensor([1.0, 1.0, 0.7, 1.3, 1.0])


def setting() -> tuple[torch.Tensor, OutputHead, torch.Tensor]:
    """Hidden states, a head with a bias and a cap, and a teacher's logprobs [T, V]."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, HIDDEN, generator=generator), torch.randn(13, HIDDEN, generator=generator)
    head = OutputHead(
        weight.requires_grad_(), torch.randn(13, generator=generator).requires_grad_(), 1.5, softcap=9.0
    )
    teacher = torch.randn(TOKENS, VOCABULARY, generator=generator).log_softmax(-1).half().float()
    return hidden.requires_grad_(), head, teacher


def logits_of(hidden: torch.Tensor, head: OutputHead) -> torch.Tensor:
    logits = (hidden[PARENT] @ head.weight.T + head.bias) * head.scale
    return 9.0 * (logits / 9.0).tanh() / TEMPERATURE[:, None]


def kl_of(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """The whole KL, from all logits."""
    policy = logits.log_softmax(-1)
    return (policy.exp() * (policy - teacher)).sum(-1)


def ours(hidden: torch.Tensor, head: OutputHead, teacher: torch.Tensor, count: int) -> torch.Tensor:
    values, ids = (part.tolist() for part in teacher.topk(count, -1))
    rows = [dict(zip(*row, strict=True)) for row in zip(ids, values, strict=True)]
    logprobs, _ = token_logprobs(hidden, head, PARENT, TARGET, temperature=TEMPERATURE)
    return reverse_kl(hidden, head, PARENT, TARGET, TEMPERATURE, logprobs, TopLogprobs.of(rows))


def assert_same(found: torch.Tensor, expected: torch.Tensor, *inputs: torch.Tensor) -> None:
    """Values and gradients are equal."""
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
    gradients = (torch.autograd.grad(values.sum(), inputs) for values in (found, expected))
    torch.testing.assert_close(*gradients, atol=5e-3, rtol=5e-3)


def test_with_every_id_it_is_the_kl_over_the_vocabulary_and_has_its_gradient() -> None:
    hidden, head, teacher = setting()
    found, expected = ours(hidden, head, teacher, VOCABULARY), kl_of(logits_of(hidden, head), teacher)
    assert_same(found, expected, hidden, head.weight)


@pytest.mark.parametrize("count", [1, 4, 8])
def test_with_some_ids_it_is_a_lower_bound(count: int) -> None:
    hidden, head, teacher = setting()
    found = ours(hidden, head, teacher, count)
    assert bool((found >= -1e-5).all())
    assert bool((found <= kl_of(logits_of(hidden, head), teacher) + 1e-3).all())


def test_a_token_that_was_sampled_from_some_ids_is_compared_over_them() -> None:
    """Of each token by itself: the others' terms stay as they are."""
    hidden, head, teacher = setting()
    ids = [[3, 5], [], [12, 0, 1], [], [5, 6, 7]]
    kept = SamplingMask.of(ids)
    logprobs, _ = token_logprobs(
        hidden, head, PARENT, TARGET, temperature=TEMPERATURE, kept=KeptIds.of(kept, hidden.device)
    )
    excluded = torch.tensor([[bool(row) and id not in row for id in range(VOCABULARY)] for row in ids])
    expected = kl_of(logits_of(hidden, head).masked_fill(excluded, -1e30), teacher)
    everything = TopLogprobs.of([dict(enumerate(row)) for row in teacher.tolist()])
    found = reverse_kl(hidden, head, PARENT, TARGET, TEMPERATURE, logprobs, everything, kept)
    assert_same(found, expected, hidden, head.weight, head.bias)


def test_a_token_without_ids_has_none() -> None:
    hidden, head, teacher = setting()
    assert ours(hidden, head, teacher, 0).tolist() == [0.0] * TOKENS


def test_an_id_that_the_student_has_no_row_for_is_one_of_the_others() -> None:
    hidden, head, _ = setting()
    logprobs, _ = token_logprobs(hidden, head, PARENT, TARGET, temperature=TEMPERATURE)
    found = [
        reverse_kl(
            hidden, head, PARENT, TARGET, TEMPERATURE, logprobs, TopLogprobs.of([{2: -0.5, **more}] * TOKENS)
        )
        for more in ({}, {VOCABULARY: -1.5, VOCABULARY + 4: -3.0})
    ]
    assert torch.equal(*found)
