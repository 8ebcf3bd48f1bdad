"""The FlexAttention executor: its mask and its hidden states on a CPU, its gradients on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import chains, packed, tiny_model, tree
from torch.nn.attention import flex_attention as torch_flex

from agentrl.data.forest import TokenForest, forest_from_sequences, merge_prefixes
from agentrl.errors import ModelError
from agentrl.model.attention import (
    block_kinds,
    build_executor,
    forest_block_mask,
    forest_mask,
    mask_function,
    padded_ends,
)

WIDE = {"hidden_size": 64, "head_dim": 16}
"""FlexAttention's kernels have heads of 16 and more."""


def large_forest(seed: int, count: int, longest: int) -> TokenForest:
    """Sequences of random lengths over few ids, so that some begin alike."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, 2, rng.integers(2, longest)).tolist() for _ in range(count)]
    return merge_prefixes(forest_from_sequences(ids, [[False] * (len(item) - 1) + [True] for item in ids]))


def assert_same_gradients(model: Any, limit: float) -> None:
    forest = packed([tree(seed) for seed in range(6)] + chains())
    gradients = []
    for executor in ("flex", "sdpa"):
        model.zero_grad()
        hidden = build_executor(model, executor)(forest)
        weights = torch.linspace(0, 1000, hidden.numel()).sin().reshape(hidden.shape)
        (hidden * weights.to(hidden.device)).mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, expected in gradients[1].items():
        assert (gradients[0][name] - expected).norm() <= limit * expected.norm(), name


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 12), st.integers(3, 300))
def test_the_block_mask_is_the_masks(seed: int, count: int, longest: int) -> None:
    forest = large_forest(seed, count, longest)
    ends = padded_ends(forest.subtree_end)
    assert len(ends) % 128 == 0
    dense, unpadded = (forest_mask(torch.from_numpy(each))[0, 0] for each in (ends, forest.subtree_end))
    assert torch.equal(dense[: forest.tokens, : forest.tokens], unpadded)
    sees = mask_function(torch.from_numpy(ends))
    index = torch.arange(len(ends))
    nothing = torch.zeros((), dtype=torch.int64)
    assert torch.equal(sees(nothing, nothing, index[:, None], index[None, :]), dense)
    blocks = dense.reshape(len(ends) // 128, 128, -1, 128).transpose(1, 2)
    partial, full = (torch.from_numpy(kind) for kind in block_kinds(ends))
    assert torch.equal(full, blocks.all(-1).all(-1))
    assert torch.equal(partial, blocks.any(-1).any(-1) & ~full)


def test_the_block_mask_is_the_one_that_torch_computes() -> None:
    ends = padded_ends(large_forest(3, 8, 300).subtree_end)
    ours = forest_block_mask(ends, "cpu")
    theirs = torch_flex.create_block_mask(
        mask_function(torch.from_numpy(ends)), 1, 1, len(ends), len(ends), device="cpu"
    )
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_hidden_states_are_those_of_the_dense_mask(kind: str) -> None:
    model = tiny_model(kind, **WIDE)
    forest = packed([tree(seed) for seed in range(6)] + chains())
    with torch.no_grad():
        ours = build_executor(model, "flex")(forest)
        expected = build_executor(model, "sdpa")(forest)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_a_layer_that_is_not_told_the_mask_is_refused() -> None:
    model = tiny_model("llama", **WIDE)
    model.set_attn_implementation("agentrl_flex")
    with pytest.raises(ModelError, match="called without a block mask"):
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)


@pytest.mark.exactness
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_gradients_of_its_reference_are_those_of_the_dense_mask(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention's uncompiled form has a backward that no device check keeps from a CPU's tensors."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    assert_same_gradients(tiny_model(kind, **WIDE), 1e-5)


@pytest.mark.gpu
@pytest.mark.exactness
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has a backward on CUDA alone")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_gradients_are_those_of_the_dense_mask(kind: str) -> None:
    assert_same_gradients(tiny_model(kind, **WIDE).cuda(), 1e-3)
