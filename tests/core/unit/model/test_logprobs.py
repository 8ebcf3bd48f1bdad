"""Chunked logprobs against log_softmax over the whole vocabulary."""

from __future__ import annotations

import pytest
import torch
from peak_memory import peak_allocated
from tiny_models import tiny_model

from agentrl.errors import ModelError
from agentrl.model import logprobs as chunked
from agentrl.model.check_model import check_output_head
from agentrl.model.logprobs import OutputHead, output_head, token_logprobs

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
