"""Attention over the segments of a forest, in memory that grows with its tokens and not with their pairs.

No mask is needed: a segment's queries attend to all of its ancestors and, causally, to the segment itself.
The two results are added up by their log-sum-exp. Only the CPU's kernel gives it; elsewhere, where
FlexAttention cannot run, queries are computed under masks, a tile at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

TILE = 64
"""Queries that are computed at once under a mask."""


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
        return _adjacent_joined((*self.ancestors, (self.start, self.end)))

    @property
    def path_above(self) -> list[tuple[int, int]]:
        """Token ranges of ``ancestors``; adjacent ranges are joined."""
        return _adjacent_joined(self.ancestors)

    @property
    def mask_entries(self) -> int:
        """Number of entries of its ``mask``; 0 without one."""
        length = self.end - self.start
        return length * (self.ancestor_count + length) if self.ancestors else 0

    def mask(self, device: torch.device) -> Tensor | None:
        """Return bool[m, ancestors + m], what its m queries see; None for plain causal attention."""
        if not self.ancestors:
            return None
        before, length = self.ancestor_count, self.end - self.start
        return torch.ones(length, before + length, dtype=torch.bool, device=device).tril(before)

    def part(self, start: int, end: int) -> Segment:
        """Return the tokens ``[start, end)`` of the segment; those before them are ancestors too."""
        own = ((self.start, start),) if start > self.start else ()
        return Segment(start, end, (*self.ancestors, *own))


def _adjacent_joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return joined


class Exchange(Protocol):
    """Ranks that hold the keys and values of a forest together; see ``TokenExchange``."""

    def gather(self, local: Tensor) -> Tensor:
        """Return [1, heads, N, d] of all ranks, in the forest's order, from this rank's [1, heads, n, d]."""

    def scatter_sum(self, whole: Tensor) -> Tensor:
        """Return this rank's part, [1, heads, n, d], of the sum over ranks of ``whole`` [1, heads, N, d]."""


def path_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[Segment],
    scaling: float | None,
    exchange: Exchange | None = None,
) -> Tensor:
    """Return attention along each path, [1, heads, n, d], in memory that grows with n alone.

    query [1, heads, n, d]; key and value [1, key-value heads, n, d]. ``segments`` cover the n tokens in
    order. With an ``exchange``, the n tokens are those of one rank, and segments count tokens of the forest.
    """
    output: Tensor = _PathAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, segments, scaling, exchange
    )
    return output


