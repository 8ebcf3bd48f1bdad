"""Chunked logprobs against log_softmax over the whole vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl.errors import ModelError
from agentrl.train.logprobs import OutputHead, output_head, token_logprobs

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
    t: dict[str, torch.Tensor], temperature: float, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = scale * (t["hidden"].float()[t["parent"]] @ t["weight"].float().T + t["bias"].float())
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs.gather(-1, t["target"][:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("chunk_size", [1, 8, 29, 1000])
@pytest.mark.parametrize(
    ("temperature", "scale", "softcap"), [(1.0, 1.0, None), (0.7, 1.0, None), (1.3, 0.5, 5.0)]
)
def test_values_and_gradients(
    chunk_size: int, temperature: float, scale: float, softcap: float | None
) -> None:
    t = tensors()
    head = OutputHead(t["weight"], t["bias"], scale, softcap)
    logprobs, entropy = token_logprobs(
        t["hidden"], head, t["parent"], t["target"], temperature=temperature, chunk_size=chunk_size
    )
    expected, expected_entropy = reference(t, temperature, scale, softcap)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-5)
    assert not entropy.requires_grad
    inputs = (t["hidden"], t["weight"], t["bias"])
    ours = torch.autograd.grad((logprobs * t["upstream"]).sum(), inputs)
    theirs = torch.autograd.grad((expected * t["upstream"]).sum(), inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_bfloat16_weights_give_float32_logits() -> None:
    t = tensors(dtype=torch.bfloat16)
    head = OutputHead(t["weight"], t["bias"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _ = token_logprobs(t["hidden"], head, t["parent"], t["target"], chunk_size=8)
    expected, _ = reference(t, 1.0, 1.0, None)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    assert t["weight"].grad is not None
    assert t["weight"].grad.dtype == torch.bfloat16


def test_a_frozen_head_gets_no_gradient() -> None:
    t = tensors()
    head = OutputHead(t["weight"].detach())
    token_logprobs(t["hidden"], head, t["parent"], t["target"])[0].sum().backward()
    assert t["hidden"].grad is not None
    assert t["weight"].grad is None


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


def test_no_tensor_grows_with_tokens_times_vocabulary() -> None:
    tokens, vocabulary, chunk_size = 400, 501, 16
    hidden = torch.randn(tokens, H, requires_grad=True)
    head = OutputHead(torch.randn(vocabulary, H, requires_grad=True))
    target = torch.randint(0, vocabulary, (tokens,))
    with LargestTensor() as largest:
        logprobs, _ = token_logprobs(hidden, head, torch.arange(tokens), target, chunk_size=chunk_size)
        logprobs.sum().backward()
    assert largest.elements <= vocabulary * H
    assert largest.elements < tokens * vocabulary / 20


def test_numbers_that_mean_nothing_are_refused() -> None:
    t = tensors()
    head = OutputHead(t["weight"])
    with pytest.raises(ValueError, match="temperature is 0"):
        token_logprobs(t["hidden"], head, t["parent"], t["target"], temperature=0)
    with pytest.raises(ValueError, match="chunk_size is 0"):
        token_logprobs(t["hidden"], head, t["parent"], t["target"], chunk_size=0)


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
