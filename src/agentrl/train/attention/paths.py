"""Executor for models that no mask can keep apart: each path of a forest is run by itself, as a chain."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.batching.forest import TokenForest
from agentrl.train.attention.implementation import use_attention
from agentrl.train.attention.varlen import split_segments


def run_paths(model: Any, forest: TokenForest) -> Tensor:
    """Hidden states [N, H] of any forest through any causal model; a shared prefix costs once per path."""
    use_attention(model, "sdpa")
    pieces: list[Tensor] = []
    for segment in split_segments(forest):
        ranges = (*segment.ancestors, (segment.start, segment.end))
        ids = np.concatenate([forest.input_ids[start:end] for start, end in ranges])
        output = model.get_decoder()(
            input_ids=torch.from_numpy(ids).to(model.device)[None], attention_mask=None, use_cache=False
        )
        pieces.append(output.last_hidden_state[0, segment.ancestor_count :])
    return torch.cat(pieces)
