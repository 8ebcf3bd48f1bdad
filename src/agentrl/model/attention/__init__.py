"""Run a Hugging Face causal LM over a TokenForest: the same hidden states whatever the executor.

Executors, each for any forest: ``sdpa`` (one dense mask), ``varlen`` (segment by segment, without padding),
``flex`` (FlexAttention under a block mask; GPU), ``paths`` and ``padded`` (each path alone; any causal
model).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn

from agentrl.data.forest import TokenForest
from agentrl.errors import ConfigError, ModelError
from agentrl.model.attention.compatibility import check_limits, unmaskable
from agentrl.model.attention.flex import MIN_HEAD_DIM, run_flex
from agentrl.model.attention.per_sequence import run_padded, run_paths
from agentrl.model.attention.sdpa import run_sdpa
from agentrl.model.attention.varlen import run_varlen

logger = logging.getLogger(__name__)

EXECUTORS: dict[str, Callable[[Any, TokenForest], Tensor]] = {
    "sdpa": run_sdpa,
    "varlen": run_varlen,
    "flex": run_flex,
    "paths": run_paths,
    "padded": run_padded,
}

DENSE_TOKENS = 512
"""Up to this many tokens a CPU runs a branching forest under one dense mask: fewer, larger calls."""


def choose_executor(model: Any, forest: TokenForest) -> str:
    """``flex`` on a GPU; elsewhere ``varlen``, and ``sdpa`` for small branching forests.

    A model that no mask makes exact runs each path alone, and a warning says so once.
    """
    reason = unmaskable(model, forest)
    if reason is not None:
        _tell(f"{type(model).__name__} has {reason}: each sequence runs alone, and no prefix is shared")
        return "paths"
    if has_flex(model):
        return "flex"
    return "varlen" if forest.is_chains or forest.tokens > DENSE_TOKENS else "sdpa"


def has_flex(model: Any) -> bool:
    """True where FlexAttention has a kernel for the model, backward included: on CUDA."""
    if model.device.type != "cuda":
        return False
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return bool(width >= MIN_HEAD_DIM)


def usable_executors(model: Any, forest: TokenForest) -> list[str]:
    """The executors that may run forests such as ``forest``, alone or among several processes."""
    if unmaskable(model, forest) is not None:
        return ["paths", "padded"]
    return ["flex"] if has_flex(model) else ["sdpa", "varlen"]


def run_forest(model: nn.Module, forest: TokenForest, executor: str = "auto") -> Tensor:
    """The last hidden states [N, H] of ``forest``, before the output head, with gradient.

    Each token sees its ancestors and itself, at positions that count from its root. Runs on the model's
    device, under the caller's autocast. The model keeps the attention implementation that the executor sets,
    because recomputed activations need it in the backward.

    Raises ConfigError for an unknown executor, ModelError for a model that would not be exact on this forest.
    """
    check_limits(model)
    name = choose_executor(model, forest) if executor == "auto" else executor
    if name not in EXECUTORS:
        raise ConfigError(f"attention executor {name!r}", hint=f"use auto, {' or '.join(EXECUTORS)}")
    reason = None if name in ("paths", "padded") else unmaskable(model, forest)
    if reason is not None:
        raise ModelError(
            f"{type(model).__name__} has {reason}: {name!r} would not be exact",
            hint="use executor 'auto' or 'paths', which run each sequence alone",
        )
    return EXECUTORS[name](model, forest)


@cache
def _tell(message: str) -> None:
    logger.warning("%s", message)
