"""What this machine has: GPUs, and the venvs of the engines that pin a torch of their own."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from agentrl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
"""The repository, where there is one: its ``deploy/`` and its venvs."""


def engine_venv(name: str) -> Path:
    """The venv of an engine: for ``vllm`` ``AGENTRL_VLLM_VENV``, or ``.venv-vllm`` of the repository."""
    return Path(os.environ.get(_variable(name)) or ROOT / f".venv-{name}")


def engine_python(name: str) -> str:
    """The interpreter that has the engine: its venv's, or this one. ConfigError where neither has it."""
    python = engine_venv(name) / "bin" / "python"
    if python.is_file():
        return str(python)
    if not os.environ.get(_variable(name)) and importlib.util.find_spec(name) is not None:
        return sys.executable
    raise ConfigError(f"{name} is not installed: there is no {python}", hint=install_hint(name))


def install_hint(name: str) -> str:
    """What to do about an engine that is not installed."""
    return f"bash scripts/setup_{name}.sh, or set {_variable(name)} to a venv that has it"


def has_gpu() -> bool:
    """Whether this machine shows an NVIDIA or AMD GPU."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


def _variable(name: str) -> str:
    return f"AGENTRL_{name.upper()}_VENV"
