"""Compute the reverse KL from a policy to a teacher over the teacher's likeliest ids alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from agentrl.documents.column import TopLogprobs
from agentrl.documents.sampling_mask import SamplingMask
from agentrl.model.logprobs import OutputHead

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
    kept: SamplingMask | None = None,
) -> Tensor:
    """Return Σ π·(log π − log π_teacher) of each token in nats, float32[T], with gradient; 0 without ids.

    The outcomes are the teacher's likeliest ids and, as one, all others: by the log-sum inequality at most
    the KL over the whole vocabulary. An id beyond the head's rows, of a teacher with more padding, is one of
    the others, and so is one that a token of ``kept`` was not sampled from: π of it is 0.
    hidden [N, H] and ``logprobs`` float32[T] (of ``target_ids``) carry gradients; the rest is as for
    ``token_logprobs``. A logit is projected for the ids of ``top`` and for the target alone: their difference
    and the target's logprob give the logprob of an id.
    """
    device = hidden.device
    token = np.repeat(np.arange(len(top)), top.ids.counts)
    known = (top.ids.ids < head.vocabulary) & _are_kept(token, top.ids.ids, kept)
    row, ids, wanted = (
        torch.from_numpy(values[known]).to(device)
        for values in (token, top.ids.ids, top.logprobs.astype(np.float32))
    )
    divisor = temperature.to(device)
    normalizer = _logits(hidden, head, parent, target_ids, divisor) - logprobs
    found = _logits(hidden, head, parent[row], ids, divisor[row]) - normalizer[row]
    share = found.exp()

    def summed(values: Tensor) -> Tensor:
        return values.new_zeros(len(top)).index_add(0, row, values)

    rest, teacher_rest = ((1 - summed(each)).clamp(min=_LEAST) for each in (share, wanted.exp()))
    has_any = torch.from_numpy(top.ids.counts > 0).to(device)
    return torch.where(has_any, summed(share * (found - wanted)) + rest * (rest / teacher_rest).log(), 0.0)


def _are_kept(
    token: NDArray[np.int64], ids: NDArray[np.int64], kept: SamplingMask | None
) -> NDArray[np.bool_]:
    """Return bool[K]: whether token[i] could have been sampled as ids[i]."""
    if kept is None:
        return np.ones(len(ids), np.bool_)
    width = 1 + max(ids.max(initial=0), kept.ids.max(initial=0))
    allowed = np.repeat(np.arange(len(kept)), kept.counts) * width + kept.ids
    found: NDArray[np.bool_] = (kept.counts[token] == 0) | np.isin(token * width + ids, allowed)
    return found


def _logits(hidden: Tensor, head: OutputHead, place: Tensor, ids: Tensor, divisor: Tensor) -> Tensor:
    """Return the logit / temperature of ids[i] at hidden[place[i]], float32[K], with gradient."""
    products: Tensor = _ChosenProducts.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, place, ids, head
    )
    logits = products * head.scale
    if head.softcap is not None:
        logits = head.softcap * (logits / head.softcap).tanh()
    return logits / divisor


class _ChosenProducts(torch.autograd.Function):
    """Multiplies hidden[place[i]] by row ids[i] of the head alone.

    Autograd of ``weight[ids]`` would make a gradient of the whole head for each chunk, and add them up in the
    dtype of the products. Here one float32 tensor takes all of them, as in ``_ChunkedLogprobs``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        place: Tensor,
        ids: Tensor,
        head: OutputHead,
    ) -> Tensor:
        products = hidden.new_zeros(len(ids), dtype=torch.float32)
        for here in _chunks(len(ids)):
            row, is_own = head.own_rows(ids[here])
            part = (hidden[place[here]].float() * weight[row].float()).sum(-1)
            if bias is not None:
                part += bias[row].float()
            products[here] = part * is_own
        if head.group is not None:
            distributed.all_reduce(products, distributed.ReduceOp.SUM, head.group)
        ctx.save_for_backward(hidden, weight, bias, place, ids)
        ctx.head = head
        return products

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, place, ids = ctx.saved_tensors
        head: OutputHead = ctx.head
        totals = [
            torch.zeros_like(each, dtype=torch.float32) if each is not None and needed else None
            for each, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        ]
        for here in _chunks(len(ids)):
            row, is_own = head.own_rows(ids[here])
            grad, at = (grads[0][here] * is_own)[:, None], place[here]
            for total, index, part in zip(
                totals, (at, row, row), (weight[row], hidden[at], torch.ones_like(grad)), strict=True
            ):
                if total is not None:
                    values = grad * part.float()
                    total.index_put_((index,), values.view(-1, *total.shape[1:]), accumulate=True)
        if totals[0] is not None and head.group is not None:
            distributed.all_reduce(totals[0], distributed.ReduceOp.SUM, head.group)
        rounded = [
            None if total is None else total.to(each.dtype)
            for total, each in zip(totals, (hidden, weight, bias), strict=True)
        ]
        return (*rounded, None, None, None)


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK))
