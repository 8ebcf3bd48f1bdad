"""Compute the reverse KL from a policy to a teacher over the teacher's likeliest ids alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentrl.documents.column import TopLogprobs
from agentrl.model.output_head import OutputHead

_CHUNK = 1024
"""Ids whose rows of the output head are in memory at a time."""
_LEAST = 1e-6
"""Smallest probability of all other ids together."""


def reverse_kl(
    hidden: Tensor,
    head: OutputHead,
    parent: Tensor,
    target_ids: Tensor,
    temperature: Tensor,
    logprobs: Tensor,
    top: TopLogprobs,
) -> Tensor:
    """Return Σ π·(log π − log π_teacher) of each token in nats, float32[T], with gradient; 0 without ids.

    The outcomes are the teacher's likeliest ids and, as one, all others: by the log-sum inequality at most
    the KL over the whole vocabulary. An id beyond the head's rows, of a teacher with more padding, is one of
    the others. hidden [N, H] and ``logprobs`` float32[T] (of ``target_ids``) carry
    gradients; the rest is as for ``token_logprobs``. A logit is projected for the ids of ``top`` and for the
    target alone: their difference and the target's logprob give the logprob of an id. ``head`` is whole.
    """
    device = hidden.device
    known = top.ids.ids < len(head.weight)
    row, ids, wanted = (
        torch.from_numpy(values[known]).to(device)
        for values in (
            np.repeat(np.arange(len(top)), top.ids.counts), top.ids.ids, top.logprobs.astype(np.float32),
        )
    )  # fmt: skip
    divisor = temperature.to(device)
    normalizer = _logits(hidden, head, parent, target_ids, divisor) - logprobs
    found = _logits(hidden, head, parent[row], ids, divisor[row]) - normalizer[row]
    share = found.exp()

    def summed(values: Tensor) -> Tensor:
        return values.new_zeros(len(top)).index_add(0, row, values)

    rest, teacher_rest = ((1 - summed(each)).clamp(min=_LEAST) for each in (share, wanted.exp()))
    has_any = torch.from_numpy(top.ids.counts > 0).to(device)
    return torch.where(has_any, summed(share * (found - wanted)) + rest * (rest / teacher_rest).log(), 0.0)


def _logits(hidden: Tensor, head: OutputHead, place: Tensor, ids: Tensor, divisor: Tensor) -> Tensor:
    """Return the logit / temperature of ids[i] at hidden[place[i]], float32; recomputed in the backward."""
    chunks = [slice(start, start + _CHUNK) for start in range(0, len(ids), _CHUNK)]
    parts = [
        checkpoint(
            _project, hidden, head.weight, head.bias, head, place[here], ids[here], divisor[here],
            use_reentrant=False,
        )
        for here in chunks
    ]  # fmt: skip
    return torch.cat([hidden.new_zeros(0, dtype=torch.float32), *parts])


def _project(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, head: OutputHead, place: Tensor, ids: Tensor,
    divisor: Tensor,
) -> Tensor:  # fmt: skip
    logits = (hidden[place].float() * weight[ids].float()).sum(-1)
    if bias is not None:
        logits = logits + bias[ids].float()
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * (logits / head.softcap).tanh()
    return logits / divisor
