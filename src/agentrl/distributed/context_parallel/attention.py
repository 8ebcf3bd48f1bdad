"""Context parallelism: attention of a process's queries to the keys of all, under the forest's mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agentrl.distributed.context_parallel.exchange import TokenExchange
from agentrl.errors import ModelError
from agentrl.model.attention.flex import block_attention
from agentrl.model.attention.varlen import Segment, segment_mask

IMPLEMENTATION = "agentrl_shared_tokens"
TILE = 64
"""Queries of a head that are computed at once where they need a mask."""


def shared_attention(
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
    """Attention over a forest whose tokens several processes share, as transformers' interface calls it.

    query [1, heads, n, d]; key and value [1, key-value heads, n, d], all of this process's n tokens; returns
    ([1, n, heads, d], None). The processes meet in the forward and in the backward. Under ``block_mask`` it
    runs as FlexAttention, else by ``segments``. Raises ModelError where the layer asks for what this
    attention does not do.
    """
    name = type(module).__name__
    if exchange is None or (segments is None) == (block_mask is None):
        raise ModelError(
            f"{name} is not told which processes share its tokens",
            hint='call model.set_attn_implementation("sdpa") before the model is run elsewhere',
        )
    if softcap is not None or s_aux is not None:
        raise ModelError(f"{name} caps its scores or has attention sinks", hint="use a model without them")
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if block_mask is not None:
        key, value = exchange.gather_with_gradient(key, value)
        return block_attention(module, query, key, value, None, scaling=scaling, block_mask=block_mask)
    output = _SegmentsOfMany.apply(query, key, value, exchange, segments, scaling)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2), None


class _SegmentsOfMany(torch.autograd.Function):
    """Keeps this process's tokens alone: the backward gathers the others' again, and makes masks again."""

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
        with torch.autocast(query.device.type, enabled=False):
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
            with torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
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
    """[1, heads, m, d] of a segment's m queries, which see its ancestors and, causally, themselves."""
    groups = query.shape[1] // key.shape[1]
    mask = segment_mask(segment, query.device)
    if mask is None:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    stacked = query.reshape(1, key.shape[1], groups * query.shape[2], -1)  # heads with the same keys are one
    output = scaled_dot_product_attention(
        stacked, key, value, attn_mask=mask.repeat(groups, 1), scale=scaling
    )
    return output.reshape(*query.shape[:3], -1)


def _parts(states: Tensor, segments: list[Segment]) -> tuple[Tensor, ...]:
    """[1, heads, m, d] for each segment: they tile the process's tokens in order."""
    lengths = [segment.end - segment.start for segment in segments]
    return torch.split(states, lengths, 2)


def _along_path(states: Tensor, segment: Segment) -> Tensor:
    """[1, heads, ancestors + m, d]: the states of a segment's ancestors and its own; a view if adjacent."""
    pieces = [states[:, :, start:end] for start, end in segment.path]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)


def _add_along_path(total: Tensor, found: Tensor, segment: Segment) -> None:
    """Add gradients of ``_along_path``'s result to those of what it was taken from."""
    done = 0
    for start, end in segment.path:
        total[:, :, start:end] += found[:, :, done : done + end - start]
        done += end - start


AttentionInterface.register(IMPLEMENTATION, shared_attention)
