"""Adapters: they start as nothing, merge exactly, and come back from what a checkpoint holds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny_models import chains, model_logprobs, packed, tiny_model, tree
from transformers import AutoModelForCausalLM, PreTrainedModel
from written_adapter import write_adapter

from agentrl.config.training import AdapterConfig
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.errors import ConfigError, ModelError
from agentrl.losses.settings import LossSettings
from agentrl.model.lora import Adapter, add_adapter
from agentrl.train.step import forward_backward
from agentrl.weights.folder import is_adapter
from agentrl.weights.snapshot import PublishedModel, write_alone

BASE = Path("base")
FOREST = packed([*chains(0, 3), tree(1)])


def adapted(kind: str = "qwen3", *, tied: bool = False, **flags: object) -> tuple[PreTrainedModel, Adapter]:
    model = tiny_model(kind, tied=tied)
    return model, add_adapter(model, AdapterConfig(**{"lora_rank": 4, **flags}), BASE, None)  # type: ignore[arg-type]


def train(model: PreTrainedModel, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        forward_backward(ParallelModel(model), [FOREST], LossSettings())
        optimizer.step()
        optimizer.zero_grad()


def logprobs(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model_logprobs(model, FOREST)


@pytest.mark.exactness
@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("llama", False)])
def test_the_merged_model_has_the_logprobs_of_the_adapted_one(kind: str, tied: bool, tmp_path: Path) -> None:
    model, adapter = adapted(kind, tied=tied)
    plain = logprobs(tiny_model(kind, tied=tied))
    assert torch.equal(logprobs(model), plain)
    train(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ours = logprobs(model)
    assert (ours - plain).abs().max() > 1e-2
    write_alone(PublishedModel(model, adapter.merged_parts, None), tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert {name for name, _ in merged.named_parameters()} == {part.name for part in adapter.merged_parts()}
    torch.testing.assert_close(logprobs(merged), ours, atol=1e-5, rtol=1e-6)  # kernels of CPUs round apart
    with adapter.disabled():
        assert torch.equal(logprobs(model), plain)
    assert torch.equal(logprobs(model), ours)


def test_only_adapters_are_trained() -> None:
    model, adapter = adapted(lora_target_modules="q_proj, v_proj")
    assert sorted(adapter.layers) == [f"model.layers.{i}.self_attn.{n}_proj" for i in (0, 1) for n in "qv"]
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in adapter.named_parameters()
    }
    train(model)
    assert all(p.grad is None for n, p in model.named_parameters() if ".lora_" not in n)


def test_a_checkpoint_holds_the_adapter(tmp_path: Path) -> None:
    model, adapter = adapted()
    train(model)
    write_adapter(adapter, tmp_path)
    assert is_adapter(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    again = tiny_model("qwen3")
    add_adapter(again, AdapterConfig(lora_rank=4), BASE, tmp_path)
    assert torch.equal(logprobs(again), logprobs(model))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"lora_rank": 8}, "r 4, not 8"),
        ({"lora_alpha": 8}, "lora_alpha 32, not 8"),
        ({"lora_target_modules": "q_proj"}, "other layers than the 4"),
    ],
)
def test_another_adapter_is_refused(flags: dict[str, object], says: str, tmp_path: Path) -> None:
    write_adapter(adapted()[1], tmp_path)
    with pytest.raises((ConfigError, ModelError), match=says):
        add_adapter(tiny_model("qwen3"), AdapterConfig(**{"lora_rank": 4, **flags}), BASE, tmp_path)  # type: ignore[arg-type]


def test_what_cannot_be_adapted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no layer of the model"):
        adapted(lora_target_modules="nothing")
    with pytest.raises(ConfigError, match="output head"):
        adapted(lora_target_modules="q_proj,lm_head")
    with pytest.raises(ConfigError, match="holds whole weights"):
        add_adapter(tiny_model("qwen3"), AdapterConfig(lora_rank=4), BASE, tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"requirements/trainer\.txt"):
        adapted()


@pytest.mark.parametrize(("rate", "least", "most"), [(1e-5, 0.0, 0.6), (0.5, 0.99, 1.01)])
def test_the_share_of_the_adapter_that_rounding_leaves(rate: float, least: float, most: float) -> None:
    """Compared with the Δ of the published weights; adapters stay float32 on a bfloat16 model."""
    model = tiny_model("qwen3").to(torch.bfloat16)
    adapter = add_adapter(model, AdapterConfig(lora_rank=4), BASE, None)
    assert {value.dtype for _, value in adapter.named_parameters()} == {torch.float32}
    with torch.no_grad():
        for name, value in adapter.named_parameters():
            if "lora_B" in name:
                value.normal_(std=rate)
    published = PublishedModel(model, lambda: adapter.merged_parts(torch.bfloat16), torch.bfloat16)
    whole = kept = 0.0
    for part, written in zip(adapter.merged_parts(), published.parts(), strict=True):
        if part.make().dtype == torch.float32:
            delta = part.make() - part.like.float()
            whole += float((delta * delta).sum())
            rounded = written.make().to(written.like.dtype).float()
            kept += float((delta * (rounded - part.like.float())).sum())
    share = adapter.rounding.take_share()
    assert share == pytest.approx(kept / whole, rel=1e-5)
    assert least <= share <= most
    assert adapter.rounding.take_share() is None
