"""Which GPUs the launcher finds, and what it says where it finds none."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest
from parsed_flags import parsed

from agentrl.errors import ConfigError
from agentrl.local import placement
from agentrl.local.placement import UnseenGpuError, find_gpus, place_processes

H100 = ("NVIDIA H100", 79 * 2**30)


@pytest.fixture
def torch_sees(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch in a child process prints, by call; the test fills it."""
    answers: list[Any] = []
    environments: list[Mapping[str, str]] = []

    def run(command: list[str], *, env: Mapping[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        environments.append(env)
        answer = answers[0](env) if callable(answers[0]) else answers[0]
        return subprocess.CompletedProcess(command, 0, stdout=f"a warning\n{json.dumps(answer)}\n")

    monkeypatch.setattr(placement, "has_gpu", lambda: True)
    monkeypatch.setattr(subprocess, "run", run)
    answers.append([False, [H100] * 4])
    return answers


def test_gpus_are_numbered_as_nvidia_smi_does(torch_sees: list[Any]) -> None:
    found = find_gpus({})
    assert (found.names, found.kind) == (("0", "1", "2", "3"), "NVIDIA H100")
    assert found.memory_gib == (79.0,) * 4
    assert found.order == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    torch_sees[0] = [True, [H100] * 4]
    amd = find_gpus({})
    assert amd.variable == "HIP_VISIBLE_DEVICES"


@pytest.mark.parametrize("visible", ["2,3,6,7", "GPU-a,GPU-b, GPU-c,GPU-d", "4,5,6,7,9"])
def test_gpus_of_a_job_keep_their_names(torch_sees: list[Any], visible: str) -> None:
    found = find_gpus({"CUDA_VISIBLE_DEVICES": visible})
    assert found.names == tuple(name.strip() for name in visible.split(","))[:4]
    assert found.order == {}


def test_each_mig_instance_is_counted(torch_sees: list[Any]) -> None:
    torch_sees[0] = lambda env: [False, [(env["CUDA_VISIBLE_DEVICES"], 10 * 2**30)]]
    found = find_gpus({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"})
    assert (found.names, found.kind) == (("MIG-a", "MIG-b"), "MIG-a and MIG-b")


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_no_gpus(torch_sees: list[Any], hidden: str) -> None:
    assert find_gpus({"CUDA_VISIBLE_DEVICES": hidden}) is None


def test_a_machine_without_gpus_starts_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "has_gpu", lambda: False)
    monkeypatch.setattr(placement, "_probe", lambda environment: pytest.fail("a child was started"))
    assert find_gpus({}) is None


def test_torch_that_sees_no_gpu_is_told_from_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "has_gpu", lambda: True)
    with pytest.raises(UnseenGpuError, match="torch sees no GPU"):
        find_gpus({})  # this machine's torch, in a real child process
    monkeypatch.setattr(placement, "_PROBE", "raise ImportError('no libcuda')")
    with pytest.raises(UnseenGpuError, match="no libcuda"):
        find_gpus({})


def test_gpus_that_are_named_and_missing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "find_gpus", lambda environment: None)
    lines: list[str] = []
    assert place_processes(parsed(), lines.append, trains=True, serves=True) is None
    assert lines == []
    with pytest.raises(ConfigError, match=r"--train_gpus is given, and there is no GPU here"):
        place_processes(parsed("--train_gpus", "0"), lines.append, trains=True, serves=True)


def test_the_placement_is_reported_and_an_unseen_gpu_too(
    torch_sees: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    lines: list[str] = []
    assert place_processes(parsed(), lines.append, trains=False, serves=False) is None
    torch_sees[0] = [False, [H100]]
    assert place_processes(parsed(), lines.append, trains=True, serves=True) is not None
    torch_sees[0] = [False, []]
    assert place_processes(parsed(), lines.append, trains=True, serves=True) is None
    assert lines == [
        "1 GPU (NVIDIA H100, 79.0 GiB): the trainer and the engine take turns on it; the engine takes 0.8 of"
        " its memory (--inf_mem_ratio)",
        "no GPU is assigned to a process: torch sees no GPU; agentrl doctor names the cause",
    ]
