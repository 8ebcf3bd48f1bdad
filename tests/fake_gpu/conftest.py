"""Start the processes that train on fake CUDA tensors: they preload a device guard that does nothing."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_python import warm_server

from fake_gpu.cases import Case
from fake_gpu.fake_cuda import GUARD, compile_guard

_SECONDS = 900

Fake = Callable[..., list[dict[str, Any]]]
"""Runs a module of this folder with the words of a command line; returns the lines of JSON that it prints."""
Steps = Callable[[Sequence[Case]], list[dict[str, Any]]]
"""Returns what each case's rank did, as ``fake_step.py`` prints it."""


@pytest.fixture(scope="session")
def guard(shared_folder: Path) -> Path:
    """The compiled guard."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the device guard with")
    if torch.version.cuda is not None:
        pytest.skip("this build of torch has a CUDA device guard of its own")
    folder = shared_folder / "guard"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = folder / GUARD
        return library if library.exists() else compile_guard(folder)


@pytest.fixture(scope="session")
def fake_python(guard: Path, shared_folder: Path) -> Iterator[Path]:
    """A ``python`` whose programs are forks of one that has imported torch beside the guard."""
    with warm_server(shared_folder / "fake", LD_PRELOAD=str(guard)) as python:
        yield python


@pytest.fixture(scope="session")
def run_fake(fake_python: Path) -> Fake:
    """Runs a module in a process of its own."""

    def run(module: str, *words: str) -> list[dict[str, Any]]:
        ended = subprocess.run(
            [str(fake_python), "-m", f"fake_gpu.{module}", *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return [json.loads(line) for line in ended.stdout.splitlines()]

    return run


@pytest.fixture(scope="session")
def run_steps(run_fake: Fake) -> Steps:
    """Runs cases in a process of their own."""

    def run(cases: Sequence[Case]) -> list[dict[str, Any]]:
        found = run_fake("fake_step", json.dumps([*map(asdict, cases)]))
        errors = [
            f"{case}\n{step['error']}" for case, step in zip(cases, found, strict=True) if "error" in step
        ]
        assert not errors, "\n".join(errors)
        return found

    return run
