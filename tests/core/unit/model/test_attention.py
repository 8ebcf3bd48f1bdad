"""Executors against the plain model, one sequence at a time: logprobs, loss and every gradient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import chains, model_logprobs, packed, path_to, paths, plain_logprobs, tiny_model, tree
from torch.nn.attention import flex_attention as torch_flex
from transformers import Lfm2Config, Lfm2ForCausalLM, PreTrainedModel

from agentrl.data.forest import TokenForest, forest_from_sequences, merge_prefixes
from agentrl.distributed.mesh import Mesh
from agentrl.distributed.parallel_model import parallelize
from agentrl.errors import ConfigError, ModelError
from agentrl.model import attention
from agentrl.model.attention import (
    SegmentPlan,
    block_kinds,
    build_executor,
    check_positions,
    forest_block_mask,
    forest_mask,
    mask_function,
    padded_ends,
    plan_segments,
    split_segments,
)
from agentrl.model.check_model import check_model
from agentrl.model.logprobs import ForwardOptions
from agentrl.model.path_attention import Segment
from agentrl.train.build import enable_checkpointing


def loss_and_gradients(
    model: PreTrainedModel, logprobs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    weights = torch.linspace(-1, 1, len(logprobs))
    loss = (weights * logprobs).sum()
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: PreTrainedModel, forest: TokenForest, executor: str) -> None:
    loss, gradients = loss_and_gradients(
        model, model_logprobs(model, forest, ForwardOptions(chunk_size=7), executor)
    )
    model.set_attn_implementation("sdpa")
    expected_loss, expected = loss_and_gradients(model, plain_logprobs(model, forest))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        error = (gradient - expected[name]).norm() / expected[name].norm()
        assert error < 1e-5, f"{name}: {error}"


@pytest.mark.exactness
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("executor", ["varlen", "sdpa"])
def test_packed_chains_equal_each_chain_alone(kind: str, executor: str, tied: bool) -> None:
    assert_same(tiny_model(kind, tied=tied), packed(chains()), executor)


@pytest.mark.exactness
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("executor", ["varlen", "sdpa", "per_sequence", "per_sequence_padded"])
def test_a_tree_equals_each_of_its_branches_alone(kind: str, executor: str) -> None:
    forest = packed([tree(0), *chains(1, 2), tree(2)])
    assert len(paths(forest)) == 8
    assert_same(tiny_model(kind), forest, executor)


@pytest.mark.exactness
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_masks_that_would_be_too_large_are_not_built(
    is_recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MASK_ENTRIES", 0)
    monkeypatch.setattr(Segment, "mask", None)
    model = tiny_model("qwen3")
    if is_recomputed:
        enable_checkpointing(model, "selective")
    assert_same(model, packed([tree(), *chains(), tree(5)]), "varlen")


@pytest.mark.exactness
@pytest.mark.parametrize("executor", ["varlen", "sdpa"])
def test_recomputed_activations_change_nothing(executor: str) -> None:
    model = tiny_model("llama")
    enable_checkpointing(model)
    assert_same(model, packed(chains()), executor)


def test_the_mask_is_ancestry() -> None:
    forest = packed([tree(0), *chains(1, 1)])
    mask = forest_mask(torch.from_numpy(forest.subtree_end))[0, 0]
    for query in range(forest.tokens):
        assert torch.nonzero(mask[query])[:, 0].tolist() == path_to(forest, query)


def test_segments_follow_the_branches() -> None:
    assert split_segments(packed([tree()])) == [
        Segment(0, 15, ()),
        Segment(15, 19, ((0, 10),)),
        Segment(19, 26, ((0, 6),)),
    ]
    assert [segment.ancestors for segment in split_segments(packed(chains()))] == [()] * 5


def test_segments_are_cut_where_others_branch_off() -> None:
    assert plan_segments(split_segments(packed([tree()]))) == SegmentPlan(
        segments=(15, 4, 7), pieces=(6, 4, 5, 4, 7), paths=((0, 1, 2), (0, 1, 3), (0, 4))
    )
    forest = packed([tree(0), *chains(1, 2), tree(2)])
    segments = split_segments(forest)
    plan = plan_segments(segments)
    bounds = np.cumsum([0, *plan.pieces])
    assert bounds[-1] == forest.tokens
    for segment, path in zip(segments, plan.paths, strict=True):
        seen = [token for piece in path for token in range(bounds[piece], bounds[piece + 1])]
        assert seen == path_to(forest, segment.end - 1)


def test_a_model_called_around_the_executor_is_refused() -> None:
    model = tiny_model("llama")
    build_executor(model)(packed(chains()))
    with pytest.raises(ModelError, match="called without a segment plan"):
        model(input_ids=torch.tensor([[1, 2]]))


def test_the_choice_of_executor() -> None:
    executor = build_executor(tiny_model("llama"))
    configs = (tiny_model("llama", hidden_size=4 * width).config for width in (16, 8))
    wide, narrow = (
        build_executor(SimpleNamespace(device=torch.device("cuda"), config=config), trains=False)
        for config in configs
    )
    many = [tree(seed) for seed in range(30)]
    assert executor.choose(packed([tree()])) == "sdpa"
    assert executor.choose(packed(many)) == "varlen"
    assert executor.choose(packed(chains())) == "varlen"
    assert wide.choose(packed(chains())) == wide.choose(packed(many)) == "flex"
    assert narrow.choose(packed(many)) == "varlen"
    with pytest.raises(ConfigError, match="attention executor 'flash'"):
        build_executor(tiny_model("llama"), "flash")(packed([tree()]))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "longrope", "original_max_position_embeddings": 64},
        {"full_attention": {"rope_type": "dynamic", "original_max_position_embeddings": 64}},
    ],
)
def test_positions_that_depend_on_the_longest_sequence_are_refused_above_their_length(
    rope: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    check_positions(model, 1 << 20)
    monkeypatch.setattr(model.config, "rope_parameters", rope)
    check_positions(model, 64)
    with pytest.raises(ConfigError, match=r"above 64 tokens .* --max_tokens 65"):
        parallelize(model, Mesh(), max_tokens=65)


def test_dropout_is_refused_in_training_only() -> None:
    model = tiny_model("llama", attention_dropout=0.1)
    with pytest.raises(ModelError, match=r"dropout 0\.1"):
        build_executor(model)(packed(chains()))
    build_executor(model.eval(), trains=False)(packed(chains()))


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("output_router_logits", True, "auxiliary loss of its router"),
        ("router_jitter_noise", 0.1, r"router_jitter_noise 0\.1"),
        ("expert_capacity", 64, "drops tokens beyond 64 per expert"),
        ("attn_logit_softcapping", 50.0, r"caps its attention scores at 50\.0"),
    ],
)
def test_what_depends_on_its_neighbors_is_refused(attribute: str, value: object, message: str) -> None:
    model = tiny_model("llama")
    setattr(model.config, attribute, value)
    with pytest.raises(ModelError, match=message):
        build_executor(model)(packed(chains()))


def test_a_window_shorter_than_a_trajectory_runs_each_path_alone(caplog: pytest.LogCaptureFixture) -> None:
    windowed = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    model = tiny_model("qwen3", **windowed)
    assert build_executor(model).choose(packed([tree()])) == "per_sequence"
    assert "layers that see only 8 tokens back" in caplog.text
    assert_same(model, packed([tree(), *chains()]), "auto")
    with pytest.raises(ModelError, match="'varlen' would not be exact"):
        build_executor(model, "varlen")(packed([tree()]))
    short = forest_from_sequences([list(range(8))], [[False] * 8])
    packed_states = build_executor(model)(short)
    model.set_attn_implementation("sdpa")
    alone = model.model(input_ids=torch.arange(8)[None], use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(packed_states, alone, rtol=1e-5, atol=1e-5)


def test_layers_that_cannot_be_masked_run_each_path_alone() -> None:
    model = tiny_model("qwen3")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ModelError, match="linear_attention"):
        build_executor(model, "sdpa")(packed(chains()))
    recurrent = tiny_model("llama")
    recurrent._is_stateful = True
    with pytest.raises(ModelError, match="a recurrent state"):
        build_executor(recurrent, "sdpa")(packed(chains()))
    assert_same(recurrent, packed([tree()]), "auto")


def test_a_model_with_convolutions_runs_each_path_alone() -> None:
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"], initializer_range=0.3,
    )  # fmt: skip
    model = Lfm2ForCausalLM(config).train()
    check_model(model)
    assert build_executor(model).choose(packed([tree()])) == "per_sequence"
    assert_same(model, packed([tree(), *chains()]), "auto")


def test_check_model_accepts_a_plain_model_and_refuses_another_head() -> None:
    model = tiny_model("llama")
    check_model(model)
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits * 2)
    with pytest.raises(ModelError, match="differ by"):
        check_model(model)


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
