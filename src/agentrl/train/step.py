"""One optimizer step's forward and backward over its micro-batches; the optimizer itself is elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.batching.forest import TokenForest, forest_from_sequences
from agentrl.errors import ConfigError, ForestError
from agentrl.losses.batch import TokenBatch
from agentrl.losses.metrics import TokenMetrics
from agentrl.losses.old_policy import old_logprobs
from agentrl.losses.reduce import Denominators, reduce_losses
from agentrl.losses.registry import get_loss, token_losses
from agentrl.losses.settings import LossSettings
from agentrl.train.attention import run_forest
from agentrl.train.attention.implementation import use_attention
from agentrl.train.logprobs import DEFAULT_CHUNK, check_output_head, output_head, token_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOptions:
    """How the model is run; none of it changes a loss beyond rounding."""

    executor: str = "auto"
    temperature: float = 1.0
    """Of sampling: logprobs are those of logits/temperature, as engines report them."""
    chunk_size: int = DEFAULT_CHUNK
    """Tokens per chunk of the projection onto the vocabulary."""
    autocast_dtype: torch.dtype | None = None
    """Matrix products in this dtype; the logits stay float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How one process of several computes its share of a step."""

    logprobs: Callable[[TokenForest, ForwardOptions], tuple[Tensor, Tensor]]
    """``forest_logprobs`` of the model that the processes hold together."""
    join: Callable[[float, TokenMetrics], tuple[float, TokenMetrics]]
    """Sums the loss and the metrics of all processes."""


def forest_logprobs(
    model: Any, forest: TokenForest, options: ForwardOptions | None = None
) -> tuple[Tensor, Tensor]:
    """Logprob (float32[T], with gradient) and entropy (float32[T]) of each trainable token of ``forest``."""
    options = options or ForwardOptions()
    device = model.device
    enabled = options.autocast_dtype is not None
    with torch.autocast(device.type, dtype=options.autocast_dtype, enabled=enabled):
        hidden = run_forest(model, forest, options.executor)
    return token_logprobs(
        hidden,
        output_head(model),
        torch.from_numpy(forest.parent[forest.target]).to(device),
        torch.from_numpy(forest.input_ids[forest.target]).to(device),
        temperature=options.temperature,
        chunk_size=options.chunk_size,
    )


def count_step(forests: Sequence[TokenForest]) -> Denominators:
    """The denominators of a step; over several ranks, their sum."""
    total = Denominators(0, 0)
    for forest in forests:
        row = torch.from_numpy(forest.row)
        total = total + Denominators.of(torch.ones_like(row, dtype=torch.bool), row)
    return total


def forward_backward(
    model: Any,
    forests: Sequence[TokenForest],
    settings: LossSettings,
    *,
    current_version: int,
    options: ForwardOptions | None = None,
    denominators: Denominators | None = None,
    ranks: Ranks | None = None,
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> dict[str, Any]:
    """Add the gradients of one step's loss to ``model``, a micro-batch at a time, and report the step.

    The loss and the gradients are those of all ``forests`` in one batch, however they are split.
    ``current_version`` is the policy version that the step starts from. ``denominators`` are those of the
    whole step where ``forests`` are one rank's share, and with ``ranks`` every forest is run, trainable or
    not, since other processes wait for it. ``backward`` is called with each micro-batch's share of the loss.

    Returns ``loss``, ``tokens``, ``trainable_tokens``, ``trajectories`` and everything in
    ``TokenMetrics.report``. Raises ForestError where no token of the step is trainable, ConfigError for a
    loss or correction that does not exist, ModelError for a model that is not exact on the forests.
    """
    whole = denominators or count_step(forests)
    if whole.tokens == 0:
        raise ForestError("a step without a trainable token", cure="leave out data without trainable spans")
    loss, metrics = 0.0, TokenMetrics()
    for forest in forests:
        if forest.trainable_tokens == 0 and ranks is None:
            continue
        if ranks is None:
            logprobs, entropy = forest_logprobs(model, forest, options)
        else:
            logprobs, entropy = ranks.logprobs(forest, options or ForwardOptions())
        batch = token_batch(forest, logprobs, settings, current_version)
        result = token_losses(batch, settings)
        share = reduce_losses(result.losses, batch.mask, batch.row, batch.trajectories, whole, settings)
        backward(share)
        loss += float(share.detach())
        metrics = metrics + TokenMetrics.of(batch, result, entropy)
    if ranks is not None:
        loss, metrics = ranks.join(loss, metrics)
    return {
        "loss": loss,
        "tokens": sum(forest.tokens for forest in forests),
        "trainable_tokens": sum(forest.trainable_tokens for forest in forests),
        "trajectories": sum(forest.trajectories for forest in forests),
        **metrics.report(),
    }


def token_batch(
    forest: TokenForest, logprobs: Tensor, settings: LossSettings, current_version: int
) -> TokenBatch:
    """A forest's trainable tokens as losses take them. Supervised data have no behavior policy: μ = πθ."""
    row, version, advantages, behavior = (
        torch.from_numpy(array).to(logprobs.device)
        for array in (forest.row, forest.version, forest.advantage, forest.behavior_logprob)
    )
    if not get_loss(settings.loss_calculater).from_policy:
        behavior = logprobs.detach()
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=old_logprobs(settings.old_logprobs, logprobs, behavior, version, current_version),
        behavior_logprobs=behavior,
        advantages=advantages,
        row=row,
        version=version,
        mask=torch.ones_like(row, dtype=torch.bool),
        current_version=current_version,
        trajectories=forest.trajectories,
    )


def enable_checkpointing(model: Any) -> None:
    """Recompute activations in the backward instead of keeping them; ConfigError where a model cannot."""
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"{type(model).__name__} cannot recompute its activations",
            cure="leave out --gradient_checkpointing",
        )
    model.activation_checkpointing_enable({"use_reentrant": False})


@torch.no_grad()
def check_model(model: Any) -> None:
    """Refuse, before training, a model that executors or ``output_head`` do not reproduce; ModelError.

    Runs the model as it is and through each executor on a few tokens.
    """
    ids = list(range(min(8, model.config.get_text_config().vocab_size)))
    forest = forest_from_sequences([ids], [[False] * len(ids)])
    use_attention(model, "sdpa")
    logits = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]
    for executor in ("sdpa", "varlen"):
        check_output_head(model, run_forest(model, forest, executor), logits)
