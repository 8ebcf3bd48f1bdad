"""The local engine's linear layers in fp8: rounded row by row, before and after an update of the weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from local_engine import cpu_model, next_logits
from tiny_policy import write_tiny_policy
from transformers import AutoModelForCausalLM

from agentrl.local.engine.linears import round_to_fp8, rounded_to_fp8
from agentrl.local.engine.model import LocalModel

IDS = np.arange(20, dtype=np.int32)


def logprobs_of(model: LocalModel) -> torch.Tensor:
    return next_logits(model, IDS)[0].log_softmax(-1)


@torch.inference_mode()
def test_weights_are_rounded_also_those_of_an_update(tmp_path: Path) -> None:
    folders = [write_tiny_policy(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    exact, fp8 = (cpu_model(folders[0], torch.float32, fp8=fp8) for fp8 in (False, True))
    for model in (fp8, fp8.updated(str(folders[1]))):
        plain = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32)
        round_to_fp8(plain)
        expected = plain(torch.from_numpy(IDS.astype(np.int64))[None]).logits[0, -1].log_softmax(-1)
        torch.testing.assert_close(logprobs_of(model), expected, rtol=1e-4, atol=1e-4)
    difference = (logprobs_of(fp8) - logprobs_of(exact)).abs().mean()
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
