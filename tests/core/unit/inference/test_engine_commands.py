"""What engines are told: the dtype of the weights, their share of memory, how many requests they run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.schema import EngineConfig, ModelConfig
from agentrl.errors import ConfigError, ModelError
from agentrl.inference.client import load_seconds
from agentrl.inference.engines import commands
from agentrl.inference.engines.commands import engine_command

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@pytest.fixture(params=["bfloat16", "float32"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"dtype": request.param}))
    return tmp_path


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with GPUs that nothing divides, and with every engine."""
    for name in VISIBLE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(commands, "has_gpu", lambda: True)
    monkeypatch.setattr(commands, "engine_python", lambda _: "python")


def told(folder: Path, engine: Any, **flags: Any) -> dict[str, str]:
    """The command's flags and their values."""
    config = EngineConfig(engine=engine, **flags)
    words = list(engine_command(str(folder), ModelConfig(dtype="float32"), config, 1).argv)
    return dict(itertools.pairwise(words))


@pytest.mark.parametrize("engine", ["local", "sglang", "vllm"])
def test_an_engine_is_told_the_dtype_of_the_folder(folder: Path, engine: str) -> None:
    dtype = json.loads((folder / "config.json").read_text())["dtype"]
    flags = told(folder, engine)
    is_exact = (engine, dtype) == ("sglang", "float32")
    assert (flags["--dtype"], flags.get("--attention-backend")) == (dtype, "triton" if is_exact else None)


def test_the_local_engine_chooses_the_dtype_of_its_products(folder: Path) -> None:
    command = engine_command(str(folder), ModelConfig(), EngineConfig(engine="local"), 1)
    assert dict(itertools.pairwise(command.argv))["--dtype"] == "auto"


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_on_a_cpu_weights_are_held_in_float32(
    folder: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "has_gpu", lambda: False)
    flags = told(folder, engine)
    assert flags["--dtype"] == "float32"
    assert "32" in (flags.get("--max-running-requests"), flags.get("--max-num-seqs"))
    assert flags.get("--worker-cls") == ("packing_worker.PackingWorker" if engine == "vllm" else None)


@pytest.mark.parametrize(
    ("engine", "memory", "requests"),
    [
        ("sglang", "--mem-fraction-static", "--max-running-requests"),
        ("vllm", "--gpu-memory-utilization", "--max-num-seqs"),
    ],
)
def test_limits_on_a_gpu(
    folder: Path, engine: str, memory: str, requests: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(folder, engine)[memory] == "0.5"
    assert requests not in told(folder, engine)
    assert told(folder, engine, max_running_requests=7)[requests] == "7"
    for name in VISIBLE:
        monkeypatch.setenv(name, "1")
        assert memory not in told(folder, engine)
        assert told(folder, engine, inf_mem_ratio=0.3)[memory] == "0.3"
        monkeypatch.delenv(name)


def test_engines_quantize_weights_and_load_new_ones_into_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sglang = told(folder, "sglang", rollout_quantization="fp8")
    assert (sglang["--quantization"], sglang["--load-format"]) == ("fp8", "flash_rl")
    assert told(folder, "vllm", rollout_quantization="fp8")["--quantization"] == "fp8"
    assert "--quantization" not in {**told(folder, "sglang"), **told(folder, "vllm")}
    monkeypatch.setattr(commands, "has_gpu", lambda: False)
    assert told(folder, "local", rollout_quantization="fp8")["--quantization"] == "fp8"
    with pytest.raises(ConfigError, match="--rollout_quantization fp8 needs a GPU with --engine sglang"):
        told(folder, "sglang", rollout_quantization="fp8")


def test_a_folder_without_a_readable_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is not a model folder: its config\.json cannot be read"):
        told(tmp_path, "local")


def test_large_weights_may_load_longer(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(70_000_000_000)
    (tmp_path / "tokenizer.json").write_text("x" * 1000)
    assert load_seconds(str(tmp_path)) == 700
    assert load_seconds(str(tmp_path / "gone")) == load_seconds(None) == 0


@pytest.mark.parametrize("flag", ["auto", "off"])
def test_sglang_returns_the_experts_of_a_mixture(folder: Path, flag: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    for shape in ({}, {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3}):
        (folder / "config.json").write_text(json.dumps(config | shape))
        model = ModelConfig(router_replay=flag)
        command = engine_command(str(folder), model, EngineConfig(engine="sglang"), 1)
        returns = "--enable-return-routed-experts" in command.argv
        assert returns == (bool(shape) and flag == "auto")
