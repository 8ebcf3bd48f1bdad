"""Compiled decoder layers against plain ones, for two vector widths with one cache of kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_STEPS = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from tiny_models import chains, packed, tiny_model
from agentrl.losses.settings import LossSettings
from agentrl.train.build import compile_layers
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.train.step import forward_backward

plain, compiled = (tiny_model("llama", num_hidden_layers=1) for _ in range(2))
compile_layers(compiled)
for seed in range(3):
    found = []
    for model in (plain, compiled):
        loss = forward_backward(ParallelModel(model), [packed(chains(seed))], LossSettings())["loss"]
        found.append((loss, [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
"""


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_compiled_layers_agree(tmp_path: Path) -> None:
    models = Path(__file__).parents[2]
    for width in ({"ATEN_CPU_CAPABILITY": "avx2"}, {}):
        ran = subprocess.run(
            [sys.executable, "-c", _STEPS, str(models)],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **width},
            capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, (width, ran.stderr[-2000:])
