"""The local engine's sampling: rows of logits → token ids and their logprobs, all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from agentrl.inference.sampling import SamplingParams

_CANDIDATES = 1024


@dataclass(slots=True)
class RowSampler:
    """How one request is sampled: its parameters, its random numbers, its penalised tokens."""

    params: SamplingParams
    rng: np.random.Generator
    counts: dict[int, int] = field(default_factory=dict)
    """How often each token was generated; kept only where a penalty needs it."""

    @property
    def greedy(self) -> bool:
        """Temperature 0: the most likely token."""
        return self.params.temperature == 0.0

    @property
    def truncated(self) -> bool:
        """Whether ``top_k``, ``top_p`` or ``min_p`` leaves tokens out."""
        params = self.params
        return not self.greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)

    @property
    def penalised(self) -> bool:
        """Whether tokens already generated are made less likely."""
        params = self.params
        return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)

    def record(self, token: int) -> None:
        """Count a generated token."""
        if self.penalised:
            self.counts[token] = self.counts.get(token, 0) + 1


def sample(logits: Tensor, samplers: Sequence[RowSampler]) -> tuple[list[int], list[float]]:
    """Token ids and logprobs for float32 logits [n, vocab], which are overwritten.

    The logprobs are of penalised logits divided by the temperature (1 where greedy), not renormalised over
    the tokens that ``top_k``, ``top_p`` and ``min_p`` leave. Tokens are drawn by inverting the cumulative
    distribution in float64 at one uniform number a row, so that a row depends on its own seed alone.
    """
    for row, sampler in enumerate(samplers):
        if sampler.penalised and sampler.counts:
            _penalise(logits[row], sampler)
    temperatures = torch.tensor([s.params.temperature or 1.0 for s in samplers], device=logits.device)
    logits.div_(temperatures[:, None])
    normaliser = logits.logsumexp(dim=-1)
    tokens = logits.argmax(dim=-1)
    plain = [row for row, s in enumerate(samplers) if not s.greedy and not s.truncated]
    cut = [row for row, s in enumerate(samplers) if s.truncated]
    if plain:
        probs = (_rows(logits, plain) - normaliser[plain, None]).exp_()
        tokens[plain] = _draw(probs, [samplers[row] for row in plain])
    if cut:
        probs = (_rows(logits, cut) - normaliser[cut, None]).exp_()
        tokens[cut] = _draw_truncated(probs, [samplers[row] for row in cut])
    logprobs = logits.gather(-1, tokens[:, None])[:, 0] - normaliser
    return tokens.tolist(), logprobs.tolist()


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _penalise(row: Tensor, sampler: RowSampler) -> None:
    """Apply the three penalties, as SGLang defines them over generated tokens, to logits [vocab] in place."""
    params = sampler.params
    ids = torch.tensor(list(sampler.counts), device=row.device)
    counts = torch.tensor(list(sampler.counts.values()), device=row.device, dtype=row.dtype)
    values = row[ids] - params.presence_penalty - params.frequency_penalty * counts
    factor = params.repetition_penalty
    row[ids] = torch.where(values < 0, values * factor, values / factor)


def _draw(probs: Tensor, samplers: Sequence[RowSampler]) -> Tensor:
    """One index a row in proportion to ``probs`` [n, m]; a probability of 0 is never drawn."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    uniform = torch.tensor(
        [[sampler.rng.random()] for sampler in samplers], dtype=torch.float64, device=probs.device
    )
    total = cumulative[:, -1:].contiguous()
    found = torch.searchsorted(cumulative, uniform * total, right=True)
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(found, last)[:, 0]


def _draw_truncated(probs: Tensor, samplers: Sequence[RowSampler]) -> Tensor:
    """As ``_draw`` over what ``top_k``, then ``top_p``, then ``min_p`` leave of ``probs`` [n, vocab]."""
    vocab = probs.shape[-1]
    device = probs.device
    top_k = torch.tensor([s.params.top_k if s.params.top_k > 0 else vocab for s in samplers], device=device)
    top_p = torch.tensor([s.params.top_p for s in samplers], device=device)
    min_p = torch.tensor([s.params.min_p for s in samplers], device=device)
    width = min(vocab, _CANDIDATES)
    values, indices = probs.topk(width, dim=-1)
    enough = (
        (values.sum(-1) >= top_p) & (top_p < 1.0) | (top_k <= width) | (values[:, -1] < min_p * values[:, 0])
    )
    if width < vocab and not bool(enough.all()):
        values, indices = probs.sort(dim=-1, descending=True)
    before = values.cumsum(-1) - values
    rank = torch.arange(values.shape[-1], device=device)
    keep = (rank < top_k[:, None]) & (before <= top_p[:, None]) & (values >= min_p[:, None] * values[:, :1])
    choice = _draw(values.where(keep, 0.0), samplers)
    return indices.gather(-1, choice[:, None])[:, 0]
