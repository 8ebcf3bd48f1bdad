"""Executors on transformers' own SDPA attention: a forest under one dense mask, or each path alone."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from agentrl.data.forest import Ints, TokenForest
from agentrl.model.attention.compatibility import set_attention
from agentrl.model.attention.varlen import Segment, split_segments
from agentrl.model.vision import forest_inputs


def forest_mask(subtree_end: Tensor) -> Tensor:
    """Return bool[1, 1, N, N], True where query q sees key k: k ≤ q < subtree_end[k]."""
    index = torch.arange(len(subtree_end), device=subtree_end.device)
    query, key = index[:, None], index[None, :]
    return ((key <= query) & (query < subtree_end[None, :]))[None, None]


def run_sdpa(model: Any, forest: TokenForest) -> Tensor:
    """Return hidden states [N, H] of the forest in one row; attention costs N² memory and time."""
    set_attention(model, "sdpa")
    device = model.device
    output = model.get_decoder()(
        **forest_inputs(model, forest),
        attention_mask=forest_mask(torch.from_numpy(forest.subtree_end).to(device)),
        use_cache=False,
    )
    return cast(Tensor, output.last_hidden_state[0])


def run_per_sequence(model: Any, forest: TokenForest) -> Tensor:
    """Return hidden states [N, H] from one call per path; a shared prefix is computed once per path."""
    pieces = [
        _run(model, _path_ids(forest, segment)[None])[0, segment.ancestor_count :]
        for segment in split_segments(forest)
    ]
    return torch.cat(pieces)


def run_per_sequence_padded(model: Any, forest: TokenForest) -> Tensor:
    """Return what ``run_per_sequence`` returns, from one call: a path is a row, padded at its end."""
    segments = split_segments(forest)
    rows = np.zeros((len(segments), forest.depth), dtype=np.int64)
    for row, segment in zip(rows, segments, strict=True):
        ids = _path_ids(forest, segment)
        row[: len(ids)] = ids
    hidden = _run(model, rows)
    pieces = [
        states[segment.ancestor_count :][: segment.end - segment.start]
        for states, segment in zip(hidden, segments, strict=True)
    ]
    return torch.cat(pieces)


def _path_ids(forest: TokenForest, segment: Segment) -> Ints:
    """Return the ids from the root to the end of ``segment``."""
    ranges = (*segment.ancestors, (segment.start, segment.end))
    return np.concatenate([forest.input_ids[start:end] for start, end in ranges])


def _run(model: Any, rows: Ints) -> Tensor:
    """Return hidden states [P, L, H] of sequences int64[P, L]."""
    set_attention(model, "sdpa")
    output = model.get_decoder()(
        input_ids=torch.from_numpy(rows).to(model.device), attention_mask=None, use_cache=False
    )
    hidden: Tensor = output.last_hidden_state
    return hidden