class _PathAttention(torch.autograd.Function):
    """Saves this rank's tokens only; the backward gathers keys and values, and joins paths, again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Sequence[Segment],
        scaling: float | None,
        exchange: Exchange | None,
    ) -> Tensor:
        keys, values = (each if exchange is None else exchange.gather(each) for each in (key, value))
        attend = _merged if _can_merge(query, value) else _masked
        found = [
            attend(part, keys, values, segment, scaling)
            for part, segment in zip(_parts(query, segments), segments, strict=True)
        ]
        output = torch.cat([part for part, _ in found], 2)
        sums = [total for _, total in found if total is not None]
        saved = [output, torch.cat(sums, 2)] if sums else []
        ctx.save_for_backward(query, key, value, *saved)
        ctx.others = segments, scaling, exchange
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *saved = ctx.saved_tensors
        segments, scaling, exchange = ctx.others
        keys, values = (each if exchange is None else exchange.gather(each) for each in (key, value))
        totals = torch.zeros_like(keys, dtype=torch.float32), torch.zeros_like(values, dtype=torch.float32)
        back = _merged_gradients if saved else _masked_gradients
        split = [_parts(states, segments) for states in (query, grads[0], *saved)]
        found = [
            back([states[index] for states in split], keys, values, totals, segment, scaling)
            for index, segment in enumerate(segments)
        ]
        grad_key, grad_value = (
            (total if exchange is None else exchange.scatter_sum(total)).to(key.dtype) for total in totals
        )
        return torch.cat(found, 2), grad_key, grad_value, None, None, None


def _can_merge(query: Tensor, value: Tensor) -> bool:
    """Return whether torch has a kernel that returns the log-sum-exp of a path's scores: on the CPU."""
    return query.device.type == "cpu" and query.shape[3] == value.shape[3]


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _merged(
    query: Tensor, keys: Tensor, values: Tensor, segment: Segment, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Return [1, heads, m, d] of a segment's m queries and their log-sum-exp, float32[1, heads, m].

    Adds up attention to the segment and to its ancestors as Ring Attention does (arXiv 2310.01889).
    """
    heads = query.shape[1]
    output, total = _flash(query, *_own(heads, keys, values, segment), 0.0, True, scale=scaling)
    if not segment.ancestors:
        return output, total
    stacked = _stacked(query, keys)
    others = _flash(stacked, *_above(keys, values, segment), 0.0, False, scale=scaling)
    above, above_total = (_unstacked(each, heads) for each in others)
    joint = torch.logaddexp(total, above_total)
    own_share, above_share = ((each - joint).exp()[..., None] for each in (total, above_total))
    return (output * own_share + above * above_share).to(query.dtype), joint


def _merged_gradients(
    parts: Sequence[Tensor],
    keys: Tensor,
    values: Tensor,
    totals: tuple[Tensor, Tensor],
    segment: Segment,
    scaling: float | None,
) -> Tensor:
    """Return the gradient of a segment's queries, and add those of keys and values to ``totals``.

    ``parts`` are queries, gradient, output and log-sum-exp. The latter two are those of the whole path: with
    them, the gradients of its two pieces are exact and add up.
    """
    query, grad, output, joint = (part.contiguous() for part in parts)
    heads, groups = query.shape[1], query.shape[1] // keys.shape[1]
    grad_query, *found = _flash_gradients(
        grad, query, *_own(heads, keys, values, segment), output, joint, 0.0, True, scale=scaling
    )
    for total, each in zip(totals, found, strict=True):
        total[:, :, segment.start : segment.end] += each.unflatten(1, (-1, groups)).sum(2)
    if segment.ancestors:
        query, grad, output, joint = (_stacked(part, keys) for part in (query, grad, output, joint))
        above, *found = _flash_gradients(
            grad, query, *_above(keys, values, segment), output, joint, 0.0, False, scale=scaling
        )
        grad_query = grad_query + _unstacked(above, heads)
        _add_along(totals, found, segment.path_above)
    return cast(Tensor, grad_query)


def _own(heads: int, keys: Tensor, values: Tensor, segment: Segment) -> Iterator[Tensor]:
    """Yield keys and values of a segment's own tokens, [1, heads, m, d]."""
    for states in (keys, values):
        yield states[:, :, segment.start : segment.end].repeat_interleave(heads // states.shape[1], 1)


def _above(keys: Tensor, values: Tensor, segment: Segment) -> Iterator[Tensor]:
    """Yield keys and values of a segment's ancestors, [1, key-value heads, ancestors, d]."""
    for states in (keys, values):
        yield _along(states, segment.path_above)


def _stacked(states: Tensor, keys: Tensor) -> Tensor:
    """Return [1, key-value heads, groups × m, …]: heads with the same keys, one behind the other."""
    return states.reshape(1, keys.shape[1], -1, *states.shape[3:])


def _unstacked(states: Tensor, heads: int) -> Tensor:
    return states.reshape(1, heads, -1, *states.shape[3:])


def _masked(
    query: Tensor, keys: Tensor, values: Tensor, segment: Segment, scaling: float | None
) -> tuple[Tensor, None]:
    """Return [1, heads, m, d] of a segment's m queries, one tile after the other; and None."""
    tiles = _tiles(segment)
    outputs = [
        _attend(part, _along(keys, tile.path), _along(values, tile.path), tile, scaling)
        for part, tile in zip(_parts(query, tiles), tiles, strict=True)
    ]
    return torch.cat(outputs, 2), None


def _masked_gradients(
    parts: Sequence[Tensor],
    keys: Tensor,
    values: Tensor,
    totals: tuple[Tensor, Tensor],
    segment: Segment,
    scaling: float | None,
) -> Tensor:
    """Return what ``_merged_gradients`` does; ``parts`` are queries and gradient. Builds masks again."""
    tiles = _tiles(segment)
    found = []
    for query, grad, tile in zip(*(_parts(part, tiles) for part in parts), tiles, strict=True):
        states = (query, _along(keys, tile.path), _along(values, tile.path))
        inputs = [each.detach().requires_grad_(True) for each in states]
        with torch.enable_grad():
            output = _attend(inputs[0], inputs[1], inputs[2], tile, scaling)
        grad_query, *others = torch.autograd.grad(output, inputs, grad)
        found.append(grad_query)
        _add_along(totals, others, tile.path)
    return torch.cat(found, 2)


def _tiles(segment: Segment) -> list[Segment]:
    """Return parts of at most ``TILE`` tokens, which bound a mask; the segment itself if it needs none."""
    if not segment.ancestors:
        return [segment]
    starts = range(segment.start, segment.end, TILE)
    return [segment.part(start, min(start + TILE, segment.end)) for start in starts]


def _attend(query: Tensor, key: Tensor, value: Tensor, segment: Segment, scaling: float | None) -> Tensor:
    """Return [1, heads, m, d] of a segment's m queries, which see its ancestors and, causally, themselves."""
    mask = segment.mask(query.device)
    if mask is None:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    stacked = _stacked(query, key)
    mask = mask.repeat(query.shape[1] // key.shape[1], 1)
    output = scaled_dot_product_attention(stacked, key, value, attn_mask=mask, scale=scaling)
    return _unstacked(output, query.shape[1])


def _parts(states: Tensor, segments: Sequence[Segment]) -> tuple[Tensor, ...]:
    """Split [1, heads, n, …] by segment; the segments cover the n tokens in order."""
    return torch.split(states, [segment.end - segment.start for segment in segments], 2)


def _along(states: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Return the states of token ranges, one behind the other; a view of a single range."""
    pieces = [states[:, :, start:end] for start, end in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)


def _add_along(
    totals: tuple[Tensor, Tensor], found: Sequence[Tensor], ranges: Sequence[tuple[int, int]]
) -> None:
    """Add gradients of ``_along(states, ranges)`` of keys and values to ``totals``, those of the states."""
    for total, each in zip(totals, found, strict=True):
        done = 0
        for start, end in ranges:
            total[:, :, start:end] += each[:, :, done : done + end - start]
            done += end - start
