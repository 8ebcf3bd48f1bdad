"""Compiled decoder layers against plain ones, for each vector width of the CPU with one cache of kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import chains, packed, tiny_model

from agentrl.distributed.build_policy import compile_layers
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.losses.settings import LossSettings
from agentrl.train.step import forward_backward


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_compiled_layers_agree(tmp_path: Path) -> None:
    widths: list[dict[str, str]] = [{"ATEN_CPU_CAPABILITY": "avx2"}, {}]
    # Where AVX2 is all there is, the second process would only load what the first has compiled.
    for width in widths[torch.backends.cpu.get_cpu_capability() == "AVX2" :]:
        # In a process of its own: torch reads the width when it is imported.
        ran = subprocess.run(
            [sys.executable, __file__],
            env={
                **os.environ, "PYTHONPATH": os.pathsep.join(sys.path),
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **width,
            },
            capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, (width, ran.stderr[-2000:])


def compare() -> None:
    plain, compiled = (tiny_model("llama", num_hidden_layers=1) for _ in range(2))
    compile_layers(compiled)
    for seed in range(3):
        found = []
        for model in (plain, compiled):
            loss = forward_backward(ParallelModel(model), [packed(chains(seed))], LossSettings())["loss"]
            found.append((loss, [parameter.grad for parameter in model.parameters()]))
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    compare()
