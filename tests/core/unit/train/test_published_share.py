"""The share of a run's update that is left in the rounded weights, measured against the base's files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tiny_models import tiny_model

from agentrl.config.schema import ModelConfig
from agentrl.model.load import Policy, load_model
from agentrl.train import controller
from agentrl.train.controller import PublishedShare

WIDE = {"hidden_size": 64, "vocab_size": 96}


def trained(folder: Path, kind: str = "qwen3", rate: float = 0.0, **shape: Any) -> Policy:
    """A float32 policy whose weights lie ``rate`` from those of a bfloat16 base in ``folder``."""
    tiny_model(kind, **shape).to(torch.bfloat16).save_pretrained(folder)
    model = load_model(folder, ModelConfig(model_name_or_path=str(folder)), torch.float32)
    signs = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += rate * torch.randint(0, 2, weight.shape, generator=signs).mul(2).sub(1)
    return Policy(model, cast("Any", None), folder, None, own_dtype=torch.bfloat16)


@pytest.mark.parametrize("rate", [1e-6, 5e-5, 1e-2])
@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("llama", False), ("qwen3_moe", False)])
def test_the_share_is_that_of_all_published_weights(
    kind: str, tied: bool, rate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = trained(tmp_path, kind, rate, tied=tied, **WIDE)
    base = dict(load_model(tmp_path, ModelConfig(), torch.float32).named_parameters())
    whole = kept = 0.0
    for name, weight in policy.model.named_parameters():
        delta = weight.detach() - base[name].detach()
        whole += float(delta.square().sum())
        kept += float((delta * (weight.detach().bfloat16().float() - base[name].detach())).sum())
    sampled = PublishedShare(policy).measure()
    monkeypatch.setattr(controller, "_ROWS", 10**6)
    assert PublishedShare(policy).measure() == pytest.approx(kept / whole, rel=1e-4)
    assert sampled == pytest.approx(kept / whole, abs=0.02)
    assert (kept / whole > 0.9) is (rate == 1e-2)


def test_weights_that_have_not_changed_have_no_share(tmp_path: Path) -> None:
    assert PublishedShare(trained(tmp_path)).measure() is None


def test_frozen_weights_are_not_read(tmp_path: Path) -> None:
    policy = trained(tmp_path, rate=1e-2)
    for name, weight in policy.model.named_parameters():
        weight.requires_grad_(name == "model.norm.weight")
    assert list(PublishedShare(policy)._base) == ["model.norm.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_what_is_not_rounded_is_not_compared(
    dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(controller, "read_rows")
    policy = replace(trained(tmp_path, rate=1e-6), own_dtype=dtype)
    assert PublishedShare(policy).measure() == 1.0


def test_a_base_that_cannot_be_read_costs_the_metric_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = trained(tmp_path, rate=1e-2)
    (tmp_path / "model.safetensors").unlink()
    share = PublishedShare(policy)
    assert share.measure() is share.measure() is None
    told = [record.message.split(":")[0] for record in caplog.records]
    assert told == ["published_update_share is not reported"]
