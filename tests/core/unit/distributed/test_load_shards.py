from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.config.schema import ModelConfig
from agentrl.distributed.load_shards import load_shards
from agentrl.errors import ModelError
from agentrl.model.load import empty_model, load_model

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": EXPERTS | {"num_experts": 8},
    "mixtral": {"num_local_experts": 4},
    "gemma3_text": {"sliding_window_pattern": 2},
    "phi3": {},
    "glm4_moe": EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1},
    "deepseek_v3": EXPERTS | {
        "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2, "q_lora_rank": 8,
        "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4,
        "num_key_value_heads": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "ernie4_5_moe": EXPERTS | {"moe_num_experts": 4, "moe_k": 2},
}  # fmt: skip


def write(folder: Path, kind: str) -> Any:
    """Write a random model of an architecture in bfloat16, in several files."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | ARCHITECTURES[kind]))
    build: Any = AutoModelForCausalLM.from_config
    model = build(config)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="30KB")
    return model


def load_both(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return the model as ``from_pretrained`` loads it, and as ``load_shards`` does."""
    config = ModelConfig(model_name_or_path=str(folder))
    model: Any = empty_model(folder, config, dtype)
    assert all(parameter.is_meta for parameter in model.parameters())
    load_shards(model, folder, torch.device("cpu"), config)
    return load_model(folder, config, dtype), model


def assert_same(expected: Any, found: Any) -> None:
    names = [name for name, _ in expected.named_parameters(remove_duplicate=False)]
    assert [name for name, _ in found.named_parameters(remove_duplicate=False)] == names
    buffers = dict(found.named_buffers())
    assert buffers.keys() == dict(expected.named_buffers()).keys()
    pairs = [(name, expected.get_parameter(name), found.get_parameter(name)) for name in names]
    pairs += [(name, value, buffers[name]) for name, value in expected.named_buffers()]
    for name, one, other in pairs:
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
    assert not found.training
    assert found.generation_config == expected.generation_config


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_filled_as_from_pretrained_loads_it(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    write(tmp_path, kind)
    expected, found = load_both(tmp_path, dtype)
    assert_same(expected, found)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(expected(input_ids=ids).logits, found(input_ids=ids).logits)
    expected.save_pretrained(tmp_path / "one")
    found.save_pretrained(tmp_path / "other")
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "other")]
    assert files[0].keys() == files[1].keys()


def test_files_of_pytorch_are_read_too(tmp_path: Path) -> None:
    model = tiny_model("llama", tied=True)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert_same(*load_both(tmp_path))


def test_a_base_model_without_a_head_has_the_names_of_its_own_class(tmp_path: Path) -> None:
    model: Any = tiny_model("qwen3", tied=True)
    model.model.save_pretrained(tmp_path)
    found = load_both(tmp_path)[1]
    assert torch.equal(found.lm_head.weight, model.model.embed_tokens.weight)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = torch.ones(31)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[31\], and the model's is \[32\]"):
        load_both(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"has no weights: neither model\.safetensors"):
        load_both(tmp_path)
