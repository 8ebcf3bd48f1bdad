"""Executor for GPUs: FlexAttention under a block mask that is computed from the tree."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface

from agentrl.data.forest import Ints, TokenForest
from agentrl.errors import ModelError
from agentrl.model.attention.compatibility import set_attention

IMPLEMENTATION = "agentrl_flex"
BLOCK = 128
"""Tokens along each side of a mask block; rows are padded to a multiple of it."""
MIN_HEAD_DIM = 16
"""Width of the narrowest attention head that its kernels take."""

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def mask_function(subtree_end: Tensor, tokens: Tensor | None = None) -> MaskFunction:
    """Return mask_mod(batch, head, query, key), True where the query is the key or follows it on a path.

    With ``tokens``, query q is token ``tokens[q]``.
    """

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        token = query if tokens is None else tokens[query]
        return (key <= token) & (token < subtree_end[key])

    return sees


def padded_ends(subtree_end: Ints) -> Ints:
    """Pad ``subtree_end`` to whole blocks; a padding token sees only itself."""
    count = len(subtree_end)
    return np.concatenate([subtree_end, np.arange(count, -(-count // BLOCK) * BLOCK) + 1])


def block_kinds(subtree_end: Ints, block: int = BLOCK) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return (partial, full), bool[query blocks, key blocks]: some, or all, queries see all keys there.

    A query after key k sees it up to ``subtree_end[k]``, so the largest and the smallest end in a key block
    decide every block below the diagonal. N must be a multiple of ``block``; the cost is (N / block)².
    """
    ends = subtree_end.reshape(-1, block)
    start = np.arange(len(ends)) * block
    below = start[:, None] > start[None, :]
    touched = below & (ends.max(1)[None, :] > start[:, None])
    full = below & (ends.min(1)[None, :] >= start[:, None] + block)
    return (touched & ~full) | np.eye(len(ends), dtype=np.bool_), full


def forest_block_mask(subtree_end: Ints, device: torch.device | str, tokens: Ints | None = None) -> BlockMask:
    """Return the BlockMask of a forest whose ``subtree_end`` is padded to whole blocks, without N² work.

    ``tokens``: the queries, if they are not all tokens; whole blocks, in ascending order.
    """
    kinds = block_kinds(subtree_end)
    places = None if tokens is None else torch.from_numpy(tokens).to(device)
    if tokens is not None:
        partial, full = (kind[tokens[::BLOCK] // BLOCK] for kind in kinds)
        kinds = partial, full
    return BlockMask.from_kv_blocks(
        *_indices(kinds[0], device),
        *_indices(kinds[1], device),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_function(torch.from_numpy(subtree_end).to(device), places),
        seq_lengths=(len(subtree_end) if tokens is None else len(tokens), len(subtree_end)),
    )


def _indices(kind: NDArray[np.bool_], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks of each query block, int32[1, 1, Q], and their indices [1, 1, Q, K]."""
    counts = torch.from_numpy(kind.sum(1).astype(np.int32)).to(device)
    order = torch.from_numpy(np.argsort(~kind, axis=1, kind="stable").astype(np.int32)).to(device)
    return counts[None, None], order[None, None].contiguous()


def has_flex(model: Any) -> bool:
    """Return whether FlexAttention has a kernel for the model, backward included: on CUDA."""
    if model.device.type != "cuda":
        return False
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return bool(width >= MIN_HEAD_DIM)


def run_flex(model: Any, forest: TokenForest) -> Tensor:
    """Return hidden states [N, H] of the forest in one row; attention costs the blocks that paths touch."""
    set_attention(model, IMPLEMENTATION)
    device = model.device
    ends = padded_ends(forest.subtree_end)
    padding = (0, len(ends) - forest.tokens)
    output = model.get_decoder()(
        input_ids=torch.from_numpy(np.pad(forest.input_ids, padding)).to(device)[None],
        position_ids=torch.from_numpy(np.pad(forest.position_ids, padding)).to(device)[None],
        attention_mask=None,
        use_cache=False,
        block_mask=forest_block_mask(ends, device),
    )
    return cast(Tensor, output.last_hidden_state[0, : forest.tokens])


@cache
def _kernel(device_type: str) -> Callable[..., Tensor]:
    """Return FlexAttention, compiled if the device has a kernel for it."""
    if device_type == "cpu":
        return cast(Callable[..., Tensor], flex_attention)
    return cast(Callable[..., Tensor], torch.compile(flex_attention, fullgraph=True))


def block_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    block_mask: BlockMask | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Compute attention under ``block_mask``, as transformers' attention interface calls it.

    query [1, heads, N, d]; key and value [1, key-value heads, N, d]; returns ([1, N, heads, d], None).
    Raises ModelError without a mask, and for a layer with capped scores or attention sinks.
    """
    name = type(module).__name__
    if block_mask is None:
        raise ModelError(
            f"{name} was called without a block mask",
            hint='run it through build_executor, or call model.set_attn_implementation("sdpa") before',
        )
    if softcap is not None or s_aux is not None:
        raise ModelError(f"{name} caps its scores or has attention sinks", hint="use a model without them")
    output = _kernel(query.device.type)(
        query,
        key,
        value.to(query.dtype),
        block_mask=block_mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, block_attention)
