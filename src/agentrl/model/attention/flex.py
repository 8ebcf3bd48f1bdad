"""Executor for GPUs: FlexAttention under a block mask that is computed from the tree."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._dynamo.decorators import maybe_mark_dynamic
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface

from agentrl.data.forest import Ints, TokenForest
from agentrl.model.attention.sdpa import check_call, set_attention
from agentrl.model.flops import ModelShape
from agentrl.model.routing import routing_input

IMPLEMENTATION = "agentrl_flex"
BLOCK = 128
"""Tokens along each side of a mask block; rows are padded to a multiple of it."""
MIN_HEAD_DIM = 16
"""Width of the narrowest attention head that its kernels take."""
VARIANTS = 32
"""Compilations of FlexAttention before Dynamo gives up; torch's own limit, 8, counts those of all models.

A model needs one for each dtype and set of inputs with a gradient: two in an ordinary run, one more with
frozen layers and for a reference model with other heads.
"""

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
    """Pad ``subtree_end`` to whole blocks, at least two; a padding token sees only itself.

    Dynamo compiles a dimension of 1 as a constant: one block would need a kernel of its own.
    """
    count = len(subtree_end)
    return np.concatenate([subtree_end, np.arange(count, max(2, -(-count // BLOCK)) * BLOCK) + 1])


def block_kinds(subtree_end: Ints) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return (partial, full), bool[query blocks, key blocks]: some, or all, queries see all keys there.

    A query after key k sees it up to ``subtree_end[k]``, so the largest and the smallest end in a key block
    decide every block below the diagonal. N must be a multiple of ``BLOCK``; the cost is (N / BLOCK)².
    """
    ends = subtree_end.reshape(-1, BLOCK)
    start = np.arange(len(ends)) * BLOCK
    below = start[:, None] > start[None, :]
    touched = below & (ends.max(1)[None, :] > start[:, None])
    full = below & (ends.min(1)[None, :] >= start[:, None] + BLOCK)
    return (touched & ~full) | np.eye(len(ends), dtype=np.bool_), full


def forest_block_mask(subtree_end: Ints, device: torch.device | str, tokens: Ints | None = None) -> BlockMask:
    """Return the BlockMask of a forest whose ``subtree_end`` is padded to whole blocks, without N² work.

    ``tokens``: the queries, if they are not all tokens; whole blocks, in ascending order.
    """
    kinds = block_kinds(subtree_end)
    queries = None if tokens is None else torch.from_numpy(tokens).to(device)
    if tokens is not None:
        partial, full = (kind[tokens[::BLOCK] // BLOCK] for kind in kinds)
        kinds = partial, full
    ends = torch.from_numpy(subtree_end).to(device)
    mask = BlockMask.from_kv_blocks(
        *_indices(kinds[0], device),
        *_indices(kinds[1], device),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_function(ends, queries),
        seq_lengths=(len(subtree_end) if tokens is None else len(tokens), len(subtree_end)),
    )
    for lengths in (ends, queries):
        if lengths is not None:
            _any_length(lengths, 0)
    for blocks in mask.as_tuple():
        if isinstance(blocks, Tensor):
            _any_length(blocks, *range(2, blocks.dim()))
    return mask


def _indices(kind: NDArray[np.bool_], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks of each query block, int32[1, 1, Q], and their indices [1, 1, Q, K]."""
    counts = torch.from_numpy(kind.sum(1).astype(np.int32)).to(device)
    order = torch.from_numpy(np.argsort(~kind, axis=1, kind="stable").astype(np.int32)).to(device)
    return counts[None, None], order[None, None].contiguous()


def has_flex(model: Any) -> bool:
    """Return whether FlexAttention has a kernel for the model, backward included: on CUDA."""
    if model.device.type != "cuda":
        return False
    return ModelShape.of(model.config).head_dim >= MIN_HEAD_DIM


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
        **routing_input(forest, device, padding=padding[1]),
        block_mask=forest_block_mask(ends, device),
    )
    return cast(Tensor, output.last_hidden_state[0, : forest.tokens])


_BLOCKS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


def flex_any_length(
    query: Tensor, key: Tensor, value: Tensor, *, block_mask: BlockMask, **options: Any
) -> Tensor:
    """Call FlexAttention with the tensors' lengths: Dynamo compiles the mask's ints as constants."""
    mask = BlockMask(
        (query.shape[2], key.shape[2]),
        **{name: getattr(block_mask, name) for name in _BLOCKS},
        BLOCK_SIZE=block_mask.BLOCK_SIZE,
        mask_mod=block_mask.mask_mod,
    )
    return cast(Tensor, flex_attention(query, key, value, block_mask=mask, **options))


@cache
def _kernel(device_type: str) -> Callable[..., Tensor]:
    """Return FlexAttention, compiled if the device has a kernel for it."""
    if device_type == "cpu":
        return cast(Callable[..., Tensor], flex_attention)
    return compile_kernel(flex_any_length)


def compile_kernel(attention: Callable[..., Tensor], backend: Any = "inductor") -> Callable[..., Tensor]:
    """Return ``attention`` compiled.

    A call becomes one operation, ``inductor_compiled_code``, which selective checkpointing can keep. Without
    that option, operations in compiled code are hidden from it.
    """
    made = torch.compile(  # type: ignore[call-overload]  # the overloads lack recompile_limit
        attention,
        fullgraph=True,
        backend=backend,
        recompile_limit=VARIANTS,
        options={"wrap_inductor_compiled_regions": True},
    )
    return cast(Callable[..., Tensor], made)


def _any_length(tensor: Tensor, *dimensions: int) -> None:
    """Let Dynamo compile for any size of ``dimensions``, from the first size on.

    By default, it compiles the first size as a constant. A micro-batch of that size, recomputed in its
    backward after another size was compiled (1F1B), would then run another kernel than in its forward, and
    selective checkpointing would not find what it kept.
    """
    maybe_mark_dynamic(tensor, dimensions)


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
    check_call(module, "block mask" if block_mask is None else None, softcap, s_aux)
    value = value.to(query.dtype)
    for states in (query, key, value):
        _any_length(states, 2)
    if scaling == query.shape[3] ** -0.5:
        scaling = None  # the default: Dynamo compiles a number that differs between models as a variable
    output = _kernel(query.device.type)(
        query,
        key,
        value,
        block_mask=block_mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, block_attention)
