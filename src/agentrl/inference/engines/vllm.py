"""vLLM: named here, so that choosing it says what to choose instead."""

from __future__ import annotations

from agentrl.config.schema import EngineConfig
from agentrl.errors import ConfigError
from agentrl.inference.engines.process import EngineCommand


def vllm_command(
    model_path: str, config: EngineConfig, *, port: int, model_name: str, version: int
) -> EngineCommand:
    """Always ConfigError: vLLM's HTTP API has no ``/generate`` over token ids that the client speaks."""
    raise ConfigError(
        f"vLLM cannot serve {model_path}: the engine client speaks SGLang's HTTP API",
        cure="use --engine sglang, or --engine local on a machine without it",
    )
