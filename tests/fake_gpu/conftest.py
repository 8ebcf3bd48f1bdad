"""Start the processes that train on fake CUDA tensors: they preload a device guard that does nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_gpu.cases import Case

_HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
_SECONDS = 900

Steps = Callable[[Sequence[Case]], list[dict[str, Any]]]
"""Returns what each case's rank did, as ``fake_step.py`` prints it."""


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled guard."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the device guard with")
    if torch.version.cuda is not None:
        pytest.skip("this build of torch has a CUDA device guard of its own")
    library = tmp_path_factory.mktemp("guard") / "noop_guard.so"
    include = _TORCH / "include"
    subprocess.run(
        [
            *("g++", "-shared", "-fPIC", "-O1", "-std=c++20", "-o", library, _HERE / "noop_guard.cpp"),
            *(f"-I{include}", f"-I{include}/torch/csrc/api/include"),
            *(f"-L{_TORCH}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{_TORCH}/lib"),
        ],
        check=True,
        timeout=_SECONDS,
    )
    return library


@pytest.fixture(scope="session")
def run_steps(guard: Path) -> Steps:
    """Runs cases in a process of their own."""

    def run(cases: Sequence[Case]) -> list[dict[str, Any]]:
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "fake_gpu.fake_step", json.dumps([*map(asdict, cases)])],
            env={**os.environ, "LD_PRELOAD": str(guard), "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        found = [json.loads(line) for line in ended.stdout.splitlines()]
        assert ended.returncode == 0, ended.stderr
        errors = [
            f"{case}\n{step['error']}" for case, step in zip(cases, found, strict=True) if "error" in step
        ]
        assert not errors, "\n".join(errors)
        return found

    return run
