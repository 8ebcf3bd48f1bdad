"""The local engine's model: its device, and CPUs with and without instructions for 16-bit products."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from local_engine import cpu_model, next_logits, request_of, work_off
from safetensors.torch import load_file
from tiny_policy import write_tiny_policy

from agentrl.errors import ModelError
from agentrl.local.engine import model
from agentrl.local.engine.__main__ import run_local_server
from agentrl.local.engine.scheduler import GenerationRequest, Scheduler
from agentrl.model import reward_head

# The check runs again with the weights as they are after loading.
LOAD = """
import sys, torch
from agentrl.local.engine.model import LocalModel
for dtype in sys.argv[2:]:
    model = LocalModel(sys.argv[1], dtype=getattr(torch, dtype), device=torch.device("cpu"))
    model._check_against_plain_attention()
    print(dtype, model.dtype, type(model._model.model.layers[0].mlp.up_proj).__name__)
"""
ORDINARY = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_policy(tmp_path_factory.mktemp("model") / "tiny", hidden_size=256)


@pytest.fixture(scope="module")
def on_an_ordinary_cpu(folder: Path) -> dict[str, list[str]]:
    """What such a CPU holds for each dtype; in one process of its own, as torch reads the variables once."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), *DTYPES], env={**os.environ, **ORDINARY},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return {dtype: words for dtype, *words in map(str.split, done.stdout.splitlines())}


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_ordinary_cpu_holds_weights_in_float32_and_packs_them(
    dtype: str, on_an_ordinary_cpu: dict[str, list[str]]
) -> None:
    assert on_an_ordinary_cpu[dtype] == ["torch.float32", "PackedLinear"]


@pytest.mark.parametrize(
    ("has_gpu", "given", "device"), [(True, {}, "cuda"), (False, {}, "cpu"), (True, {"device": "cpu"}, "cpu")]
)
def test_the_engine_runs_on_the_gpu_that_it_sees(
    has_gpu: bool, given: dict[str, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loaded(Exception):  # noqa: N818  (it only ends the server's start)
        pass

    def load(folder: str, *, dtype: torch.dtype | None, device: torch.device, fp8: bool) -> None:
        raise Loaded(device.type)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(model, "LocalModel", load)
    monkeypatch.setattr(reward_head, "is_reward_model", lambda folder: False)
    with pytest.raises(Loaded, match=device):
        run_local_server("folder", **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def other(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shape with other weights."""
    return write_tiny_policy(tmp_path_factory.mktemp("model") / "other", hidden_size=256, seed=7)


def logits(served: model.LocalModel) -> torch.Tensor:
    return next_logits(served, np.arange(5, 17, dtype=np.int32))


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_cpu_multiplies_in_its_faster_dtype_unless_float32_is_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_fast: bool
) -> None:
    monkeypatch.setattr(model, "bfloat16_speed", lambda *_: (is_fast, "said"))
    dtypes = (None, torch.bfloat16, torch.float32, torch.float16)
    held = [cpu_model(folder, dtype).dtype for dtype in dtypes]
    fast = torch.bfloat16 if is_fast else torch.float32
    assert held == [fast, fast, torch.float32, torch.float32]


@pytest.mark.parametrize("source", ["folder", "tensors"])
def test_an_updated_model_is_the_model_that_is_loaded_anew(folder: Path, other: Path, source: str) -> None:
    served = cpu_model(folder)
    before = logits(served)
    if source == "folder":
        updated = served.updated(str(other))
    else:
        updated = served.updated_from(load_file(other / "model.safetensors"))
    assert torch.equal(logits(updated), logits(cpu_model(other)))
    assert torch.equal(logits(served), before)
    assert not torch.equal(logits(updated), before)


def test_an_updated_model_reads_nothing_of_its_folder_later(
    folder: Path, other: Path, tmp_path: Path
) -> None:
    """A host's copy of the weights is changed in place once the engine has loaded it."""
    copy = shutil.copytree(other, tmp_path / "copy")
    updated = cpu_model(folder).updated(str(copy))
    before = logits(updated)
    file = copy / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 4)
        stream.write(bytes(file.stat().st_size * 3 // 4))
    assert torch.equal(logits(updated), before)
    assert str(file) not in Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.mark.parametrize("broken", ["name", "shape"])
def test_weights_that_do_not_fit_are_refused(folder: Path, broken: str) -> None:
    served = cpu_model(folder)
    before = logits(served)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensor = weights.pop(name)
    weights |= {"model.layers.9.weight": tensor} if broken == "name" else {name: tensor[1:]}
    with pytest.raises(ModelError, match=r"up_proj|cannot be loaded"):
        served.updated_from(weights)
    assert torch.equal(logits(served), before)


def sampled(served: model.LocalModel, *numbers: int) -> dict[str, tuple[list[int], list[float]]]:
    """Sample five tokens of each request at once; return ids and logprobs by request."""
    ended: list[GenerationRequest] = []
    cache = served.new_cache(8192)
    # One chunk for each prompt, whatever else runs: attention over more rows may be another kernel.
    scheduler = Scheduler(served, cache, version="0", max_running=64, chunk_tokens=8192)
    for number in numbers:
        prompt = [5 + number, *range(7, 12 + number % 9)]
        scheduler.submit(request_of(prompt, 5, ended.append, seed=number))
    work_off(scheduler)
    return {request.rid: (request.output_ids, request.logprobs) for request in ended}


def test_a_request_has_the_same_logprobs_however_many_run_beside_it(folder: Path) -> None:
    served = cpu_model(folder, torch.float32)
    alone = {rid: found for number in range(8) for rid, found in sampled(served, number).items()}
    for size in (2, 7, 17, 64):
        together = sampled(served, *range(size))
        for rid, (ids, logprobs) in alone.items():
            if rid in together:
                assert together[rid][0] == ids
                # Other CPUs may choose a kernel by the number of rows.
                near = 0.0 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1e-5
                assert np.abs(np.subtract(together[rid][1], logprobs)).max() <= near
