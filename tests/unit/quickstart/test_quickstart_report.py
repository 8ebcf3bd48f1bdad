"""The commands that the report of a quickstart names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl.quickstart.report import own_command


def test_the_command_is_a_name_on_the_path_and_else_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "agentrl").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    assert own_command() == ".venv/bin/agentrl"
    monkeypatch.chdir("/")
    assert own_command() == str(folder / "agentrl").removeprefix("/")
    monkeypatch.chdir(folder.parent / "bin")
    monkeypatch.setenv("PATH", str(folder))
    assert own_command() == "agentrl"
