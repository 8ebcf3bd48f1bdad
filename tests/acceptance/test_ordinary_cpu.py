"""The default precision on a CPU without instructions for bfloat16: measured, and it learns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from demo.tiny import Phase, build_tiny_model, write_conversations
from transformers import Qwen3Config, Qwen3ForCausalLM

ORDINARY_CPU = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
CHOICE = re.compile(
    r"products in float32, weights in float32: a \d+ x 256 x 256 product runs at (?P<bfloat16>[\d.]+) GFLOP/s"
    r" in bfloat16 and (?P<float32>[\d.]+) in float32, [\d.]+ times as fast"
)
LOSS = re.compile(r"loss\D+([\d.]+)")


def wide_model(folder: Path) -> Path:
    """Return a model that is wide enough for its products to take the time of a step."""
    build_tiny_model(folder, 0)
    config = Qwen3Config.from_pretrained(folder)
    config.hidden_size = 256
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.acceptance
@pytest.mark.integration
@pytest.mark.timeout(300)
def test_an_ordinary_cpu_computes_in_float32_and_learns(tmp_path: Path) -> None:
    phase = Phase("correct conversations", mixed=False, steps=30, learning_rate=3e-3)
    write_conversations(tmp_path / "examples.jsonl", 0, phase)
    command = [
        sys.executable, "-m", "agentrl", "sft", "--run_name", "ordinary", "--max_steps", str(phase.steps),
        "--batch_size", "16", "--max_tokens", "2048", "--learning_rate", str(phase.learning_rate),
        "--model_name_or_path", str(wide_model(tmp_path / "model")),
        "--train_file", str(tmp_path / "examples.jsonl"), "--output_dir", str(tmp_path / "output"),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **ORDINARY_CPU, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    chosen = CHOICE.search(done.stdout)
    assert chosen, done.stdout[-4000:]
    assert float(chosen["float32"]) > float(chosen["bfloat16"])
    losses = [float(found) for found in LOSS.findall(done.stdout)]
    assert losses[-1] < losses[0] / 2
