"""How SGLang's own server is started: on GPUs as it is, on a CPU by the launcher under deploy/sglang."""

from __future__ import annotations

import os
import shlex

from agentrl.config.schema import EngineConfig
from agentrl.errors import ConfigError
from agentrl.inference.engines.process import EngineCommand
from agentrl.machine import ROOT, engine_python, has_gpu

_CPU_LAUNCHER = ROOT / "deploy" / "sglang" / "launch_cpu.py"
_ENV = {"HF_HUB_OFFLINE": "1", "SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
"""``SGLANG_RETURN_ORIGINAL_LOGPROB`` 0: logprobs are of logits / temperature."""


def sglang_command(
    model_path: str, config: EngineConfig, *, port: int, model_name: str, instance: str
) -> EngineCommand:
    """The server for ``model_path`` on ``config.host:port``.

    SGLang repeats the model's name in ``/server_info``, so the name ends with the instance.
    """
    common = [
        *("--model-path", model_path),
        *("--host", config.host, "--port", str(port)),
        *("--max-running-requests", str(config.max_running_requests)),
        *("--mem-fraction-static", str(config.inf_mem_ratio)),
        *("--log-level", "warning"),
    ]
    python = engine_python("sglang")
    further = [*shlex.split(config.engine_args), "--served-model-name", f"{model_name}@{instance}"]
    if has_gpu():
        argv = [python, "-m", "sglang.launch_server", *common, "--tp-size", str(config.inf_tp_size)]
        return EngineCommand([*argv, *further], dict(_ENV), instance)
    return _cpu_command(python, [*common, *further], config, instance)


def _cpu_command(python: str, arguments: list[str], config: EngineConfig, instance: str) -> EngineCommand:
    if not _CPU_LAUNCHER.is_file():
        raise ConfigError(
            f"SGLang's launcher for CPUs is missing: {_CPU_LAUNCHER}",
            hint="run from a clone of the repository",
        )
    cpu = [
        *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
        *("--max-total-tokens", str(config.max_total_tokens)),
    ]
    env = {
        **_ENV,
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TORCHDYNAMO_DISABLE": "1",
    }
    return EngineCommand([python, str(_CPU_LAUNCHER), *cpu, *arguments], env, instance)
