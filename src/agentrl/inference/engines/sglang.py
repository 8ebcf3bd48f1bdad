"""How SGLang's own server is started: on GPUs as it is, on a CPU by the launcher under deploy/sglang."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from pathlib import Path

from agentrl.config.schema import EngineConfig
from agentrl.errors import ConfigError
from agentrl.inference.engines.process import EngineCommand

_ROOT = Path(__file__).resolve().parents[4]
_CPU_LAUNCHER = _ROOT / "deploy" / "sglang" / "launch_cpu.py"


def sglang_python() -> Path:
    """The interpreter that has SGLang: of ``AGENTRL_SGLANG_VENV``, of ``.venv-sglang``, or this one.

    ConfigError where none of them has SGLang.
    """
    folder = os.environ.get("AGENTRL_SGLANG_VENV")
    python = Path(folder or _ROOT / ".venv-sglang") / "bin" / "python"
    if python.is_file():
        return python
    if not folder and importlib.util.find_spec("sglang") is not None:
        return Path(sys.executable)
    raise ConfigError(
        f"SGLang is not installed: there is no {python}",
        cure="bash scripts/setup_sglang.sh, or set AGENTRL_SGLANG_VENV to a venv that has it",
    )


def has_gpu() -> bool:
    """Whether this machine shows an NVIDIA or AMD GPU."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


def sglang_command(
    model_path: str, config: EngineConfig, *, port: int, model_name: str, version: int
) -> EngineCommand:
    """The server for ``model_path`` on ``config.host:port``, its weights named ``version``."""
    common = [
        *("--model-path", model_path, "--served-model-name", model_name),
        *("--host", config.host, "--port", str(port)),
        *("--weight-version", str(version)),
        *("--max-running-requests", str(config.max_running_requests)),
        *("--mem-fraction-static", str(config.inf_mem_ratio)),
        *("--log-level", "warning"),
    ]
    python = str(sglang_python())
    further = shlex.split(config.engine_args)
    if has_gpu():
        argv = [python, "-m", "sglang.launch_server", *common, "--tp-size", str(config.inf_tp_size)]
        return EngineCommand([*argv, *further], {"HF_HUB_OFFLINE": "1"})
    return _cpu_command(python, [*common, *further], config)


def _cpu_command(python: str, arguments: list[str], config: EngineConfig) -> EngineCommand:
    if config.inf_tp_size != 1:
        raise ConfigError(
            f"--inf_tp_size {config.inf_tp_size} needs GPUs, and there are none here", cure="set it to 1"
        )
    if not _CPU_LAUNCHER.is_file():
        raise ConfigError(
            f"SGLang's launcher for CPUs is missing: {_CPU_LAUNCHER}",
            cure="run from a clone of the repository",
        )
    cpu = [
        *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
        *("--max-total-tokens", str(config.max_total_tokens)),
    ]
    env = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "HF_HUB_OFFLINE": "1",
    }
    return EngineCommand([python, str(_CPU_LAUNCHER), *cpu, *arguments], env)
