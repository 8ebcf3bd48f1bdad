"""Routers take the experts that they are given: in every executor, when recomputed, and with a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.config.schema import MemoryConfig, ModelConfig
from agentrl.data.forest import ForestRouting, TokenForest, forest_from_sequences, merge_prefixes
from agentrl.distributed.build_policy import build_replay
from agentrl.documents.model_call import ExpertShape
from agentrl.errors import ModelError
from agentrl.model.attention import build_executor
from agentrl.model.check_model import check_replay
from agentrl.model.routing import RouterReplay, find_routers, record_choices
from agentrl.train.build import enable_checkpointing

SHAPE = ExpertShape(layers=2, top_k=2, experts=8)


def forest_of(seed: int = 0) -> TokenForest:
    """A tree of two branches with random experts; one token routes freely."""
    sequences = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 8]]
    forest = merge_prefixes(forest_from_sequences(sequences, [[False] * len(ids) for ids in sequences]))
    scores = np.random.default_rng(seed).random((forest.tokens, SHAPE.layers, SHAPE.experts))
    experts = np.sort(np.argsort(scores, -1)[..., : SHAPE.top_k], -1).astype(np.int8)
    experts[4] = -1
    return replace(forest, routing=ForestRouting(experts))


def experts_of(forest: TokenForest) -> np.ndarray:
    return forest.routing.experts


def replaying(**changes: Any) -> tuple[Any, RouterReplay]:
    model = tiny_model("qwen3_moe", **changes)
    return model, RouterReplay.install(model, SHAPE)


def test_every_executor_uses_the_experts_that_it_is_given() -> None:
    model, replay = replaying()
    chosen, forest = record_choices(model), forest_of()
    hidden = {}
    for name in ("sdpa", "varlen", "per_sequence_padded", "per_sequence"):
        hidden[name] = build_executor(model, name)(forest)
        if name in ("sdpa", "varlen"):
            for layer, found in chosen.items():
                given = torch.from_numpy(experts_of(forest)[:, layer].astype(np.int64))
                is_free = given[:, 0] < 0
                assert torch.equal(found.sort(-1).values[~is_free], given[~is_free])
                assert (found[is_free] >= 0).all()
        torch.testing.assert_close(hidden[name], hidden["sdpa"])
    assert replay.take_differing() > 0.5
    free = build_executor(model, "sdpa")(replace(forest, routing=None))
    assert (free - hidden["sdpa"]).abs().max() > 1e-2


def test_the_routers_own_choice_changes_nothing() -> None:
    model, replay = replaying()
    forest = replace(forest_of(), routing=None)
    chosen = record_choices(model)
    free = build_executor(model, "varlen")(forest)
    experts = np.stack([chosen[layer].numpy() for layer in range(2)], 1).astype(np.int16)
    replayed = build_executor(model, "varlen")(replace(forest, routing=ForestRouting(experts)))
    torch.testing.assert_close(replayed, free)
    assert replay.take_differing() == 0


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_layers_use_the_same_experts(mode: Any) -> None:
    gradients = {}
    for recomputed in ("none", mode):
        model, _ = replaying()
        enable_checkpointing(model, recomputed)
        executor, forest = build_executor(model, "varlen"), forest_of()
        hidden = executor(forest)
        executor(forest_of(seed=1))  # the forward of another micro-batch, as in a pipeline
        hidden.square().sum().backward()
        gradients[recomputed] = [parameter.grad for parameter in model.parameters()]
        assert all(router.weight.grad.abs().max() > 0 for router in find_routers(model).values())
    for ours, plain in zip(gradients[mode], gradients["none"], strict=True):
        torch.testing.assert_close(ours, plain)


DEEPSEEK = {
    "num_key_value_heads": 4, "n_routed_experts": 8, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "routed_scaling_factor": 2.5,
}  # fmt: skip


def mixture(kind: str, **sizes: Any) -> Any:
    """A random model of another architecture, with 2 of 8 experts."""
    usual = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(usual | sizes)))


@pytest.mark.parametrize(
    ("kind", "sizes", "scores"),
    [
        ("mixtral", {"num_local_experts": 8}, lambda logits: logits.softmax(-1)),
        ("deepseek_v3", DEEPSEEK, torch.sigmoid),
    ],
    ids=["mixtral", "deepseek"],
)
def test_weights_are_the_models_own_function_of_the_given_experts(
    kind: str, sizes: dict[str, Any], scores: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model, forest = mixture(kind, **sizes), forest_of()
    check_replay(model, SHAPE)
    RouterReplay.install(model, SHAPE)
    seen: dict[int, Any] = {}
    for layer, router in find_routers(model).items():
        router.register_forward_hook(lambda _, __, result, layer=layer: seen.update({layer: result}))
    build_executor(model, "varlen", trains=False)(forest)
    scale = getattr(model.config, "routed_scaling_factor", None) or 1.0
    assert set(seen) == set(find_routers(model))
    for logits, weights, index in seen.values():
        raw = scores(logits.float()).gather(-1, index)
        torch.testing.assert_close(weights.float(), scale * raw / raw.sum(-1, keepdim=True))


def test_models_that_cannot_replay_are_named() -> None:
    with pytest.raises(ModelError, match="Qwen3ForCausalLM has no routers"):
        RouterReplay.install(tiny_model("qwen3"), SHAPE)
    with pytest.raises(ModelError, match="PhimoeTopKRouter does not choose 2 experts"):
        check_replay(mixture("phimoe", num_local_experts=8), SHAPE)


def test_flags_decide_whether_routing_is_replayed(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("qwen3_moe")
    model.config.save_pretrained(tmp_path)
    policy: Any = type("Policy", (), {"model": model, "base": tmp_path})
    compiled = MemoryConfig(torch_compile=True)
    assert build_replay(ModelConfig(router_replay="off"), MemoryConfig(), policy) is None
    assert build_replay(ModelConfig(), compiled, policy) is None
    assert "not replayed: --torch_compile" in caplog.text
    with pytest.raises(Exception, match="--torch_compile: compiled layers choose their experts"):
        build_replay(ModelConfig(router_replay="on"), compiled, policy)
    replay = build_replay(ModelConfig(), MemoryConfig(), policy)
    assert replay.shape == SHAPE
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    assert build_replay(ModelConfig(), MemoryConfig(), policy) is None
    with pytest.raises(Exception, match="names no experts"):
        build_replay(ModelConfig(router_replay="on"), MemoryConfig(), policy)
