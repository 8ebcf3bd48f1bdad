"""Linear layers of the local engine: deltas in place, exact as the whole version, and fp8 row by row."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_engine import cpu_model, next_logits
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, tiny_model
from tiny_policy import write_tiny_policy
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentrl.errors import ModelError, PublishError
from agentrl.local.engine import model as local_model
from agentrl.local.engine.linears import PackedLinear, round_to_fp8, rounded_to_fp8
from agentrl.local.engine.model import LocalModel
from agentrl.weights.delta import encode
from agentrl.weights.snapshot import WHOLE

IDS = np.arange(20, dtype=np.int32) % VOCABULARY


def save(folder: Path, kind: str, dtype: torch.dtype, **config: Any) -> Path:
    model: Any = tiny_model(kind, num_hidden_layers=2, **config)
    model.to(dtype).save_pretrained(folder)
    return folder


def changed(weights: dict[str, Tensor], chance: random.Random) -> dict[str, Tensor]:
    """Return ``weights`` with a share of the elements of some tensors changed, to any finite bits."""
    generator = torch.Generator().manual_seed(chance.getrandbits(60))
    result = {}
    for name, tensor in weights.items():
        hit = torch.rand(tensor.shape, generator=generator) < chance.choice((0.0, 0.02, 1.0))
        result[name] = torch.where(hit, torch.randn(tensor.shape, generator=generator).to(tensor), tensor)
    return result


def held(model: LocalModel) -> dict[str, Tensor]:
    """Return all weights as the model holds them, packed ones in row-major order."""
    inner: Any = model._model
    packed = {n: m.packed.to_dense() for n, m in inner.named_modules() if isinstance(m, PackedLinear)}
    return {**inner.state_dict(), **packed}


def logprobs(model: LocalModel) -> Tensor:
    return next_logits(model, IDS)[0].log_softmax(-1)


@pytest.mark.parametrize("is_fast", [True, False], ids=["held in bfloat16", "held in float32"])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"tie_word_embeddings": False}),
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ],
    ids=["tied", "untied", "experts"],
)
@torch.inference_mode()
def test_a_chain_gives_the_weights_and_logprobs_of_its_last_version(
    kind: str, config: dict[str, Any], is_fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_model, "bfloat16_speed", lambda *_: (is_fast, "chosen"))
    folder = save(tmp_path / "model", kind, torch.bfloat16, **config)
    model = cpu_model(folder)
    before = logprobs(model)
    chance = random.Random(len(kind))
    versions = [load_file(folder / WHOLE)]
    files = [tmp_path / f"{number}.delta" for number in range(4)]
    for file in files:
        versions.append(changed(versions[-1], chance))
        encode(versions[-2], versions[-1], file)
    one_by_one, at_once = cpu_model(folder), cpu_model(folder)
    for file in files:
        one_by_one.read_patch([file]).apply()
    patch = at_once.read_patch(files)
    assert torch.equal(logprobs(at_once), before)
    patch.apply()
    save_file(versions[-1], folder / WHOLE, metadata={"format": "pt"})
    whole = model.updated(str(folder))
    for patched in (one_by_one, at_once):
        weights = held(patched)
        assert weights.keys() == held(whole).keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in held(whole).items())
        assert torch.equal(logprobs(patched), logprobs(whole))
    assert not torch.equal(before, logprobs(whole))


def test_weights_in_another_form_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "qwen3", torch.bfloat16)
    weights = load_file(folder / WHOLE)
    delta = tmp_path / "x.delta"
    encode(weights, changed(weights, random.Random(0)), delta)
    for other in (cpu_model(folder, fp8=True), cpu_model(folder, torch.float16)):
        with pytest.raises(ModelError, match=r"cannot be changed|in another form"):
            other.read_patch([delta])
    model = cpu_model(folder)
    wider = {name: torch.cat([tensor, tensor]) for name, tensor in weights.items()}
    encode(wider, changed(wider, random.Random(0)), tmp_path / "y.delta")
    with pytest.raises(PublishError, match="does not fit"):
        model.read_patch([tmp_path / "y.delta"])
    model.unload()
    with pytest.raises(ModelError, match="memory is released"):
        model.read_patch([delta])


@torch.inference_mode()
def test_weights_are_rounded_also_those_of_an_update(tmp_path: Path) -> None:
    folders = [write_tiny_policy(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    exact, fp8 = (cpu_model(folders[0], torch.float32, fp8=fp8) for fp8 in (False, True))
    for model in (fp8, fp8.updated(str(folders[1]))):
        plain = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32)
        round_to_fp8(plain)
        expected = plain(torch.from_numpy(IDS.astype(np.int64))[None]).logits[0, -1].log_softmax(-1)
        torch.testing.assert_close(logprobs(model), expected, rtol=1e-4, atol=1e-4)
    difference = (logprobs(fp8) - logprobs(exact)).abs().mean()
    assert 1e-4 < difference < 0.2


def test_a_row_has_its_own_scale_and_three_bits_of_mantissa() -> None:
    scales = torch.tensor([[1.0], [1e-4], [1e3], [0.0]])
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * scales
    rounded = rounded_to_fp8(weight)
    largest = weight.abs().amax(-1)
    torch.testing.assert_close(rounded.abs().amax(-1), largest)
    assert bool(((rounded - weight).abs() <= weight.abs() / 16 + largest[:, None] / 2**16).all())
    torch.testing.assert_close(rounded_to_fp8(rounded), rounded)
    assert rounded_to_fp8(weight.bfloat16()).dtype == torch.bfloat16
