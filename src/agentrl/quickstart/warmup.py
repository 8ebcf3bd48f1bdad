"""Makes the model of ``agentrl quickstart --tiny``: random weights, then two phases of ``agentrl sft``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import ModelError
from agentrl.processes import start_child, stop_child, tail
from agentrl.quickstart.smollm import CHAT_TEMPLATE, install_template
from agentrl.quickstart.tiny import tiny_sft_conversations

MODELS = Path(".agentrl/models")
LOG = Path("logs/quickstart-tiny-sft.out")
BUILD_SECONDS = 300.0
PHASE_SECONDS = 900.0


@dataclass(frozen=True)
class Phase:
    """One run of ``agentrl sft``."""

    name: str
    mixed: bool
    steps: int
    learning_rate: float


PHASES = (
    Phase("right conversations", mixed=False, steps=320, learning_rate=3e-3),
    Phase("mixed conversations", mixed=True, steps=60, learning_rate=5e-4),
)
"""First the form and the copying, then the flaws that leave reinforcement learning something to find."""

BATCH_SIZE = 16


def prepare_tiny_model(seed: int, say: Callable[[str], None]) -> Path:
    """The warmed-up model of ``seed``; made, in processes of its own, if not there. Raises ModelError."""
    folder = MODELS / f"tiny-seed{seed}"
    if not (folder / "config.json").is_file():
        MODELS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=MODELS, prefix=".tmp-tiny-") as scratch:
            _make(seed, folder, Path(scratch), say)
    install_template(CHAT_TEMPLATE, folder)
    return folder


def _make(seed: int, folder: Path, scratch: Path, say: Callable[[str], None]) -> None:
    say(f"making a two-layer model with seed {seed} in {folder}, once")
    model = scratch / "random"
    _run(["-m", "agentrl.quickstart.tiny", str(model), str(seed)], BUILD_SECONDS)
    for number, phase in enumerate(PHASES):
        say(f"supervised warm-up: {phase.steps} steps on {phase.name}")
        file = scratch / f"phase{number}.jsonl"
        write_conversations(file, seed, phase)
        output = folder if phase is PHASES[-1] else scratch / f"phase{number}"
        _run([*_sft_command(phase, seed), *_paths(model, file, output)], PHASE_SECONDS)
        model = output


def write_conversations(file: Path, seed: int, phase: Phase) -> None:
    """One conversation a line; as many as the phase trains, so that none is seen twice."""
    conversations = tiny_sft_conversations(seed, phase.steps * BATCH_SIZE, mixed=phase.mixed)
    file.write_text("".join(f"{json.dumps(item)}\n" for item in conversations), encoding="utf-8")


def _sft_command(phase: Phase, seed: int) -> list[str]:
    return [
        "-m", "agentrl", "sft", "--run_name", "quickstart-tiny-sft", "--seed", str(seed),
        "--max_steps", str(phase.steps), "--batch_size", str(BATCH_SIZE), "--max_tokens", "2048",
        "--learning_rate", str(phase.learning_rate), "--lr_scheduler_type", "linear", "--warmup_steps", "5",
    ]  # fmt: skip


def _paths(model: Path, file: Path, output: Path) -> list[str]:
    return ["--model_name_or_path", str(model), "--train_file", str(file), "--output_dir", str(output)]


def _run(arguments: list[str], seconds: float) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    child = start_child([sys.executable, *arguments], log=LOG, env=environment)
    try:
        code = child.wait(seconds)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"the warm-up did not end within {seconds:g} s", hint=f"see {LOG}") from error
    finally:
        stop_child(child)
    if code != 0:
        raise ModelError(
            f"the warm-up ended with exit code {code}:\n{tail(LOG)}", hint=f"the whole log is {LOG}"
        )
