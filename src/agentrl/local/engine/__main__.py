"""Run the local engine's server.

    python -m agentrl.local.engine --model_path DIR --port 30000

The server batches continuously, reuses the KV cache of common prefixes, and has SGLang's HTTP API. A reward
model's folder is served at ``/classify``.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import AgentRLError, ConfigError


def run_local_server(
    model_path: str,
    *,
    host: str = "127.0.0.1",
    port: int = 30000,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str = "none",
    weight_version: str = "default",
    max_running_requests: int = 32,
    max_total_tokens: int = 65536,
    chunk_tokens: int = 256,
    max_model_len: int | None = None,
    max_adapters: int = 16,
    instance: str | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT.

    ``device`` is a torch device; auto: the first GPU that this process sees, or else the CPU.
    ``quantization`` fp8 rounds the weights to it, and computes in their dtype.
    ``max_total_tokens`` is the size of the KV cache; it, ``max_model_len`` and the model limit the context.
    ``chunk_tokens`` limits the prompt tokens of one forward pass: a larger value is faster, a smaller one
    delays running requests less.
    A reward model has no KV cache: ``max_total_tokens`` and ``max_running_requests`` limit a forward pass.
    Raises ModelError if the model cannot be served, and ConfigError for an unknown ``dtype``.
    """
    import torch

    from agentrl.chat.model_folder import read_chat_files
    from agentrl.local.engine.model import LocalModel
    from agentrl.local.engine.rewards import RewardServer
    from agentrl.local.engine.scheduler import Scheduler
    from agentrl.local.engine.server import EngineWorker, LocalEngineServer
    from agentrl.model.reward_head import is_reward_model

    kinds = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in kinds:
        raise ConfigError(f"unknown --dtype {dtype!r}", hint=f"choose one of {', '.join(kinds)}")

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"

    if is_reward_model(Path(model_path)):
        if quantization != "none":
            raise ConfigError(f"--quantization {quantization}: a reward model is served as it is stored")
        rewards = RewardServer(
            model_path, dtype=kinds[dtype], device=torch.device(device), max_requests=max_running_requests,
            max_tokens=max_total_tokens, max_model_len=max_model_len, instance=instance,
            version=weight_version,
        )  # fmt: skip
        _serve(rewards.app(), host, port)
        return
    model = LocalModel(model_path, dtype=kinds[dtype], device=torch.device(device), fp8=quantization == "fp8")
    try:
        cache = model.new_cache(max_total_tokens)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ConfigError(
            f"a KV cache of --max_total_tokens {max_total_tokens} does not fit into memory: {error}",
            hint="lower --max_total_tokens, or serve a smaller model",
        ) from error
    scheduler = Scheduler(
        model, cache, version=weight_version, max_running=max_running_requests, chunk_tokens=chunk_tokens,
        max_adapters=max_adapters,
    )  # fmt: skip
    context_length = min(max_model_len or model.max_position, model.max_position, max_total_tokens)
    tokenizer = functools.cache(lambda: read_chat_files(model_path).tokenizer)
    server = LocalEngineServer(EngineWorker(scheduler), model, context_length, instance, tokenizer)
    _serve(server.app(), host, port)


def _serve(app: Any, host: str, port: int) -> None:
    import uvicorn

    from agentrl.base.bounded_http import BoundedProtocol, for_own_hosts

    uvicorn.run(
        for_own_hosts(app, host), host=host, port=port, log_level="warning", access_log=False,
        http=BoundedProtocol, timeout_graceful_shutdown=3,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(
        prog="python -m agentrl.local.engine", argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--model_path", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument(
        "--dtype",
        help="dtype of the weights: float32, bfloat16, float16, or auto, which the folder names; a CPU"
        " multiplies all but a float32 that is given here in its faster dtype",
    )
    parser.add_argument(
        "--device", help="auto (a GPU if there is one), cpu, or a torch device such as cuda:0"
    )
    parser.add_argument(
        "--quantization", choices=("none", "fp8"), help="fp8: round weights as GPU engines do"
    )
    parser.add_argument("--weight_version", help="name of the initial weights")
    parser.add_argument("--max_running_requests", type=int, help="most sequences in a batch")
    parser.add_argument("--max_total_tokens", type=int, help="size of the KV cache in tokens")
    parser.add_argument("--chunk_tokens", type=int, help="most prompt tokens in a forward pass")
    parser.add_argument("--max_model_len", type=int, help="longest context (default: the model's own)")
    parser.add_argument("--max_adapters", type=int, help="most LoRA adapters that are loaded at a time")
    parser.add_argument("--instance", help="name in /server_info that identifies this process")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s  %(message)s")
    try:
        run_local_server(**vars(arguments))
    except AgentRLError as error:
        print(f"local engine: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
