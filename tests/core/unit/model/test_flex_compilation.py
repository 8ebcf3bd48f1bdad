"""How often a run compiles FlexAttention, and that selective checkpointing keeps its output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import packed, tiny_model, trajectory
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as torch_flex
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from agentrl.data.forest import TokenForest, forest_from_sequences
from agentrl.distributed.context_parallel import split_tokens
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.losses.settings import LossSettings
from agentrl.model import attention
from agentrl.model.logprobs import ForwardOptions
from agentrl.train import build
from agentrl.train.step import forward_backward

WIDE = {"hidden_size": 64, "head_dim": 16, "max_position_embeddings": 2048}

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention's reference has a backward on a CPU too, which a device check refuses."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    """Compile FlexAttention as on a GPU, up to its kernels, and count."""
    counter = CompileCounter()
    kernel = attention.compile_kernel(
        attention.flex_any_length, lambda graph, inputs, **_: counter(graph, inputs)
    )
    monkeypatch.setattr(attention, "_kernel", lambda device_type: kernel)
    return counter


def chain(tokens: int) -> TokenForest:
    rng = np.random.default_rng(tokens)
    return packed([trajectory(rng, [(0, tokens, -1)], [(1, tokens)])])


def train(model: Any, *lengths: int) -> None:
    forward_backward(
        ParallelModel(model, executor="flex"), [chain(length) for length in lengths], LossSettings()
    )


def test_a_run_compiles_two_kernels_for_all_lengths(compilations: CompileCounter) -> None:
    model = tiny_model("qwen3", **WIDE)
    build.enable_checkpointing(model)
    parallel = ParallelModel(model, executor="flex")
    padding = forest_from_sequences([[0]], [[False]])
    with torch.no_grad():
        for forest in (padding, chain(20), chain(700), chain(300)):
            parallel(forest, ForwardOptions())
    train(model, 700, 2, 300, 200, 130)
    assert compilations.frame_count == 2


def test_frozen_layers_and_a_reference_stay_below_the_limit(compilations: CompileCounter) -> None:
    model = tiny_model("qwen3", **WIDE)
    build.enable_checkpointing(model)
    reference = tiny_model("llama", **WIDE | {"num_attention_heads": 2, "num_key_value_heads": 2})
    others = tiny_model("llama", **WIDE | {"head_dim": 32})
    for module in (model.get_input_embeddings(), model.get_decoder().layers[0]):
        module.requires_grad_(requires_grad=False)
    for dtype in (torch.bfloat16, torch.float32):
        for scored in (model, reference, others):
            with torch.no_grad():
                for length in (300, 128, 500):
                    ParallelModel(scored.to(dtype), executor="flex")(chain(length), ForwardOptions())
    train(model, 700, 2, 300)
    assert compilations.frame_count == 8  # of each model in both dtypes, and two that train
    assert compilations.frame_count <= attention.VARIANTS / 2


def test_ranks_that_split_tokens_compile_two_kernels(compilations: CompileCounter) -> None:
    for needs_gradient in (False, True):
        for tokens in (2, 700, 1500, 300):
            part = split_tokens(chain(tokens), 2, 1, block=attention.BLOCK)
            mask = attention.forest_block_mask(part.forest.subtree_end, "cpu", part.tokens)
            states = [
                torch.randn(1, heads, length, 16, requires_grad=needs_gradient)
                for heads, length in ((4, len(part.tokens)), (2, part.forest.tokens), (2, part.forest.tokens))
            ]
            attention.block_attention(torch.nn.Module(), *states, None, scaling=0.25, block_mask=mask)
    assert compilations.frame_count == 2


def counted(function: Callable[..., Any]) -> tuple[list[int], Callable[..., Any]]:
    calls: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    return calls, call


@pytest.mark.parametrize(("mode", "times"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_checkpointing_does_not_run_attention_again(
    mode: build.Checkpointing, times: int, compilations: CompileCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = sys.modules["torch._higher_order_ops.flex_attention"]  # the package has the function's name
    calls, kernel = counted(operation.math_attention)
    monkeypatch.setattr(operation, "math_attention", kernel)
    model = tiny_model("qwen3", **WIDE)
    build.enable_checkpointing(model, mode)
    train(model, 300)
    assert len(calls) == times * model.config.num_hidden_layers


@torch.library.custom_op("agentrl_tests::attend", mutates_args=())
def attend(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Stand in for FlexAttention, which no compiler can differentiate on a CPU."""
    KERNEL.append(1)
    return torch.softmax(query @ key.mT, -1)


KERNEL: list[int] = []
attend.register_fake(lambda query, key: query.new_empty(*query.shape[:2], key.shape[1]))
attend.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1], grad.mT @ ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_selective_checkpointing_keeps_the_output_of_a_compiled_kernel() -> None:
    """Also if a kernel for another length is compiled before the backward, as in 1F1B."""
    kernel = attention.compile_kernel(lambda query, key: attend(query, key))
    weight = torch.randn(8, 8, requires_grad=True)

    def layer(states: torch.Tensor) -> torch.Tensor:
        query, key = (states @ weight).sin(), (states @ weight).cos()
        for each in (query, key):
            attention._any_length(each, 1)
        return kernel(query, key).square().sum()

    contexts = partial(create_selective_checkpoint_contexts, build._policy)
    inputs = [torch.randn(1, length, 8) for length in (16, 32)]
    losses = [checkpoint(layer, states, use_reentrant=False, context_fn=contexts) for states in inputs]
    assert len(KERNEL) == 2
    (grad,) = torch.autograd.grad(sum(losses), weight)
    assert len(KERNEL) == 2
    (expected,) = torch.autograd.grad(sum(layer(states) for states in inputs), weight)
    torch.testing.assert_close(grad, expected)
