"""Executors for models that no mask can keep apart: each path of a forest is a sequence of its own.

``paths`` runs one after the other; ``padded`` all in one call, for processes that shard a model and so must
call it equally often.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.data.forest import Ints, TokenForest
from agentrl.model.attention.implementation import use_attention
from agentrl.model.attention.varlen import Segment, split_segments


def run_paths(model: Any, forest: TokenForest) -> Tensor:
    """Hidden states [N, H] of any forest through any causal model; a shared prefix costs once per path."""
    pieces = [
        _run(model, _ids(forest, segment)[None])[0, segment.ancestor_count :]
        for segment in split_segments(forest)
    ]
    return torch.cat(pieces)


def run_padded(model: Any, forest: TokenForest) -> Tensor:
    """``run_paths`` in one call: a path is a row, padded at its end, where a causal model does not look."""
    segments = split_segments(forest)
    rows = np.zeros((len(segments), forest.depth), dtype=np.int64)
    for row, segment in zip(rows, segments, strict=True):
        ids = _ids(forest, segment)
        row[: len(ids)] = ids
    hidden = _run(model, rows)
    pieces = [
        states[segment.ancestor_count :][: segment.end - segment.start]
        for states, segment in zip(hidden, segments, strict=True)
    ]
    return torch.cat(pieces)


def _ids(forest: TokenForest, segment: Segment) -> Ints:
    """The ids from the root to the end of ``segment``."""
    ranges = (*segment.ancestors, (segment.start, segment.end))
    return np.concatenate([forest.input_ids[start:end] for start, end in ranges])


def _run(model: Any, rows: Ints) -> Tensor:
    """Hidden states [P, L, H] of sequences int64[P, L]."""
    use_attention(model, "sdpa")
    output = model.get_decoder()(
        input_ids=torch.from_numpy(rows).to(model.device), attention_mask=None, use_cache=False
    )
    hidden: Tensor = output.last_hidden_state
    return hidden
