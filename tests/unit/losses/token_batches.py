"""Random token batches for the loss tests."""

from __future__ import annotations

import torch

from agentrl.losses.loss import TokenBatch, TokenLosses
from agentrl.losses.token_metrics import TokenMetrics, measure


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
        logprobs=(old + noise()).requires_grad_(requires_grad),
        old_logprobs=old,
        behavior_logprobs=behavior,
        advantages=torch.randn(tokens, generator=generator),
        row=row,
        version=torch.zeros(tokens, dtype=torch.int64),
        age=3 - torch.randint(0, 4, (tokens,), generator=generator),
        mask=torch.ones(tokens, dtype=torch.bool),
        trajectories=trajectories,
        columns={"teacher": behavior + noise()},
    )


def three_tokens(
    logprobs: tuple[float, ...],
    advantages: tuple[float, ...],
    *,
    old: tuple[float, ...] | None = None,
    behavior: tuple[float, ...] | None = None,
    version: tuple[int, ...] | None = None,
    age: tuple[int, ...] | None = None,
) -> TokenBatch:
    """One trajectory, token by token; π_old and μ are 0 where not given, so that r = exp(logprob)."""
    count = len(logprobs)
    zeros = (0.0,) * count
    return TokenBatch(
        logprobs=torch.tensor(logprobs, requires_grad=True),
        old_logprobs=torch.tensor(old or zeros),
        behavior_logprobs=torch.tensor(behavior or old or zeros),
        advantages=torch.tensor(advantages),
        row=torch.zeros(count, dtype=torch.int64),
        version=torch.tensor(version or (0,) * count),
        age=torch.tensor(age or (0,) * count),
        mask=torch.ones(count, dtype=torch.bool),
        trajectories=1,
        columns={"teacher": torch.tensor(behavior or old or zeros)},
    )


def token_metrics(batch: TokenBatch, result: TokenLosses, entropy: torch.Tensor) -> TokenMetrics:
    """Return the metrics of a batch, as a step reads them at its end."""
    ages, versions = batch.age[batch.mask].numpy(), batch.version[batch.mask].numpy()
    return TokenMetrics.of(0.0, measure(batch, result, entropy).tolist(), ages, versions)
