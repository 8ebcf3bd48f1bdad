"""Derive the limits of a run that were not given: from the model's context, the memory, and those given."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from agentrl.chat.model_folder import model_context_length
from agentrl.config.load import Configs
from agentrl.config.schema import AgentConfig, ModelConfig, PlacementConfig, SamplingConfig, TrainConfig
from agentrl.errors import ConfigError

LONGEST_OUTPUT = 32768
_TURN = 256
"""Fewest tokens of context that a turn is expected to take."""
_MASK_BYTES = 16
"""Memory of a machine without GPUs for each pair of tokens: a dense float32 mask may take a quarter of it."""


def machine_context() -> int:
    """Return the longest context whose attention mask fits the memory of this machine, without a GPU."""
    return math.isqrt(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _MASK_BYTES)


def fitted_limits(configs: Configs, model: str, longest: int) -> dict[str, int]:
    """Return the limits that were not given, by flag.

    Prompt and output together take ``longest`` tokens, the model's context or a given ``--max_tokens``,
    whichever is least; a given limit of one changes the other. Raises ConfigError if a given limit leaves
    nothing for the other.
    """
    agent, sampling, train = configs[AgentConfig], configs[SamplingConfig], configs[TrainConfig]
    given = configs.given
    own = configs[ModelConfig].max_model_len or model_context_length(model)
    total = min(longest, own or longest, *([train.max_tokens] if "max_tokens" in given else []))
    prompt, output = agent.max_prompt_tokens, sampling.max_new_tokens
    if not {"max_prompt_tokens", "max_new_tokens"} <= given:
        for name, value in (("max_prompt_tokens", prompt), ("max_new_tokens", output)):
            if name in given and value >= total:
                raise ConfigError(
                    f"--{name} is {value}, and prompt and output have {total} tokens together",
                    hint=f"lower it; the model's context is {own or 'unknown'}, and --max_tokens and"
                    " --fit_context limit both",
                )
        if "max_new_tokens" not in given:
            left = total - prompt if "max_prompt_tokens" in given else max(1, total // 4)
            output = min(LONGEST_OUTPUT, left)
        if "max_prompt_tokens" not in given:
            prompt = total - output
    limits = {
        "max_prompt_tokens": prompt,
        "max_new_tokens": output,
        "max_tokens": prompt + output,
        "prompt_reserve_tokens": min(agent.prompt_reserve_tokens, prompt // 8),
    }
    turns = configs[PlacementConfig].fit_turns
    if turns is not None:
        limits["max_turns"] = min(turns, max(1, prompt // _TURN))
    return {name: value for name, value in limits.items() if name not in given}


def as_words(limits: Mapping[str, int]) -> list[str]:
    """Return the limits as flags of a command line."""
    return [word for name, value in limits.items() for word in (f"--{name}", str(value))]
