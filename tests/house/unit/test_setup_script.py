"""``scripts/setup.sh`` leaves the environment of another clone as it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import venv
from pathlib import Path

SCRIPTS = Path(__file__).parents[3] / "scripts"


def set_up(clone: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script of a clone, where no Python is found, on an environment."""
    return subprocess.run(
        ["bash", "scripts/setup.sh"], cwd=clone, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "AGENTRL_VENV": str(folder), "PYTHONPATH": "", "PYTHON": "/nowhere"},
    )  # fmt: skip


def test_an_environment_of_another_clone_is_refused(tmp_path: Path) -> None:
    clone, other, folder = tmp_path / "clone", tmp_path / "other", tmp_path / "env"
    shutil.copytree(SCRIPTS, clone / "scripts")
    (clone / "requirements").mkdir()
    for name in ("pyproject.toml", "requirements.txt", "requirements/lock.txt"):
        (clone / name).touch()
    other.mkdir()
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages")) / "agentrl-1.0.dist-info"
    site.mkdir()
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: agentrl\nVersion: 1.0\n", encoding="utf-8")
    origin = {"dir_info": {"editable": True}, "url": other.as_uri()}
    (site / "direct_url.json").write_text(json.dumps(origin), encoding="utf-8")
    done = set_up(clone, folder)
    assert done.returncode == 1
    assert f"{folder} runs the clone in {other}" in done.stderr
    assert "set AGENTRL_VENV to a folder" in done.stderr
    assert not (folder / ".install.lock").exists()
    other.rmdir()  # a clone that is gone does not hold its environment
    assert "no Python 3.11 or newer found" in set_up(clone, folder).stderr
