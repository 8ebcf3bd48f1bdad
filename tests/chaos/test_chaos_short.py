"""One minute of faults on real processes: nothing is lost or trained twice."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from chaos.actors import environment
from chaos.notes import SECONDS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.usefixtures("starts_warm")]

FIGURE = re.compile(r"^(?P<name>\S.*\S)  +(?P<value>\d+)$", re.MULTILINE)


def processes_of(folder: Path) -> list[str]:
    """Return the command lines, and open files, of running processes that name ``folder``."""
    found = []
    for process in psutil.process_iter(["cmdline", "open_files", "status"]):
        files = (file.path for file in process.info["open_files"] or ())
        words = " ".join([*(process.info["cmdline"] or ()), *files])
        if str(folder) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(words)
    return found


def test_a_minute_of_faults_ends_without_a_violation(tmp_path: Path) -> None:
    folder = tmp_path / "chaos"
    flags = ["--minutes", "1", "--seed", "15", "--gap", "5", "--keep", str(folder)]
    with subprocess.Popen(
        [sys.executable, "-m", "chaos", *flags], env=environment() | {SECONDS: "0.3"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            output, log = process.communicate(timeout=280)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            output, log = process.communicate(timeout=15)
    assert process.returncode == 0, log[-3000:] + output[-6000:]
    assert output.splitlines()[-1] == "0 violations"
    figures = {match["name"]: int(match["value"]) for match in FIGURE.finditer(output)}
    assert figures["faults"] >= 9
    assert figures["trajectories scored"] >= 50
    assert figures["steps trained"] >= 5
    assert processes_of(folder) == []
