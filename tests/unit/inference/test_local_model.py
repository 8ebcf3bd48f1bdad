"""The local engine's model: its device, and CPUs with and without instructions for 16-bit products."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_policy import write_tiny_policy

from agentrl.inference.engines.local import model
from agentrl.inference.engines.local.__main__ import run_local_server

# The check runs again with the weights as they are after loading.
LOAD = """
import sys, torch
from agentrl.inference.engines.local.model import LocalModel
model = LocalModel(sys.argv[1], dtype=getattr(torch, sys.argv[2]), device=torch.device("cpu"))
model._check_against_plain_attention()
print(model.dtype, type(model._model.model.layers[0].mlp.up_proj).__name__)
"""
ORDINARY = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_policy(tmp_path_factory.mktemp("model") / "tiny", hidden_size=256)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_ordinary_cpu_holds_weights_in_float32_and_packs_them(folder: Path, dtype: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), dtype], env={**os.environ, **ORDINARY},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["torch.float32", "_PackedLinear"]


@pytest.mark.parametrize(
    ("has_gpu", "given", "device"), [(True, {}, "cuda"), (False, {}, "cpu"), (True, {"device": "cpu"}, "cpu")]
)
def test_the_engine_runs_on_the_gpu_that_it_sees(
    has_gpu: bool, given: dict[str, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loaded(Exception):  # noqa: N818  (it only ends the server's start)
        pass

    def load(folder: str, *, dtype: torch.dtype | None, device: torch.device) -> None:
        raise Loaded(device.type)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(model, "LocalModel", load)
    with pytest.raises(Loaded, match=device):
        run_local_server("folder", **given)  # type: ignore[arg-type]
