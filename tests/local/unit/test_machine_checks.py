"""``agentrl doctor`` on a machine: Python, packages, torch, engines, disks, ports, and the sandbox."""

from __future__ import annotations

import resource
import socket
from importlib import metadata
from pathlib import Path
from typing import Literal

import pytest

from agentrl.config.load import Configs, parse
from agentrl.config.schema import EngineConfig
from agentrl.local import doctor, placement
from agentrl.local.doctor import Check, check_memory, check_open_files, check_processes
from agentrl.local.placement import Gpus


def test_an_old_python_fails_with_a_hint() -> None:
    check = doctor.check_python((3, 10, 4))
    assert check.state == "fail"
    assert "3.11" in check.hint
    assert doctor.check_python().state == "ok"


def test_packages_are_held_against_the_tested_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"good": "1.5", "old": "0.9"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    elsewhere = ["extra>=1; extra == 'dev'", "other>=1; sys_platform == 'win32'"]
    wanted = ["good>=1,<2", "old>=1", "gone>=3", *elsewhere]
    monkeypatch.setattr(metadata, "requires", lambda name: wanted)
    monkeypatch.setattr(metadata, "version", version)
    checks = list(doctor.check_packages())
    states = {check.name: check.state for check in checks}
    assert states == {"package old": "warn", "package gone": "fail", "packages": "ok"}
    assert {check.hint for check in checks if check.hint} == {"pip install 'old>=1'", "pip install 'gone>=3'"}
    assert checks[-1].found.startswith("1 of 3")


@pytest.mark.parametrize(
    ("problem", "landlock", "state", "found"),
    [
        (None, 0, "ok", "namespaces"),
        ("unshare: denied", 5, "ok", "limits and Landlock"),
        ("unshare: denied", 0, "warn", "programs read this user's files"),
    ],
)
def test_the_sandbox_says_how_programs_are_confined(
    problem: str | None, landlock: int, state: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "namespace_problem", lambda: problem)
    monkeypatch.setattr(doctor, "landlock_version", lambda: landlock)
    check = doctor.check_sandbox()
    assert check.state == state
    assert found in check.found


def test_a_taken_port_fails() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        check = doctor.check_port(EngineConfig(port=taken.getsockname()[1]))
    assert check.state == "fail"
    assert "--port 0" in check.hint
    assert doctor.check_port(EngineConfig()).state == "ok"


@pytest.mark.parametrize(("free", "state"), [(2**40, "ok"), (5 * 2**30, "warn"), (2**20, "fail")])
def test_disk_space_is_told(free: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr("shutil.disk_usage", lambda place: usage)
    check = doctor.check_disk(str(tmp_path / "not" / "yet"))
    assert check.state == state
    assert bool(check.hint) is (state != "ok")


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_an_engine_with_a_venv_is_needed_by_its_flag_alone(
    name: Literal["sglang", "vllm"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"AGENTRL_{name.upper()}_VENV", str(tmp_path))
    assert doctor.check_engine_venv(name, EngineConfig()).state == "ok"
    failed = doctor.check_engine_venv(name, EngineConfig(engine=name))
    assert failed.state == "fail"
    assert f"scripts/setup_{name}.sh" in failed.hint


def test_a_torch_that_does_not_import_fails_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TORCH_PROBE", "raise ImportError('libtorch is broken')")
    check = doctor.check_torch()
    assert check.state == "fail"
    assert "libtorch is broken" in check.found


@pytest.mark.parametrize(
    ("answer", "gpu", "state"),
    [("2.13.0+cpu|cpu|-", False, "ok"), ("2.13.0+cpu|cpu|-", True, "warn"), ("2.13.0|13.0|H200", True, "ok")],
)
def test_torch_is_held_against_the_gpu(
    answer: str, gpu: bool, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_TORCH_PROBE", f"print({answer!r})")
    monkeypatch.setattr(doctor, "has_gpu", lambda: gpu)
    assert doctor.check_torch().state == state


def parsed(*words: str) -> Configs:
    return parse(words, command="agentrl doctor", description="", shown=())


def test_the_gpus_are_divided_as_launch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = parsed("--train_gpus", "0-1")
    eight = Gpus(names=tuple("01234567"), kind="NVIDIA H100", memory_gib=(79.1,) * 8)
    monkeypatch.setattr(placement, "find_gpus", lambda environment: eight)
    check = doctor.check_gpus(configs)
    assert (check.state, check.hint) == ("ok", "")
    assert "8 GPUs (NVIDIA H100, 79.1 GiB): trainer on 0-1; 6 engines on 2, 3" in check.found
    monkeypatch.setattr(placement, "find_gpus", lambda environment: None)
    assert doctor.check_gpus(configs).state == "fail"
    assert doctor.check_gpus(parsed()).found == "none: all processes run on the CPU"


def test_gpus_that_torch_does_not_see_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "has_gpu", lambda: True)
    monkeypatch.setattr(placement, "_probe", lambda environment: (False, []))
    check = doctor.check_gpus(parsed())
    assert check.state == "warn"
    assert "torch sees no GPU" in check.found


@pytest.mark.parametrize(
    ("check", "state"),
    [
        (check_open_files(512, 4096), "fail"),
        (check_open_files(1024, 65536), "warn"),
        (check_open_files(65536, 65536), "ok"),
        (check_open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY), "ok"),
        (check_processes(100), "warn"),
        (check_processes(resource.RLIM_INFINITY), "ok"),
        (check_memory(2**30), "fail"),
        (check_memory(4 * 2**30), "warn"),
        (check_memory(32 * 2**30), "ok"),
    ],
)
def test_limits(check: Check, state: str) -> None:
    assert check.state == state
    assert bool(check.hint) is (state != "ok")
