"""Which norms run as one kernel on a GPU, and what they compute."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from agentrl.model import norms
from agentrl.model.norms import fuse_norms, is_fused


class ShiftedRMSNorm(nn.Module):
    """Looks like Llama's norm, and is none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        return norms.F.rms_norm(hidden_states, self.weight.shape, self.weight, 1e-6) + 1e-3


class ClampedRMSNorm(ShiftedRMSNorm):
    """Computes Llama's norm of what is small."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return norms.F.rms_norm(hidden_states, self.weight.shape, self.weight, 1e-6).clamp(-20.0, 20.0)


@pytest.mark.parametrize(
    ("kind", "is_fused"),
    [
        (LlamaRMSNorm, True), (Qwen3RMSNorm, True), (Llama4TextRMSNorm, True), (Gemma3RMSNorm, False),
        (Qwen3NextRMSNormGated, False), (ShiftedRMSNorm, False), (ClampedRMSNorm, False),
        (nn.RMSNorm, False), (nn.LayerNorm, False),
    ],
)  # fmt: skip
def test_a_norm_is_fused_if_it_computes_what_the_kernel_does(kind: Any, is_fused: bool) -> None:
    module = kind(24)
    fuse_norms(module)
    assert ("forward" in vars(module)) == is_fused
    with torch.device("meta"):
        empty = kind(24)
    fuse_norms(empty)
    assert ("forward" in vars(empty)) == is_fused


class BatchedRMSNorm(ShiftedRMSNorm):
    """Takes three dimensions alone, as a folder's own code may."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        batch, length, width = hidden_states.shape
        return norms.F.rms_norm(hidden_states, (width,), self.weight, 1e-6).view(batch, length, width)


def test_norms_of_one_class_may_differ_and_one_that_cannot_be_tried_or_is_patched_stays() -> None:
    patched, calls = LlamaRMSNorm(24), []
    own = patched.forward
    patched.forward = lambda hidden: (calls.append(1), own(hidden))[1]  # type: ignore[assignment,func-returns-value]
    model = nn.ModuleList([
        Gemma4RMSNorm(24), Gemma4RMSNorm(24, with_scale=False), BatchedRMSNorm(24), patched,
    ])  # fmt: skip
    hidden = torch.randn(2, 3, 24)
    expected = [norm(hidden) for norm in model]
    fuse_norms(model)
    assert [is_fused(norm) for norm in model] == [True, False, False, False]
    assert all(torch.equal(norm(hidden), each) for norm, each in zip(model, expected, strict=True))
    assert len(calls) == 2


def test_a_norm_on_a_cpu_stays_as_it_is_and_its_copy_has_weights_of_its_own() -> None:
    norm, hidden = Qwen3RMSNorm(64), torch.randn(5, 64, dtype=torch.bfloat16)
    expected = norm(hidden)
    fuse_norms(norm)
    copied = copy.deepcopy(norm)
    with torch.no_grad():
        copied.weight.mul_(2)
    assert torch.equal(norm(hidden), expected)
    assert torch.equal(copied(hidden), 2 * expected)


@pytest.mark.parametrize("kind", [Qwen3RMSNorm, LlamaRMSNorm])
def test_torchs_norm_is_closer_to_the_exact_one_than_the_modules_own_forward(kind: Any) -> None:
    """As on a GPU, it rounds once; a CPU has several kernels for it."""
    torch.manual_seed(0)
    norm, hidden = kind(256).bfloat16(), 3 * torch.randn(512, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        norm.weight.uniform_(0.2, 3.0)
    wide = hidden.double()
    exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    exact = exact * norm.weight.double()
    fused = norms.F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)
    own, other = ((found.double() - exact).abs().mean() for found in (norm(hidden), fused))
    assert other < own
    assert other < 2**-9 * exact.abs().mean()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel is that of a GPU")
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (70_000, 128), (513, 4096)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_the_kernel_are_those_of_the_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = Qwen3RMSNorm(width).to("cuda", dtype)
    fused = copy.deepcopy(norm)
    fuse_norms(fused)
    hidden = torch.randn(rows, width, dtype=dtype, device="cuda")
    gradient = torch.randn(width, rows, dtype=dtype, device="cuda").T  # as behind the transpose of heads
    own, other = (hidden.clone().requires_grad_() for _ in range(2))
    norm(own).backward(gradient)
    fused(other).backward(gradient)
    room = 1e-4 if dtype == torch.float32 else 2e-2
    for found, expected in ((other.grad, own.grad), (fused.weight.grad, norm.weight.grad)):
        assert (found - expected).float().norm() < room * expected.float().norm()
