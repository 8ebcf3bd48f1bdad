"""Where log π_old comes from: the behavior policy, the step's start, or a line between them."""

from __future__ import annotations

from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.losses.settings import OLD_LOGPROBS


def old_logprobs(method: str, logprobs: Tensor, behavior_logprobs: Tensor, age: Tensor) -> Tensor:
    """log π_old, float32[T], detached, by ``--old_logprobs``.

    ``logprobs`` are the trainer's own at the start of the step: where a step is one optimizer update over all
    its micro-batches, those of the update itself. ``behavior``: log μ. ``recompute``: them. ``loglinear``:
    log μ + α·(log πθ − log μ) with α = a/(a + 1) for a token of ``age`` a, int64[T] in optimizer steps (the
    interpolation of AReaL, arXiv 2505.24298, and A-3PO, arXiv 2512.06547).
    """
    current, behavior = logprobs.detach().float(), behavior_logprobs.float()
    if method == "behavior":
        return behavior
    if method == "recompute":
        return current
    if method == "loglinear":
        steps = age.to(behavior.dtype)
        return behavior + steps / (steps + 1) * (current - behavior)
    raise ConfigError(f"--old_logprobs is {method!r}", hint=f"use one of {', '.join(OLD_LOGPROBS)}")
