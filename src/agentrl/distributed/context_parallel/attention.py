"""Context parallelism: attention of a rank's queries to the keys of all ranks, under the forest's mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agentrl.distributed.context_parallel.tokens import TokenExchange
from agentrl.errors import ModelError
from agentrl.model.attention.flex import block_attention
from agentrl.model.attention.varlen import Segment, segment_mask

IMPLEMENTATION = "agentrl_context_parallel"
TILE = 64
"""Queries that are computed at once under a mask."""


def split_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    exchange: TokenExchange | None = None,
    segments: list[Segment] | None = None,
    block_mask: BlockMask | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Compute attention over a forest that ranks split, as transformers' attention interface calls it.

    query [1, heads, n, d]; key and value [1, key-value heads, n, d], all of this rank's n tokens; returns
    ([1, n, heads, d], None). Collective, forward and backward. Runs FlexAttention under ``block_mask``, or
    SDPA per segment of ``segments``. Raises ModelError without either, and for a layer with capped scores or
    attention sinks.
    """
    name = type(module).__name__
    if exchange is None or (segments is None) == (block_mask is None):
        raise ModelError(
            f"{name} was called without a token exchange",
            hint='call model.set_attn_implementation("sdpa") before the model is run elsewhere',
        )
    if softcap is not None or s_aux is not None:
        raise ModelError(f"{name} caps its scores or has attention sinks", hint="use a model without them")
    if block_mask is not None:
        key, value = exchange.gather_with_gradient(key, value)
        return block_attention(module, query, key, value, None, scaling=scaling, block_mask=block_mask)
    output = _SegmentAttention.apply(query, key, value, exchange, segments, scaling)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2), None


class _SegmentAttention(torch.autograd.Function):
    """Saves this rank's tokens only; the backward gathers keys and values, and builds masks, again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        exchange: TokenExchange,
        segments: list[Segment],
        scaling: float | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.others = exchange, segments, scaling
        keys, values = exchange.gather(key), exchange.gather(value)
        outputs = [
            _attend(part, _along_path(keys, segment), _along_path(values, segment), segment, scaling)
            for part, segment in zip(_parts(query, segments), segments, strict=True)
        ]
        return torch.cat(outputs, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        exchange, segments, scaling = ctx.others
        keys, values = exchange.gather(key), exchange.gather(value)
        grad_keys, grad_values = (torch.zeros_like(each, dtype=torch.float32) for each in (keys, values))
        grad_queries = []
        for part, grad, segment in zip(
            _parts(query, segments), _parts(grads[0], segments), segments, strict=True
        ):
            inputs = [
                each.detach().requires_grad_(True)
                for each in (part, _along_path(keys, segment), _along_path(values, segment))
            ]
            with torch.enable_grad():
                output = _attend(inputs[0], inputs[1], inputs[2], segment, scaling)
            grad_query, *others = torch.autograd.grad(output, inputs, grad)
            grad_queries.append(grad_query)
            for total, found in zip((grad_keys, grad_values), others, strict=True):
                _add_along_path(total, found, segment)
        return (
            torch.cat(grad_queries, 2),
            exchange.scatter_sum(grad_keys).to(key.dtype),
            exchange.scatter_sum(grad_values).to(value.dtype),
            None, None, None,
        )  # fmt: skip


def _attend(query: Tensor, key: Tensor, value: Tensor, segment: Segment, scaling: float | None) -> Tensor:
    """Return [1, heads, m, d] of a segment's m queries, which see its ancestors and, causally, themselves."""
    groups = query.shape[1] // key.shape[1]
    mask = segment_mask(segment, query.device)
    if mask is None:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    stacked = query.reshape(1, key.shape[1], groups * query.shape[2], -1)  # heads with the same keys, stacked
    output = scaled_dot_product_attention(
        stacked, key, value, attn_mask=mask.repeat(groups, 1), scale=scaling
    )
    return output.reshape(*query.shape[:3], -1)


def _parts(states: Tensor, segments: list[Segment]) -> tuple[Tensor, ...]:
    """Split [1, heads, n, d] by segment; the segments cover the rank's tokens in order."""
    lengths = [segment.end - segment.start for segment in segments]
    return torch.split(states, lengths, 2)


def _along_path(states: Tensor, segment: Segment) -> Tensor:
    """Return the states along a segment's path, [1, heads, ancestors + m, d]; a view if contiguous."""
    pieces = [states[:, :, start:end] for start, end in segment.path]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)


def _add_along_path(total: Tensor, found: Tensor, segment: Segment) -> None:
    """Add ``found``, the gradient of ``_along_path(states)``, to ``total``, that of the states."""
    done = 0
    for start, end in segment.path:
        total[:, :, start:end] += found[:, :, done : done + end - start]
        done += end - start


AttentionInterface.register(IMPLEMENTATION, split_attention)
