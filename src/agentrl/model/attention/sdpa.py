"""Executors on PyTorch's SDPA: segment by segment, under one dense mask, or each path alone.

Segment by segment needs neither padding nor a dense mask: all other layers run once over the N packed tokens.
A segment's queries attend to its ancestors' keys and, causally, to its own keys. A chain is one segment
without ancestors: plain causal attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agentrl.data.forest import Ints, TokenForest
from agentrl.errors import ModelError
from agentrl.model.routing import routing_input
from agentrl.model.vision import forest_inputs

IMPLEMENTATION = "agentrl_segments"


def set_attention(model: Any, implementation: str) -> None:
    """Make every attention layer use ``implementation``; ModelError if the model does not support it."""
    text = model.config.get_text_config()
    if text._attn_implementation == implementation:
        return
    hint = "use a model that transformers runs through its attention interface (Llama, Qwen, Mistral, …)"
    name = type(model).__name__
    try:
        if text is model.config:
            model.set_attn_implementation(implementation)
        else:  # the vision tower keeps its own
            model.set_attn_implementation({"text_config": implementation})
    except ValueError as error:
        raise ModelError(f"{name} has no {implementation!r} attention: {error}", hint=hint) from error
    if text._attn_implementation != implementation:
        raise ModelError(f"{name} does not let its attention be set to {implementation!r}", hint=hint)


def check_call(module: Any, lacking: str | None, softcap: float | None, s_aux: Tensor | None) -> None:
    """Raise ModelError for an attention layer that no executor called, or that computes more than they do.

    ``lacking`` is what the call should have been given; None: nothing.
    """
    name = type(module).__name__
    if lacking is not None:
        raise ModelError(
            f"{name} was called without a {lacking}",
            hint='run it through build_executor, or call model.set_attn_implementation("sdpa") before',
        )
    if softcap is not None or s_aux is not None:
        raise ModelError(f"{name} caps its scores or has attention sinks", hint="use a model without them")


@dataclass(frozen=True, slots=True)
class Segment:
    """An unbranched run of tokens ``[start, end)``, each the parent of the next, and their ancestors."""

    start: int
    end: int
    ancestors: tuple[tuple[int, int], ...]
    """Token ranges from the root to the segment's parent; empty at a root."""

    @property
    def ancestor_count(self) -> int:
        """Number of tokens on the path before the segment."""
        return sum(end - start for start, end in self.ancestors)

    @property
    def path(self) -> list[tuple[int, int]]:
        """Token ranges from the root to the segment's end; adjacent ranges are joined."""
        joined: list[tuple[int, int]] = []
        for start, end in (*self.ancestors, (self.start, self.end)):
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, end))
        return joined


def split_segments(forest: TokenForest) -> list[Segment]:
    """Split ``forest`` into segments, in order; they cover its tokens without overlap."""
    starts = np.flatnonzero(forest.parent != np.arange(forest.tokens) - 1)
    # Add the first token: its parent, −1, looks like the token before it.
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
    """How to split keys and values, so that each segment's path is a concatenation of pieces.

    Tokens are cut where a segment begins and where another branches off. The gradient of a piece has the
    piece's length; that of a slice would have the length of the forest.
    """

    segments: tuple[int, ...]
    """Length of each segment in tokens."""
    pieces: tuple[int, ...]
    """Length of each piece in tokens; the pieces cover the forest without overlap."""
    paths: tuple[tuple[int, ...], ...]
    """Indices of the pieces that each segment sees, from the root to its own."""


def plan_segments(segments: list[Segment]) -> SegmentPlan:
    """Return the plan of ``segments``, which cover the tokens of a forest."""
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
    """Return hidden states [N, H] of the forest; no token is computed twice."""
    set_attention(model, IMPLEMENTATION)
    device = model.device
    segments = split_segments(forest)
    output = model.get_decoder()(
        **forest_inputs(model, forest),
        attention_mask=None,
        use_cache=False,
        **routing_input(forest, device),
        segment_plan=plan_segments(segments),
        segment_masks=[segment_mask(segment, device) for segment in segments],
    )
    return cast(Tensor, output.last_hidden_state[0])


def segment_mask(segment: Segment, device: torch.device) -> Tensor | None:
    """Return bool[m, ancestors + m], what a segment's m queries see; None for plain causal attention."""
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
    segment_plan: SegmentPlan | None = None,
    segment_masks: list[Tensor | None] | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Compute attention along each path of the forest, as transformers' attention interface calls it.

    query [1, heads, N, d]; key and value [1, key-value heads, N, d]; returns ([1, N, heads, d], None).
    Raises ModelError without a plan, and for a layer with capped scores or attention sinks.
    """
    check_call(module, "segment plan" if segment_plan is None else None, softcap, s_aux)
    assert segment_plan is not None
    assert segment_masks is not None
    keys, values = (states.split_with_sizes(segment_plan.pieces, 2) for states in (key, value))
    outputs = [
        scaled_dot_product_attention(
            states,
            _joined([keys[piece] for piece in path]),
            _joined([values[piece] for piece in path]),
            attn_mask=mask,
            dropout_p=dropout,
            # Say it without a mask where possible: SDPA's flash kernel takes none.
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2)
        for states, path, mask in zip(
            query.split_with_sizes(segment_plan.segments, 2), segment_plan.paths, segment_masks, strict=True
        )
    ]
    return _joined(outputs, 1), None


def _joined(pieces: list[Tensor], dim: int = 2) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


AttentionInterface.register(IMPLEMENTATION, segment_attention)


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
        **routing_input(forest, device),
    )
    return cast(Tensor, output.last_hidden_state[0])


def run_per_sequence(model: Any, forest: TokenForest) -> Tensor:
    """Return hidden states [N, H] from one call per path; a shared prefix is computed once per path."""
    pieces = [
        _run(model, forest, _path_tokens(segment)[None])[0, segment.ancestor_count :]
        for segment in split_segments(forest)
    ]
    return torch.cat(pieces)


def run_per_sequence_padded(model: Any, forest: TokenForest) -> Tensor:
    """Return what ``run_per_sequence`` returns, from one call: a path is a row, padded at its end."""
    segments = split_segments(forest)
    rows = np.zeros((len(segments), forest.depth), dtype=np.int64)
    for row, segment in zip(rows, segments, strict=True):
        tokens = _path_tokens(segment)
        row[: len(tokens)] = tokens
    hidden = _run(model, forest, rows)
    pieces = [
        states[segment.ancestor_count :][: segment.end - segment.start]
        for states, segment in zip(hidden, segments, strict=True)
    ]
    return torch.cat(pieces)


def _path_tokens(segment: Segment) -> Ints:
    """Return the places in the forest from the root to the end of ``segment``."""
    return np.concatenate([np.arange(start, end) for start, end in segment.path])


def _run(model: Any, forest: TokenForest, rows: Ints) -> Tensor:
    """Return hidden states [P, L, H] of sequences of the forest's tokens, int64[P, L]."""
    set_attention(model, "sdpa")
    output = model.get_decoder()(
        input_ids=torch.from_numpy(forest.input_ids[rows]).to(model.device),
        # Pass no mask: rows are padded at their ends, which causal attention does not see.
        attention_mask=None,
        use_cache=False,
        **routing_input(forest, model.device, rows.reshape(-1)),
    )
    hidden: Tensor = output.last_hidden_state
    return hidden
