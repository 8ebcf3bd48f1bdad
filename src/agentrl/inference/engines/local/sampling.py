"""The local engine's sampling: rows of logits → token ids and their logprobs, all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.documents.sampling import SamplingParams

_BLOCK = 256
_WIDTHS = (64, 1024)


@dataclass(slots=True)
class RowSampler:
    """How one request is sampled: its parameters, its random numbers, its penalized tokens."""

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
    def penalized(self) -> bool:
        """Whether tokens already generated are made less likely."""
        params = self.params
        return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)

    def record(self, token: int) -> None:
        """Count a generated token."""
        if self.penalized:
            self.counts[token] = self.counts.get(token, 0) + 1


def sample(logits: Tensor, samplers: Sequence[RowSampler]) -> tuple[list[int], list[float]]:
    """Token ids and logprobs for float32 logits [n, vocab], which are overwritten.

    The logprobs are of the distribution that is drawn from: penalized logits divided by the temperature,
    renormalized over the tokens that ``top_k``, ``top_p`` and ``min_p`` leave. A greedy row's are those at
    temperature 1. Tokens are drawn by inverting the cumulative distribution in float64 at one uniform number
    a row, so that a row depends on its own seed alone.
    """
    for row, sampler in enumerate(samplers):
        if sampler.penalized and sampler.counts:
            _penalize(logits[row], sampler)
    temperatures = torch.tensor([s.params.temperature or 1.0 for s in samplers], device=logits.device)
    logits.div_(temperatures[:, None])
    normalizer = logits.logsumexp(dim=-1)
    tokens = logits.argmax(dim=-1)
    plain = [row for row, s in enumerate(samplers) if not s.greedy and not s.truncated]
    cut = [row for row, s in enumerate(samplers) if s.truncated]
    if plain:
        probs = (_rows(logits, plain) - normalizer[plain, None]).exp_()
        tokens[plain] = _draw(probs, [samplers[row] for row in plain])
    if cut:
        probs = (_rows(logits, cut) - normalizer[cut, None]).exp_()
        tokens[cut], kept = _draw_truncated(probs, [samplers[row] for row in cut])
        normalizer[cut] += kept.log()
    logprobs = (logits.gather(-1, tokens[:, None])[:, 0] - normalizer).clamp_(max=0.0)
    return tokens.tolist(), logprobs.tolist()


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _penalize(row: Tensor, sampler: RowSampler) -> None:
    """Apply the three penalties, as SGLang defines them over generated tokens, to logits [vocab] in place."""
    params = sampler.params
    ids = torch.tensor(list(sampler.counts), device=row.device)
    counts = torch.tensor(list(sampler.counts.values()), device=row.device, dtype=row.dtype)
    values = row[ids] - params.presence_penalty - params.frequency_penalty * counts
    factor = params.repetition_penalty
    row[ids] = torch.where(values < 0, values * factor, values / factor)


def _draw(probs: Tensor, samplers: Sequence[RowSampler]) -> Tensor:
    """One index a row in proportion to ``probs`` [n, m]; a probability of 0 is never drawn.

    The cumulative distribution is inverted in two stages, first over blocks and then within one.
    """
    padding = -probs.shape[-1] % _BLOCK
    blocks = F.pad(probs, (0, padding)).view(len(probs), -1, _BLOCK)
    uniform = torch.tensor(
        [[sampler.rng.random()] for sampler in samplers], dtype=torch.float64, device=probs.device
    )
    mass = blocks.sum(dim=-1, dtype=torch.float64)
    block, rest = _invert(mass, uniform * mass.sum(dim=-1, keepdim=True))
    rows = torch.arange(len(probs), device=probs.device)
    index, _ = _invert(blocks[rows, block].double(), rest)
    return block * _BLOCK + index


def _invert(mass: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """First index [n] whose cumulative ``mass`` [n, m] exceeds ``target`` [n, 1], and what of it lies there.

    Where rounding puts the target beyond all mass, it is the last index that has any.
    """
    cumulative = mass.cumsum(dim=-1)
    found = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    index = torch.minimum(found, last)
    return index[:, 0], target - (cumulative - mass).gather(-1, index)


def _draw_truncated(probs: Tensor, samplers: Sequence[RowSampler]) -> tuple[Tensor, Tensor]:
    """As ``_draw`` over what ``top_k``, then ``top_p``, then ``min_p`` leave of ``probs`` [n, vocab].

    Also returns how much probability [n] that is.

    Sorting a vocabulary is slow and the likeliest tokens nearly always suffice: more are looked at only for
    the rows that need them.
    """
    vocab = probs.shape[-1]
    tokens = torch.empty(len(probs), dtype=torch.long, device=probs.device)
    mass = torch.empty(len(probs), dtype=probs.dtype, device=probs.device)
    open_rows = torch.arange(len(probs), device=probs.device)
    for width in (*(width for width in _WIDTHS if width < vocab), vocab):
        chosen = [samplers[row] for row in open_rows.tolist()]
        values, indices = probs[open_rows].topk(width, dim=-1)
        kept, enough = _truncate(values, chosen)
        if width == vocab:
            enough[:] = True
        if bool(enough.any()):
            ready = [sampler for sampler, is_ready in zip(chosen, enough.tolist(), strict=True) if is_ready]
            choice = _draw(kept[enough], ready)
            tokens[open_rows[enough]] = indices[enough].gather(-1, choice[:, None])[:, 0]
            mass[open_rows[enough]] = kept[enough].sum(-1)
        open_rows = open_rows[~enough]
        if len(open_rows) == 0:
            break
    return tokens, mass


def _truncate(values: Tensor, samplers: Sequence[RowSampler]) -> tuple[Tensor, Tensor]:
    """The largest probabilities ``values`` [n, width] with what is cut set to 0, and which rows [n] are done.

    A row is done where one of its limits cuts the last of the values already.
    """
    width = values.shape[-1]
    params = [sampler.params for sampler in samplers]
    device = values.device
    top_k = torch.tensor([p.top_k if p.top_k > 0 else 2**62 for p in params], device=device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], device=device)[:, None]
    min_p = torch.tensor([p.min_p for p in params], device=device)[:, None]
    before = values.cumsum(-1) - values
    rank = torch.arange(width, device=device)
    keep = (rank < top_k) & ((before <= top_p) | (top_p >= 1.0)) & (values >= min_p * values[:, :1])
    return values.where(keep, 0.0), ~keep[:, -1] | (top_k[:, 0] <= width)
