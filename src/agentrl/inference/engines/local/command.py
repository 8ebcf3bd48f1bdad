"""How the local engine's server is started."""

from __future__ import annotations

import os
import sys

from agentrl.config.schema import EngineConfig
from agentrl.inference.engines.process import EngineCommand


def local_command(
    model_path: str, config: EngineConfig, *, port: int, dtype: str, instance: str
) -> EngineCommand:
    """The server for ``model_path`` on ``config.host:port``."""
    argv = [
        *(sys.executable, "-m", "agentrl.inference.engines.local"),
        *("--model_path", model_path, "--host", config.host, "--port", str(port)),
        *("--dtype", dtype, "--instance", instance),
        *("--max_running_requests", str(config.max_running_requests)),
        *("--max_total_tokens", str(config.max_total_tokens)),
    ]
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    env = {"OMP_NUM_THREADS": threads, "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1"}
    return EngineCommand(argv, env, instance)
