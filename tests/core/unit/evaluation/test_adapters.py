"""Adapters in checkpoints: merged once into the model of the run, or refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from demo.tiny import build_tiny_model
from safetensors.torch import load_file
from written_adapter import write_adapter

from agentrl.config.schema import ModelConfig
from agentrl.config.training import AdapterConfig
from agentrl.errors import ModelError
from agentrl.model.load import load_policy
from agentrl.weights.folder import merged_model


def adapter_of(base: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Write an adapter with random weights; return the model's weights with it."""
    policy = load_policy(ModelConfig(model_name_or_path=str(base)), None, AdapterConfig(lora_rank=4))
    torch.manual_seed(0)
    for _, parameter in policy.adapter.named_parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    folder.mkdir(parents=True)
    write_adapter(policy.adapter, folder)
    return {part.name: part.make() for part in policy.adapter.merged_parts()}


async def test_an_adapter_is_merged_once_into_the_model_that_it_names(tmp_path: Path) -> None:
    base = build_tiny_model(tmp_path / "base", 0)
    wanted = adapter_of(base, tmp_path / "checkpoint" / "model")
    folder = await merged_model(tmp_path / "checkpoint" / "model", None, tmp_path / "merged")
    found = load_file(folder / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in wanted.items() if name in found)
    plain = load_file(base / "model.safetensors")
    assert sum(not torch.equal(found[name], plain[name]) for name in plain) >= 14, "seven layers, twice"
    assert (folder / "tokenizer.json").is_file()
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert await merged_model(tmp_path / "checkpoint" / "model", str(base), tmp_path / "merged") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


async def test_an_adapter_without_its_model_is_refused(tmp_path: Path) -> None:
    base = build_tiny_model(tmp_path / "base", 0)
    adapter_of(base, tmp_path / "adapter")
    base.rename(tmp_path / "moved")
    with pytest.raises(ModelError, match=r"which is not a folder here[\s\S]*--model_name_or_path"):
        await merged_model(tmp_path / "adapter", None, tmp_path / "merged")
    other = build_tiny_model(tmp_path / "other", 0, context_tokens=64)
    (other / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be merged into"):
        await merged_model(tmp_path / "adapter", str(other), tmp_path / "merged")
