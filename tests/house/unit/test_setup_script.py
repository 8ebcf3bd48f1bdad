"""``scripts/setup.sh`` leaves the environment of another clone as it is, and installs by uv or by pip."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

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
    site = next(folder.glob("lib/python*/site-packages")) / "agentrl_mongo-1.0.dist-info"
    site.mkdir()
    (site / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: agentrl-mongo\nVersion: 1.0\n", encoding="utf-8"
    )
    origin = {"dir_info": {"editable": True}, "url": other.as_uri()}
    (site / "direct_url.json").write_text(json.dumps(origin), encoding="utf-8")
    done = set_up(clone, folder)
    assert done.returncode == 1
    assert f"{folder} runs the clone in {other}" in done.stderr
    assert "set AGENTRL_VENV to a folder" in done.stderr
    assert not (folder / ".install.lock").exists()
    other.rmdir()  # a clone that is gone does not hold its environment
    assert "no Python 3.11 or newer found" in set_up(clone, folder).stderr


def executable(path: Path, text: str) -> Path:
    """Write a shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def uv_of(folder: Path, settings: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``uv_install.py`` with settings of pip, on a uv that prints its arguments and variables."""
    (folder / "pip.conf").write_text(settings, encoding="utf-8")
    uv = executable(folder / "uv", 'echo "$*"; env')
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "lib/uv_install.py"), str(uv), "--no-deps", "six"],
        capture_output=True, text=True, timeout=60, check=False,
        env={**kept, "PIP_CONFIG_FILE": str(folder / "pip.conf"), **variables},
    )  # fmt: skip


def test_uv_installs_by_the_settings_of_pip(tmp_path: Path) -> None:
    settings = """[global]
index-url = https://user:secret@mirror.test/simple
extra-index-url = https://one.test/simple
    file:///two/simple
find-links = /unused
cert = /etc/ca.pem
timeout = 7
[install]
trusted-host = one.test
constraint = /pinned.txt
"""
    done = uv_of(tmp_path, settings, PIP_FIND_LINKS="/wheels /more", PIP_QUIET="1")
    assert done.returncode == 0
    arguments, *variables = done.stdout.splitlines()
    assert arguments == (
        f"pip install --python {sys.executable} --index-strategy unsafe-best-match"
        " --constraint /pinned.txt --no-deps six"
    )
    assert {
        "UV_INDEX_URL=https://user:secret@mirror.test/simple",
        "UV_EXTRA_INDEX_URL=https://one.test/simple file:///two/simple",
        "UV_FIND_LINKS=/wheels,/more", "UV_INSECURE_HOST=one.test", "UV_HTTP_TIMEOUT=7",
        "SSL_CERT_FILE=/etc/ca.pem",
    } <= set(variables)  # fmt: skip


def test_a_setting_of_pip_that_uv_lacks_is_left_to_pip(tmp_path: Path) -> None:
    done = uv_of(tmp_path, "[install]\nno-binary = numpy\n")
    assert done.returncode == 3
    assert "uv has no such setting as pip's no-binary" in done.stderr


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_pip_installs_where_uv_cannot(tmp_path: Path, installer: str) -> None:
    executable(tmp_path / "path/uv", "exit 1")
    calls = tmp_path / "calls"
    venv = tmp_path / "venv"
    executable(venv / "bin/python", f'case "$1" in *uv_install.py) exec "$2" ;; esac; echo "$*" >> {calls}')
    lib = SCRIPTS / "lib"
    done = subprocess.run(
        ["bash", "-euc", f". {lib}/common.sh; . {lib}/install.sh; install_into {venv} --no-deps six"],
        capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PATH": f"{tmp_path}/path:{os.environ['PATH']}", "AGENTRL_INSTALLER": installer},
    )  # fmt: skip
    assert calls.read_text() == "-m pip install --quiet --disable-pip-version-check --no-deps six\n"
    assert ("uv cannot install into" in done.stderr) == (installer == "uv")
