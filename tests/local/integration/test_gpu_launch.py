"""The run scripts on a machine with GPUs: what each process that they start sees, and what they refuse.

The GPUs are stubs (``stub_gpus``): torch's answer is made up, and the command and environment of each process
are recorded instead of running it. The scripts, the launcher, its supervisor and torchrun are real.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_policy import write_tiny_policy

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
STUB = ROOT / "tests" / "stub_gpus.py"


class Machine:
    """A checkout with the real scripts, on a machine with GPUs that are stubs."""

    def __init__(self, folder: Path, warm_python: Path) -> None:
        self.root, self.records, self._venv = folder / "checkout", folder / "records", folder / "venv"
        self._warm = warm_python
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        (self.root / "scripts/setup.sh").write_text("true\n", encoding="utf-8")
        (self.root / "assets").symlink_to(ROOT / "assets")
        self.records.mkdir()
        (self._venv / "bin").mkdir(parents=True)
        self._program("python", f"{sys.executable} -IS {STUB}")
        self._program("accelerate", f"{self._venv}/bin/python -m accelerate.commands.accelerate_cli")
        self._model = write_tiny_policy(folder / "model")
        task = {"id": "t", "query": "Say hello.", "answer": "hello", "scorer": "exact"}
        self.tasks = folder / "tasks.jsonl"
        self.tasks.write_text(json.dumps(task), encoding="utf-8")

    def _program(self, name: str, command: str) -> None:
        """Make a program of the venv that is ``command``."""
        file = self._venv / "bin" / name
        file.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
        file.chmod(0o755)

    def launch(
        self, script: str, *words: str, gpus: int, processes: int, **variables: str
    ) -> tuple[int, str]:
        """Run a script to its end; return its exit code and what it printed."""
        hidden = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROLES", "ENGINE", "ACCELERATE_CONFIG")
        inherited = {name: value for name, value in os.environ.items() if name not in hidden}
        done = subprocess.run(
            ["bash", f"scripts/{script}", "gpu_run", "--max_prompt_tokens", "512", "--prompt_reserve_tokens",
             "32", "--max_new_tokens", "256", "--max_tokens", "2048", "--db_timeout_seconds", "0.5", *words],
            cwd=self.root, timeout=110, stdin=subprocess.DEVNULL, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={
                **inherited, "AGENTRL_VENV": str(self._venv), "HF_HUB_OFFLINE": "1", "SAMPLERS": "1",
                "AGENTRL_SGLANG_VENV": str(self._venv), "AGENTRL_VLLM_VENV": str(self._venv),
                "PYTHONPATH": os.pathsep.join([str(STUB.parent), os.environ.get("PYTHONPATH", "")]),
                "MODEL_PATH": str(self._model), "TRAIN_FILE": str(self.tasks),
                "MONGO_URI": "mongodb://127.0.0.1:9", "STUB_GPUS": str(gpus),
                "STUB_RECORDS": str(self.records), "STUB_PROCESSES": str(processes),
                "STUB_PYTHON": str(self._venv / "bin" / "python"), "STUB_WARM": str(self._warm), **variables,
            },
        )  # fmt: skip
        return done.returncode, done.stdout

    def started(self, name: str) -> list[dict[str, Any]]:
        """Return the processes ``name`` that were started, in the order of their commands."""
        found = [json.loads(file.read_text(encoding="utf-8")) for file in self.records.glob("*.json")]
        return sorted((each for each in found if each.get("name") == name), key=lambda each: each["words"])

    def seen(self, name: str, variable: str = "CUDA_VISIBLE_DEVICES") -> list[str | None]:
        """Return what the processes ``name`` have in an environment variable."""
        return [each["environment"].get(variable) for each in self.started(name)]


@pytest.fixture
def machine(tmp_path: Path, warm_python: Path) -> Machine:
    return Machine(tmp_path, warm_python)


def test_engines_and_trainer_run_on_gpus_of_their_own_and_keep_them_when_restarted(machine: Machine) -> None:
    code, output = machine.launch(
        "minirl.sh", "--inf_tp_size", "2", "--port", "7000", "--train_gpus", "1-2", "--engine_gpus", "3-6",
        ENGINE="sglang", gpus=8, processes=7,
    )  # fmt: skip
    assert code == 0, output
    assert "8 GPUs (NVIDIA H100, 79.0 GiB): trainer on 1-2; 2 engines on 3-4, 5-6; 0,7 unused" in output
    assert "GiB a GPU (agentrl plan)" in output
    assert "engine-1 ended with exit code 1; restarting" in output
    assert machine.seen("serve") == ["3,4", "5,6", "5,6"]
    assert [each["words"][-2:] for each in machine.started("serve")] == [
        ["--port", "7000"], ["--port", "7001"], ["--port", "7001"],
    ]  # fmt: skip
    assert machine.seen("sample") == ["0,7"]
    assert machine.seen("agentrl.train") == ["1,2", "1,2"]
    assert sorted(map(str, machine.seen("agentrl.train", "LOCAL_RANK"))) == ["0", "1"]
    assert set(machine.seen("agentrl.train", "WORLD_SIZE")) == {"2"}
    for name in ("serve", "sample", "agentrl.train"):
        assert set(machine.seen(name, "CUDA_DEVICE_ORDER")) == {"PCI_BUS_ID"}
        for process in machine.started(name):
            assert process["words"][process["words"].index("--engine") + 1] == "sglang"


def test_gpus_of_a_job_are_divided_by_their_names_and_accelerate_starts_the_trainer(
    machine: Machine,
) -> None:
    config = machine.root / "accelerate.yml"
    shutil.copy(ROOT / "assets/fsdp2_dst.yml", config)
    code, output = machine.launch(
        "grpo.sh", gpus=3, processes=4, CUDA_VISIBLE_DEVICES="GPU-a,GPU-b,GPU-c",
        ACCELERATE_CONFIG=str(config),
    )  # fmt: skip
    assert code == 0, output
    assert sorted(map(str, machine.seen("serve"))) == ["GPU-b", "GPU-c"]
    assert machine.seen("sample") == [""]
    assert machine.seen("agentrl.train") == ["GPU-a"]
    assert machine.seen("agentrl.train", "CUDA_DEVICE_ORDER") == [None]


def test_one_gpu_is_shared(machine: Machine) -> None:
    code, output = machine.launch("grpo.sh", gpus=1, processes=3)
    assert code == 0, output
    assert "the trainer and the engine take turns on it; the engine takes 0.8 of its memory" in output
    assert machine.seen("serve") == machine.seen("sample") == machine.seen("train") == ["0"]
    assert machine.started("serve")[0]["words"][-2:] == ["--colocate", "true"]
    assert machine.started("train")[0]["words"][-2:] == ["--colocate", "true"]


def test_an_evaluation_beside_training_sees_a_spare_gpu_or_halves_the_last_engines(machine: Machine) -> None:
    words = ("--check_memory", "false", "--eval_steps", "5", "--eval_file", str(machine.tasks))
    code, output = machine.launch("grpo.sh", *words, "--train_gpus", "0", gpus=3, processes=5)
    assert code == 0, output
    assert machine.seen("eval") == ["2"]
    assert machine.started("eval")[0]["words"][-2:] == ["--inf_mem_ratio", "0.45"]
    shares = {
        each["environment"]["CUDA_VISIBLE_DEVICES"]: each["words"][-2:] for each in machine.started("serve")
    }
    assert shares["2"] == ["--inf_mem_ratio", "0.45"]
    assert "--inf_mem_ratio" not in shares["1"]
    for record in machine.records.iterdir():
        record.unlink()
    code, output = machine.launch(
        "grpo.sh", *words, "--train_gpus", "0", "--engine_gpus", "1", gpus=3, processes=4
    )
    assert code == 0, output
    assert (machine.seen("eval"), machine.seen("sample"), machine.seen("serve")) == (["2"], ["2"], ["1"])
    assert "--inf_mem_ratio" not in machine.started("eval")[0]["words"]


def test_what_overlaps_or_does_not_fit_starts_nothing(machine: Machine) -> None:
    code, output = machine.launch(
        "grpo.sh", "--train_gpus", "0-4", "--engine_gpus", "4-7", "--colocate", "false", gpus=8, processes=0
    )
    assert code == 2
    assert "--train_gpus 0-4 and --engine_gpus 4-7 both name GPU 4" in output
    code, output = machine.launch("grpo.sh", "--tp_size", "3", "--train_gpus", "0-2", gpus=8, processes=0)
    assert code == 2
    assert "the trainer does not fit GPU 0-2" in output
    assert not (machine.root / "logs").exists()
    assert list(machine.records.iterdir()) == []
