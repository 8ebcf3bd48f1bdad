"""Executor for any forest on any device: scaled dot-product attention under a dense mask."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from agentrl.data.forest import TokenForest
from agentrl.model.attention.implementation import use_attention


def forest_mask(subtree_end: Tensor) -> Tensor:
    """bool[1, 1, N, N], True where query q sees key k: k ≤ q < subtree_end[k]."""
    index = torch.arange(len(subtree_end), device=subtree_end.device)
    query, key = index[:, None], index[None, :]
    return ((key <= query) & (query < subtree_end[None, :]))[None, None]


def run_sdpa(model: Any, forest: TokenForest) -> Tensor:
    """Hidden states [N, H] of the whole forest in one row; memory and time of attention grow with N²."""
    use_attention(model, "sdpa")
    device = model.device
    output = model.get_decoder()(
        input_ids=torch.from_numpy(forest.input_ids).to(device)[None],
        position_ids=torch.from_numpy(forest.position_ids).to(device)[None],
        attention_mask=forest_mask(torch.from_numpy(forest.subtree_end).to(device)),
        use_cache=False,
    )
    return cast(Tensor, output.last_hidden_state[0])
