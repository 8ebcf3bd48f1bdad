"""Run a Hugging Face causal LM over a TokenForest: the same hidden states whatever the executor.

Executors, each for any forest: ``varlen`` (segment by segment, without padding) and ``sdpa`` (a dense mask).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from agentrl.batching.forest import TokenForest
from agentrl.errors import ConfigError
from agentrl.train.attention.limits import check_forest_limits
from agentrl.train.attention.sdpa import run_sdpa
from agentrl.train.attention.varlen import run_varlen

EXECUTORS: dict[str, Callable[[Any, TokenForest], Tensor]] = {"sdpa": run_sdpa, "varlen": run_varlen}


DENSE_TOKENS = 4096
"""Up to this many tokens an accelerator runs a branching forest under one dense mask."""


def choose_executor(model: Any, forest: TokenForest) -> str:
    """``varlen``; on an accelerator, slow at many small calls, ``sdpa`` for small branching forests."""
    small_tree = not forest.is_chains and forest.tokens <= DENSE_TOKENS
    return "sdpa" if small_tree and model.device.type != "cpu" else "varlen"


def run_forest(model: nn.Module, forest: TokenForest, executor: str = "auto") -> Tensor:
    """The last hidden states [N, H] of ``forest``, before the output head, with gradient.

    Each token sees its ancestors and itself, at positions that count from its root. Runs on the model's
    device, under the caller's autocast. The model keeps the attention implementation that the executor sets,
    because recomputed activations need it in the backward.

    Raises ConfigError for an unknown executor, ModelError for a model that would not be exact on this forest.
    """
    name = choose_executor(model, forest) if executor == "auto" else executor
    if name not in EXECUTORS:
        raise ConfigError(f"attention executor {name!r}", cure=f"use auto, {' or '.join(EXECUTORS)}")
    check_forest_limits(model, forest)
    return EXECUTORS[name](model, forest)
