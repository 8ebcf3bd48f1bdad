from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agentrl.scratch_folder import scratch_folder

MAKES = """
import sys
from agentrl.scratch_folder import scratch_folder
folder = scratch_folder("harness")
(folder / "files.tar").write_bytes(b"x" * 1000)
print(folder, flush=True)
sys.stdin.read()
"""


def start() -> tuple[subprocess.Popen[str], Path]:
    """Start a process that makes a folder and waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_next_start_removes_what_a_killed_process_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = [
        tmp_path / name for name in ("agentrl-harness-x", "agentrl-harness-7.7.00000000.00000000", "mine")
    ]
    for other in others:
        other.mkdir()
    (killed, left), (living, kept) = start(), start()
    killed.kill()
    killed.communicate(timeout=30)
    try:
        assert left.stat().st_mode & 0o777 == 0o700
        own = scratch_folder("sandbox")
        assert own.name.startswith("agentrl-sandbox-")
        assert set(tmp_path.iterdir()) == {*others, kept, own}
        scratch_folder("sandbox")
        assert own.is_dir()
        assert str(os.getpid()) in own.name
    finally:
        living.kill()
        living.communicate(timeout=30)
