"""Sample token ids and their logprobs from a batch of logits, and end a generation at a stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from agentrl.documents.sampling import SamplingParams

_PARAMS = {item.name for item in fields(SamplingParams)} - {"extra"}
_BLOCK = 256
_WIDTHS = (64, 1024)
_SPARE_TOKENS = 8
"""Further tokens to decode: the first ones may be parts of a character."""


@dataclass(slots=True)
class RowSampler:
    """The sampling state of one request: parameters, random generator, counts of generated tokens."""

    params: SamplingParams
    rng: np.random.Generator
    counts: dict[int, int] = field(default_factory=dict)
    """{token: how often it was generated}; kept only if a penalty needs it."""
    kept: list[list[int]] | None = None
    """The ids that each token was drawn from, if the request asks for them and truncates."""

    @property
    def greedy(self) -> bool:
        """Return whether the temperature is 0: the most likely token is chosen."""
        return self.params.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Return whether tokens that were already generated are penalized."""
        params = self.params
        return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)

    def record(self, token: int) -> None:
        """Count a generated token."""
        if self.penalized:
            self.counts[token] = self.counts.get(token, 0) + 1


def sample(logits: Tensor, samplers: Sequence[RowSampler]) -> tuple[list[int], list[float]]:
    """Sample one token per row of float32 logits [n, vocab], which are overwritten; return ids and logprobs.

    The logprobs are those of the sampled distribution: penalized logits divided by the temperature,
    renormalized over the tokens that ``top_k``, ``top_p`` and ``min_p`` allow. Those of a greedy row are at
    temperature 1. Each row inverts the cumulative distribution in float64 at one uniform random number, so
    that a row depends only on its own seed.
    """
    for row, sampler in enumerate(samplers):
        if sampler.penalized and sampler.counts:
            _penalize(logits[row], sampler)
    temperatures = torch.tensor([s.params.temperature or 1.0 for s in samplers], device=logits.device)
    logits.div_(temperatures[:, None])
    normalizer = logits.logsumexp(dim=-1)
    tokens = logits.argmax(dim=-1)
    plain = [row for row, s in enumerate(samplers) if not s.greedy and not s.params.truncates]
    cut = [row for row, s in enumerate(samplers) if s.params.truncates]
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
    """Apply the presence, frequency and repetition penalties of SGLang to logits [vocab] in place."""
    params = sampler.params
    ids = torch.tensor(list(sampler.counts), device=row.device)
    counts = torch.tensor(list(sampler.counts.values()), device=row.device, dtype=row.dtype)
    values = row[ids] - params.presence_penalty - params.frequency_penalty * counts
    factor = params.repetition_penalty
    row[ids] = torch.where(values < 0, values * factor, values / factor)


def _draw(probs: Tensor, samplers: Sequence[RowSampler]) -> Tensor:
    """Draw one index per row in proportion to ``probs`` [n, m]; never one with probability 0.

    The cumulative distribution is inverted in two stages: over blocks, then within one block.
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
    """Return the first index [n] whose cumulative ``mass`` [n, m] exceeds ``target`` [n, 1], and the rest.

    The rest [n, 1] is the target minus the mass before the index. If rounding puts the target above the total
    mass, the last index with any mass is returned.
    """
    cumulative = mass.cumsum(dim=-1)
    above = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    index = torch.minimum(above, last)
    return index[:, 0], target - (cumulative - mass).gather(-1, index)


def _draw_truncated(probs: Tensor, samplers: Sequence[RowSampler]) -> tuple[Tensor, Tensor]:
    """Draw from what ``top_k``, then ``top_p``, then ``min_p`` leave of ``probs`` [n, vocab].

    Returns the indices [n] and the remaining probability [n]; adds to each sampler's ``kept``. Sorting the
    vocabulary is slow and the most likely tokens nearly always suffice, so wider ranges are examined only for
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
            for row, sampler in zip(enough.nonzero()[:, 0].tolist(), ready, strict=True):
                if sampler.kept is not None:
                    sampler.kept.append(indices[row, kept[row] > 0].tolist())
        open_rows = open_rows[~enough]
        if len(open_rows) == 0:
            break
    return tokens, mass


def _truncate(values: Tensor, samplers: Sequence[RowSampler]) -> tuple[Tensor, Tensor]:
    """Set the excluded ones of the largest probabilities ``values`` [n, width] to 0.

    Also returns which rows [n] are complete: their limits exclude the last of the values.
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


class StopStrings:
    """The stop strings of one generation."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._tokens = max(len(stop.encode()) for stop in stops) + _SPARE_TOKENS

    def completed_by(self, output_ids: Sequence[int]) -> str | None:
        """Return the stop string that the last token of a generation completes; None without one."""
        text = self._tokenizer.decode(list(output_ids[-self._tokens :]), skip_special_tokens=False)
        return next((stop for stop in self._stops if stop in text), None)


def read_params(values: Mapping[str, Any]) -> tuple[SamplingParams, dict[str, Any]]:
    """Return the sampling parameters, and the options ``ignore_eos``, ``sampling_seed`` and ``stop``.

    Raises ValueError, TypeError and AgentRLError for parameters that are not supported.
    """
    options: dict[str, Any] = {"ignore_eos": False, "sampling_seed": None, "stop": None}
    unknown = [name for name in values if name not in _PARAMS and name not in options]
    if unknown:
        raise ValueError(f"the local engine does not support sampling parameter {unknown[0]!r}")
    options |= {name: values[name] for name in options if values.get(name) is not None}
    known = {name: values[name] for name in _PARAMS if values.get(name) is not None}
    if "stop_token_ids" in known:
        known["stop_token_ids"] = tuple(known["stop_token_ids"])
    return SamplingParams(**{"max_new_tokens": 128, **known}), options


def read_stops(value: object) -> tuple[str, ...]:
    """Return the sampling parameter ``stop``. Raises ValueError unless it is text or a list of texts."""
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError(f"stop must be a text or a list of texts, not {value!r}")
    return tuple(stops)
