"""Attention of the local engine: each chunk of a flat batch over its sequence's rows of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentrl.errors import ModelError
from agentrl.inference.engines.local.cache import KVCache

ATTENTION = "agentrl_slots"
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


@dataclass(frozen=True, slots=True)
class Segment:
    """The attention of one chunk: queries [begin, end) of the batch over cache rows [first, last)."""

    begin: int
    end: int
    first: int
    last: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class SlotBatch:
    cache: KVCache
    rows: Tensor
    segments: tuple[Segment, ...]


def _slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    slot_batch: SlotBatch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention over the KV cache; each layer calls it with query [1, heads, n, dim] of the batch.

    The query heads of one key head become additional query rows, so that keys and values are read once and
    never repeated.
    """
    named = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if slot_batch is None or named:
        raise ModelError(f"the local engine's attention does not support {named or 'a call without a batch'}")
    layer = cast("int", module.layer_idx)
    cache = slot_batch.cache
    layer_keys, layer_values = cache.keys[layer], cache.values[layer]
    layer_keys.index_copy_(0, slot_batch.rows, key[0].transpose(0, 1))
    layer_values.index_copy_(0, slot_batch.rows, value[0].transpose(0, 1))
    heads, count, dim = query.shape[1:]
    kv_heads = key.shape[1]
    group = heads // kv_heads
    grouped = query.view(kv_heads, group, count, dim)
    output = query.new_empty(count, kv_heads, group, dim)
    for segment in slot_batch.segments:
        keys = layer_keys[segment.first : segment.last].transpose(0, 1)
        values = layer_values[segment.first : segment.last].transpose(0, 1)
        n = segment.end - segment.begin
        rows = grouped[:, :, segment.begin : segment.end].reshape(kv_heads, group * n, dim)
        mixed = F.scaled_dot_product_attention(
            rows[None], keys[None], values[None], attn_mask=segment.mask, scale=scaling
        )
        output[segment.begin : segment.end] = mixed.view(kv_heads, group, n, dim).permute(2, 0, 1, 3)
    return output.view(1, count, heads, dim), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _slot_attention)
