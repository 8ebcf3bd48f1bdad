"""Programs that stand in for others on PATH."""

from __future__ import annotations

from pathlib import Path

import pytest


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, text: str) -> None:
    """Write a program that is found before all others, and of these only those of the system."""
    program = folder / name
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/local/bin:/usr/bin:/bin")
