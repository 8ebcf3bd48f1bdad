"""How vLLM's own server is started, on GPUs and on a CPU."""

from __future__ import annotations

import os
import shlex

from agentrl.config.schema import EngineConfig
from agentrl.inference.engines.process import EngineCommand
from agentrl.machine import engine_python, has_gpu

_CPU_BLOCK = 32
"""Tokens of a KV-cache page on a CPU; only whole pages are found again."""


def vllm_command(
    model_path: str, config: EngineConfig, *, port: int, model_name: str, instance: str
) -> EngineCommand:
    """The server for ``model_path`` on ``config.host:port``; its second name ends with the instance.

    Pausing and loading weights belong to vLLM's development mode, whose ``/collective_rpc`` calls any method
    of a worker: let only trusted machines reach the port.
    """
    argv = [
        *(engine_python("vllm"), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model_path),
        *("--host", config.host, "--port", str(port)),
        *("--max-num-seqs", str(config.max_running_requests)),
        *("--logprobs-mode", "processed_logprobs"),
        *("--enable-scale-out", "--enable-prompt-tokens-details"),
        "--disable-uvicorn-access-log",
    ]
    env = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if has_gpu():
        argv += ["--tensor-parallel-size", str(config.inf_tp_size)]
        argv += ["--gpu-memory-utilization", str(config.inf_mem_ratio)]
    else:
        argv += ["--dtype", "float32", "--enforce-eager", "--block-size", str(_CPU_BLOCK)]
        argv += ["--num-gpu-blocks-override", str(config.max_total_tokens // _CPU_BLOCK)]
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
    argv += [*shlex.split(config.engine_args), "--served-model-name", model_name, f"{model_name}@{instance}"]
    return EngineCommand(argv, env, instance)
