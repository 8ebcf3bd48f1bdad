"""Token batches, and what a loss makes of them."""

from __future__ import annotations

import torch

from agentrl.losses.compute import Denominators, TokenMetrics, measure, reduce_losses, token_losses
from agentrl.losses.loss import TokenBatch, TokenLosses
from agentrl.losses.settings import LossSettings


def random_batch(
    seed: int, tokens: int = 24, trajectories: int = 4, *, requires_grad: bool = True, spread: float = 0.4
) -> TokenBatch:
    """Tokens of several trajectories, ratios on both sides of every bound."""
    generator = torch.Generator().manual_seed(seed)

    def noise() -> torch.Tensor:
        return spread * torch.randn(tokens, generator=generator)

    behavior = -2 * torch.rand(tokens, generator=generator) - 0.1
    old = behavior + noise()
    row = torch.randint(0, trajectories, (tokens,), generator=generator).sort().values
    row[:trajectories] = torch.arange(trajectories)
    return TokenBatch(
        logprobs=(old + noise()).requires_grad_(requires_grad), old_logprobs=old, behavior_logprobs=behavior,
        advantages=torch.randn(tokens, generator=generator), row=row,
        version=torch.zeros(tokens, dtype=torch.int64),
        age=3 - torch.randint(0, 4, (tokens,), generator=generator),
        mask=torch.ones(tokens, dtype=torch.bool), trajectories=trajectories,
        columns={"teacher": behavior + noise()},
    )  # fmt: skip


Floats = tuple[float, ...]
Numbers = tuple[int, ...]


def three_tokens(
    logprobs: Floats, advantages: Floats, *, old: Floats | None = None, behavior: Floats | None = None,
    version: Numbers | None = None, age: Numbers | None = None,
) -> TokenBatch:  # fmt: skip
    """One trajectory, token by token; π_old and μ are 0 where not given, so that r = exp(logprob)."""
    count = len(logprobs)
    sampled = behavior or old or (0.0,) * count
    return TokenBatch(
        logprobs=torch.tensor(logprobs, requires_grad=True), old_logprobs=torch.tensor(old or (0.0,) * count),
        behavior_logprobs=torch.tensor(sampled), advantages=torch.tensor(advantages),
        row=torch.zeros(count, dtype=torch.int64), version=torch.tensor(version or (0,) * count),
        age=torch.tensor(age or (0,) * count), mask=torch.ones(count, dtype=torch.bool), trajectories=1,
        columns={"teacher": torch.tensor(sampled)},
    )  # fmt: skip


def step_loss(batch: TokenBatch, settings: LossSettings) -> tuple[torch.Tensor, TokenLosses]:
    """Return the loss of a step of one batch, with gradient, and the losses of its tokens."""
    result = token_losses(batch, settings)
    whole = Denominators(int(batch.mask.sum()), len(batch.row[batch.mask].unique()))
    return reduce_losses(result.losses, batch.mask, batch.row, batch.trajectories, whole, settings), result


def token_gradient(batch: TokenBatch, settings: LossSettings) -> torch.Tensor:
    """Return the derivative of each token's loss by its logprob."""
    (gradient,) = torch.autograd.grad(token_losses(batch, settings).losses.sum(), batch.logprobs)
    return gradient


def token_metrics(batch: TokenBatch, result: TokenLosses, entropy: torch.Tensor) -> TokenMetrics:
    """Return the metrics of a batch, as a step reads them at its end."""
    ages, versions = batch.age[batch.mask].numpy(), batch.version[batch.mask].numpy()
    return TokenMetrics.of(0.0, measure(batch, result, entropy).tolist(), ages, versions)
