"""``scripts/bench/gpu_check.py --fake``: the check of a GPU without one, and the page that it writes."""

from __future__ import annotations

import importlib
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "scripts" / "bench"))
gpu_check: Any = importlib.import_module("gpu_check")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

MACHINE = {
    "torch": "2", "torch_folder": "/torch", "python": "3", "cores": 1, "cpu": "x86_64", "host_gib": 1.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warm_python: Path) -> None:
    """Let ``gpu_check`` find one test that needs a GPU, and a python that imports fast.

    It is the real one for a process whose libraries LD_PRELOAD names: they are loaded at its start.
    """
    tests, python = tmp_path / "root" / "tests", tmp_path / "python"
    tests.mkdir(parents=True)
    (tests / "fake_gpu").symlink_to(ROOT / "tests" / "fake_gpu")
    (tests / "test_it.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_it(): pytest.skip('no')\n")
    python.write_text(
        f'#!/bin/sh\n[ -z "$LD_PRELOAD" ] || exec {sys.executable} "$@"\nexec {warm_python} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path / "root")
    monkeypatch.setattr(signal, "signal", lambda *_: None)


def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> tuple[int, str]:
    """The exit code of a fake check, and its page."""
    page = tmp_path / "pages" / "gpu_check.md"
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(page), *arguments])
    code = gpu_check.main()
    return code, page.read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the device guard with")
@pytest.mark.skipif(
    torch.version.cuda is not None, reason="this build of torch has a device guard of its own"
)
def test_a_page_has_memory_beside_the_plan_and_parity_around_an_update(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, page = check(monkeypatch, tmp_path, "--quick")
    assert code == 0, page
    assert "| tests | not run: 1 skipped" in page
    memory = re.search(r"^\| 0\.6B \| 1 of 28 \|.* (\S+) \| (\S+) \| (\S+) \|$", page, re.MULTILINE)
    assert memory is not None, page
    assert float(memory[1]) == pytest.approx(float(memory[2]), rel=0.1)
    parities = re.findall(
        r"^\| local \| (before|after) the update \| varlen \| \d+ \| (\S+) ", page, re.MULTILINE
    )
    assert [name for name, _ in parities] == ["before", "after"]
    assert all(0 < float(mean) < 2e-2 for _, mean in parities)
    assert "## Publication" in page


def test_a_part_that_fails_is_a_line_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_check.Check, "child", lambda *_, **__: dict(MACHINE))
    (tmp_path / "root" / "tests" / "test_it.py").write_text("raise RuntimeError('broken')  # mark.gpu\n")
    code, page = check(monkeypatch, tmp_path, "--fake", "--only", "tests")
    assert code == 1
    reason = r"^\| tests \| \*\*failed\*\*: gpu tests ended with exit code \d: .*RuntimeError: broken"
    assert re.search(reason, page, re.MULTILINE), page
