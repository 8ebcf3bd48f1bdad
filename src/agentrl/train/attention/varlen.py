"""Executor for chains: all of them in one row, and attention within each chain alone.

Everything but attention runs once over the N packed tokens. Attention runs per chain as plain causal
attention, so that there is no padding, no mask, and no work between chains.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agentrl.batching.forest import TokenForest
from agentrl.errors import ConfigError, ModelError
from agentrl.train.attention.implementation import use_attention

IMPLEMENTATION = "agentrl_chains"


def run_varlen(model: Any, forest: TokenForest) -> Tensor:
    """Hidden states [N, H] of a forest of chains; ConfigError where a tree branches."""
    if not forest.is_chains:
        raise ConfigError("the varlen executor was given a tree that branches", cure="use the sdpa executor")
    use_attention(model, IMPLEMENTATION)
    device = model.device
    output = model.get_decoder()(
        input_ids=torch.from_numpy(forest.input_ids).to(device)[None],
        position_ids=torch.from_numpy(forest.position_ids).to(device)[None],
        attention_mask=None,
        use_cache=False,
        chain_lengths=forest.tree_lengths.tolist(),
    )
    return cast(Tensor, output.last_hidden_state[0])


def chain_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    chain_lengths: list[int] | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each chain, as transformers' attention interface calls it.

    query [1, heads, N, d]; key and value [1, key-value heads, N, d]; returns ([1, N, heads, d], None).
    Raises ModelError where the layer asks for what this attention does not do.
    """
    name = type(module).__name__
    if chain_lengths is None:
        raise ModelError(
            f"{name} is not told where chains end",
            cure='run the model through run_forest, or call model.set_attn_implementation("sdpa") before',
        )
    if softcap is not None or s_aux is not None:
        raise ModelError(f"{name} caps its scores or has attention sinks", cure="use a model without them")
    groups = query.shape[1] // key.shape[1]
    native = groups > 1 and query.is_cuda
    if groups > 1 and not native:  # the CPU kernel is slower on grouped heads than on repeated ones
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    chains = zip(*(torch.split(states, chain_lengths, 2) for states in (query, key, value)), strict=True)
    outputs = [
        scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=native
        )
        for q, k, v in chains
    ]
    return torch.cat(outputs, 2).transpose(1, 2), None


AttentionInterface.register(IMPLEMENTATION, chain_attention)
