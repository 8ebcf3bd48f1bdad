"""The folder of a Harbor task, for tests."""

from __future__ import annotations

from pathlib import Path


def write_task(folder: Path, toml: str = "", *, dockerfile: str | None = "FROM base\n") -> Path:
    """A complete task."""
    for name in ("environment", "tests", "solution"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("<!-- a canary -->\n\nDo it.\n")
    (folder / "tests/test.sh").write_text("#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
    if dockerfile is not None:
        (folder / "environment/Dockerfile").write_text(dockerfile)
    return folder
