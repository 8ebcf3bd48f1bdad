"""Executor without padding and without a dense mask: attention runs per unbranched segment.

Everything but attention runs once over the N packed tokens. A segment's queries attend to its ancestors' keys
and, causally, to their own; a chain is one segment with no ancestors, and so plain causal attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agentrl.data.forest import TokenForest
from agentrl.errors import ModelError
from agentrl.model.attention.implementation import use_attention

IMPLEMENTATION = "agentrl_segments"


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens ``[start, end)``, each the parent of the next, and where their ancestors lie."""

    start: int
    end: int
    ancestors: tuple[tuple[int, int], ...]
    """Token ranges from the root down to the segment's parent; empty at a root."""

    @property
    def ancestor_count(self) -> int:
        """Tokens before the segment."""
        return sum(end - start for start, end in self.ancestors)

    @property
    def path(self) -> list[tuple[int, int]]:
        """Token ranges from the root to the segment's end, adjacent ones in one."""
        joined: list[tuple[int, int]] = []
        for start, end in (*self.ancestors, (self.start, self.end)):
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, end))
        return joined


def split_segments(forest: TokenForest) -> list[Segment]:
    """The segments of ``forest``, in order; they tile its tokens."""
    starts = np.flatnonzero(forest.parent != np.arange(forest.tokens) - 1)
    if forest.tokens:
        starts = np.union1d(starts, [0])
    ends = np.append(starts[1:], forest.tokens)
    segments: list[Segment] = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        parent = int(forest.parent[start])
        ancestors: tuple[tuple[int, int], ...] = ()
        if parent >= 0:
            above = segments[int(np.searchsorted(starts, parent, side="right")) - 1]
            ancestors = (*above.ancestors, (above.start, parent + 1))
        segments.append(Segment(start, end, ancestors))
    return segments


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """The same segments in pieces: the tokens cut wherever a segment begins or another branches off it.

    Gradients of pieces cost what the pieces hold; those of slices would be as long as the forest, each.
    """

    segments: tuple[int, ...]
    """Tokens of each segment."""
    pieces: tuple[int, ...]
    """Tokens of each piece; the pieces tile the forest's tokens."""
    paths: tuple[tuple[int, ...], ...]
    """The pieces that each segment sees, from the root down to its own."""


def cut_ways(segments: list[Segment]) -> SegmentPlan:
    """The pieces of ``segments``, which tile the tokens of a forest."""
    ranges = [(*segment.ancestors, (segment.start, segment.end)) for segment in segments]
    cuts = np.unique([bound for path in ranges for range_ in path for bound in range_]).tolist()
    number = {bound: index for index, bound in enumerate(cuts)}
    return SegmentPlan(
        segments=tuple(segment.end - segment.start for segment in segments),
        pieces=tuple(np.diff(cuts).tolist()),
        paths=tuple(
            tuple(piece for start, end in path for piece in range(number[start], number[end]))
            for path in ranges
        ),
    )


def run_varlen(model: Any, forest: TokenForest) -> Tensor:
    """Hidden states [N, H] of any forest; attention costs what its paths cost, without their repetition."""
    use_attention(model, IMPLEMENTATION)
    device = model.device
    segments = split_segments(forest)
    output = model.get_decoder()(
        input_ids=torch.from_numpy(forest.input_ids).to(device)[None],
        position_ids=torch.from_numpy(forest.position_ids).to(device)[None],
        attention_mask=None,
        use_cache=False,
        ways=cut_ways(segments),
        segment_masks=[segment_mask(segment, device) for segment in segments],
    )
    return cast(Tensor, output.last_hidden_state[0])


def segment_mask(segment: Segment, device: torch.device) -> Tensor | None:
    """bool[m, ancestors + m] of what a segment's m queries see; None where that is plainly causal."""
    before, length = segment.ancestor_count, segment.end - segment.start
    if before == 0:
        return None
    return torch.ones(length, before + length, dtype=torch.bool, device=device).tril(before)


def segment_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    ways: SegmentPlan | None = None,
    segment_masks: list[Tensor | None] | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention along each path of the forest, as transformers' attention interface calls it.

    query [1, heads, N, d]; key and value [1, key-value heads, N, d]; returns ([1, N, heads, d], None).
    Raises ModelError where the layer asks for what this attention does not do.
    """
    name = type(module).__name__
    if ways is None or segment_masks is None:
        raise ModelError(
            f"{name} is not told where sequences end",
            hint='run the model through run_forest, or call model.set_attn_implementation("sdpa") before',
        )
    if softcap is not None or s_aux is not None:
        raise ModelError(f"{name} caps its scores or has attention sinks", hint="use a model without them")
    keys, values = key.split_with_sizes(ways.pieces, 2), value.split_with_sizes(ways.pieces, 2)
    outputs = [
        scaled_dot_product_attention(
            states,
            _joined([keys[piece] for piece in path]),
            _joined([values[piece] for piece in path]),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2)
        for states, path, mask in zip(
            query.split_with_sizes(ways.segments, 2), ways.paths, segment_masks, strict=True
        )
    ]
    return _joined(outputs, 1), None


def _joined(pieces: list[Tensor], dim: int = 2) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


AttentionInterface.register(IMPLEMENTATION, segment_attention)
