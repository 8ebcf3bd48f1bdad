"""Shaping of rewards within a group: what advantages are computed from, beside the stored scores."""

from __future__ import annotations

from agentrl.config.schema import GroupConfig


def overlong_penalty(generated_tokens: int, config: GroupConfig) -> float:
    """What is taken from a trajectory's reward for its length, from 0 to ``overlong_penalty``.

    Nothing up to ``overlong_limit`` − ``overlong_buffer`` generated tokens (all turns together), then in
    proportion to the part of the buffer that is used up, and the whole of it from ``overlong_limit`` on
    (soft overlong punishment, DAPO, arXiv 2503.14476, equation 13).
    """
    if config.overlong_buffer == 0:
        return 0.0
    used = generated_tokens - (config.overlong_limit - config.overlong_buffer)
    return config.overlong_penalty * min(1.0, max(0.0, used / config.overlong_buffer))
