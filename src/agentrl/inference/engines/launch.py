"""One engine by its name: the command that starts its server, and the client that speaks to it."""

from __future__ import annotations

import secrets

from agentrl.config.schema import EngineConfig, ModelConfig
from agentrl.errors import ConfigError
from agentrl.inference.client import EngineClient
from agentrl.inference.engines.local.command import local_command
from agentrl.inference.engines.process import EngineCommand
from agentrl.inference.engines.sglang import sglang_command
from agentrl.inference.engines.vllm import vllm_command
from agentrl.inference.engines.vllm_client import VllmClient
from agentrl.machine import has_gpu

ENGINES = ("local", "sglang", "vllm")


def engine_command(folder: str, model: ModelConfig, config: EngineConfig, port: int) -> EngineCommand:
    """The server of ``config.engine`` for the model in ``folder``; ConfigError where it cannot run here.

    Each call gives the server another random instance name.
    """
    instance = secrets.token_hex(8)
    if config.engine == "local":
        return local_command(folder, config, port=port, dtype=model.dtype, instance=instance)
    if config.inf_tp_size != 1 and not has_gpu():
        raise ConfigError(
            f"--inf_tp_size {config.inf_tp_size} needs GPUs, and there are none here", hint="set it to 1"
        )
    command = sglang_command if config.engine == "sglang" else vllm_command
    return command(folder, config, port=port, model_name=model.model_name, instance=instance)


def engine_client(
    engine: str,
    url: str,
    timeout: float = 600.0,
    *,
    vocab_size: int | None = None,
    instance: str | None = None,
) -> EngineClient:
    """The client of an engine of that name; arguments as of EngineClient."""
    kind = VllmClient if engine == "vllm" else EngineClient
    return kind(url, timeout, vocab_size=vocab_size, instance=instance)
