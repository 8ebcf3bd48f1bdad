"""The dashboard of the quickstart: its token reaches the person, and nothing that a harness can read."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from agentrl.quickstart.dashboard import dashboard, wait_for_signal

_PROGRAM = """#!/bin/sh
echo "$@" > arguments
env > environment
echo log
cat > token.new
mv token.new token
"""


def test_the_token_goes_by_a_pipe_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "program"
    program.write_text(_PROGRAM)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    log = tmp_path / "logs" / "dashboard.out"
    with dashboard("mine", "mongo", log) as link:
        address, _, token = link.partition("?token=")
        deadline = time.monotonic() + 10
        while not (tmp_path / "token").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert address.endswith("/runs/mine")
    assert len(token) > 40
    assert (tmp_path / "token").read_text() == token
    arguments = (tmp_path / "arguments").read_text()
    assert "--token_file /dev/stdin" in arguments
    for text in (arguments, (tmp_path / "environment").read_text(), log.read_text()):
        assert token not in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_wait_ends_with_a_signal_and_restores_its_handler(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
    wait_for_signal()
    assert signal.getsignal(number) is before
