"""What is published has the trained model's logprobs in transformers 5 and in transformers 4."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_policy import tiny_tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.config.schema import ModelConfig
from agentrl.model.load import load_model, load_policy
from agentrl.weights.folder import complete_folder
from agentrl.weights.snapshot import write_alone

PYTHON = Path(__file__).parents[3] / ".venv-transformers4/bin/python"
SIZES: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "initializer_range": 0.3, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
OLDER: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 500.0, "rope_scaling": LLAMA3, "tie_word_embeddings": True},
    "qwen3": {"rope_theta": 300.0},
    "qwen3_moe": {"rope_theta": 300.0, "num_experts": 8, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 24},
    "gemma3_text": {"rope_theta": 900.0, "rope_local_base_freq": 70.0, "sliding_window": 8,
                    "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    "glm4": {"rope_theta": 300.0, "partial_rotary_factor": 0.5},
    "gpt_neox": {"rotary_emb_base": 300.0, "rotary_pct": 0.5},
}  # fmt: skip
"""Of rotary bases so small that others change the logprobs of a few tokens."""
READ = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM
assert transformers.__version__.startswith("4.")
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype="float32", attn_implementation="sdpa")
    with torch.no_grad():
        logits = model(input_ids=torch.arange(100)[None] * 7 % 259).logits[0].double()
    torch.save(logits.log_softmax(-1), f"{folder}/logprobs.pt")
"""


def write_base(folder: Path, kind: str, spelling: str) -> None:
    """Write a random model whose config.json has the fields of transformers 4, or those of transformers 5."""
    torch.manual_seed(0)
    folder.mkdir()
    older = {**SIZES, **OLDER[kind], "model_type": kind, "torch_dtype": "float32", "architectures": ["?"]}
    (folder / "config.json").write_text(json.dumps(older))
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    if spelling == "older":
        older["architectures"] = [type(model).__name__]
        (folder / "config.json").write_text(json.dumps(older))


def logprobs(folder: Path) -> Tensor:
    model: Any = load_model(folder, ModelConfig(), torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(100)[None] * 7 % 259).logits[0].double().log_softmax(-1)


def test_transformers_4_and_5_read_what_is_published_as_it_was_trained(tmp_path: Path) -> None:
    if not PYTHON.exists():
        if os.environ.get("AGENTRL_REQUIRE_TRANSFORMERS4"):
            pytest.fail(f"{PYTHON} is missing: bash scripts/setup_transformers4.sh")
        pytest.skip("transformers 4 is not installed: bash scripts/setup_transformers4.sh")
    trained: dict[Path, Tensor] = {}
    for kind in OLDER:
        for spelling in ("older", "newer"):
            base, published = (tmp_path / f"{kind}_{spelling}_{name}" for name in ("base", "published"))
            write_base(base, kind, spelling)
            published.mkdir()
            write_alone(load_policy(ModelConfig(model_name_or_path=str(base))).published, published)
            complete_folder(base, published)
            trained[published] = logprobs(base)
            torch.testing.assert_close(logprobs(published), trained[published], atol=1e-6, rtol=0)
    subprocess.run([PYTHON, "-c", READ, *map(str, trained)], check=True, timeout=240)
    for folder, expected in trained.items():
        found = torch.load(folder / "logprobs.pt")
        torch.testing.assert_close(
            found, expected, atol=1e-4, rtol=0, msg=lambda text, name=folder.name: f"{name}: {text}"
        )
