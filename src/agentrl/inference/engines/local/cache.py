"""KV cache of the local engine: contiguous rows per sequence, kept after its request for prefix reuse."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.data.forest_cuts import common_prefix
from agentrl.documents.routing import ExpertShape
from agentrl.inference.engines.local.adapters import LoadedAdapter

_ROUND = 64
_KEEP = 256


@dataclass(slots=True, eq=False)
class Slot:
    """One sequence in the cache: rows from ``start`` on hold keys and values of ``tokens[:computed]``."""

    tokens: NDArray[np.int32]
    adapter: LoadedAdapter | None = None
    """The adapter that computed the rows; no request of another one reuses them."""
    computed: int = 0
    start: int = 0
    capacity: int = 0
    busy: bool = True
    used_at: int = 0


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """``length`` tokens of a prompt are cached in ``slot``; ``pending`` after the running prefills."""

    slot: Slot | None
    length: int
    pending: int


class KVCache:
    """Keys and values of ``max_tokens`` tokens: two tensors [max_tokens, kv_heads, head_dim] per layer.

    The rows of a slot are contiguous, so that attention reads them without a gather; a slot that needs more
    rows moves. The lowest free rows are used first, because the system allocates memory at the first write.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        max_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        experts: ExpertShape | None = None,
    ) -> None:
        self._shape = (max_tokens, num_kv_heads, head_dim)
        self._layers, self._dtype, self._device = num_layers, dtype, device
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.experts: Tensor | None = None
        """int16 [max_tokens, layers, k], the experts of each row's token, in a mixture."""
        if experts is not None:
            size = (max_tokens, experts.layers, experts.top_k)
            self.experts = torch.zeros(size, dtype=torch.int16, device=device)
        self.max_tokens = max_tokens
        self._slots: list[Slot] = []
        self._clock = 0
        self.allocate()

    def allocate(self) -> None:
        """Allocate the tensors, unless they are there."""
        while len(self.keys) < self._layers:
            for tensors in (self.keys, self.values):
                tensors.append(torch.empty(self._shape, dtype=self._dtype, device=self._device))

    def free(self) -> None:
        """Drop the tensors; no sequence may be busy."""
        self.drop_idle()
        self.keys.clear()
        self.values.clear()

    def match(self, prompt: NDArray[np.int32], adapter: LoadedAdapter | None) -> PrefixMatch:
        """Return the slot of ``adapter`` with the longest computed prefix of ``prompt`` without its end."""
        best, length, pending = None, 0, 0
        for slot in self._slots:
            if slot.adapter is not adapter:
                continue
            common = min(common_prefix(slot.tokens, prompt), len(prompt) - 1)
            pending = max(pending, common)
            ready = min(common, slot.computed)
            if ready > length or (ready == length > 0 and best is not None and best.busy and not slot.busy):
                best, length = slot, ready
        return PrefixMatch(best, length, pending)

    def acquire(
        self, prompt: NDArray[np.int32], match: PrefixMatch, rows: int, adapter: LoadedAdapter | None
    ) -> Slot | None:
        """Return a busy slot of ``rows`` rows that holds the match; None if running sequences need the space.

        A finished sequence with few tokens beyond the match is continued in place; otherwise the match is
        copied.
        """
        source, length = match.slot, match.length
        if source is not None and not source.busy and source.computed - length <= max(16, length // 4):
            source.tokens, source.computed, source.busy = prompt, length, True
            if self.grow(source, rows):
                return source
            source.busy = False
            source.tokens = prompt[:length]
            return None
        slot = Slot(prompt, adapter)
        if not self._place(slot, rows, keep=source):
            source = None
            if not self._place(slot, rows, keep=None):
                return None
        if source is not None:
            self._copy(source.start, slot.start, length)
            slot.computed = length
        self._slots.append(slot)
        return slot

    def grow(self, slot: Slot, rows: int) -> bool:
        """Give a busy slot at least ``rows`` rows; return False if running sequences need the space."""
        if rows <= slot.capacity:
            return True
        start, capacity = slot.start, slot.capacity
        slot.capacity = 0
        if not self._place(
            slot, max(rows, min(rows * 3 // 2, self.max_tokens)), keep=None
        ) and not self._place(slot, rows, keep=None):
            slot.start, slot.capacity = start, capacity
            return False
        if slot.start != start:
            self._copy(start, slot.start, slot.computed)
        return True

    def chosen_experts(self, slot: Slot, start: int, end: int) -> NDArray[np.int32] | None:
        """Return the experts [n, layers, k] of tokens ``[start, end)``; None if one is not computed."""
        if self.experts is None or not start < end <= slot.computed:
            return None
        return self.experts[slot.start + start : slot.start + end].cpu().numpy().astype("<i4")

    def release(self, slot: Slot, tokens: NDArray[np.int32]) -> None:
        """Release a slot; its computed part of ``tokens`` stays for reuse until the rows are needed."""
        self._clock += 1
        slot.tokens = tokens[: slot.computed].copy()
        slot.busy, slot.used_at = False, self._clock
        idle = [item for item in self._slots if not item.busy]
        if slot.computed == 0 or len(idle) > _KEEP:
            self._slots.remove(min(idle, key=lambda item: (item.computed > 0, item.used_at)))

    def drop_idle(self, adapter: LoadedAdapter | None = None) -> None:
        """Drop every idle sequence, or those of ``adapter``."""
        self._slots = [slot for slot in self._slots if slot.busy or adapter not in (None, slot.adapter)]

    def _place(self, slot: Slot, rows: int, keep: Slot | None) -> bool:
        """Assign the lowest free range of ``rows`` rows to ``slot``; drop idle sequences as needed."""
        rows = min(-(-rows // _ROUND) * _ROUND, self.max_tokens)
        while True:
            start = self._lowest_free(rows)
            if start is not None:
                slot.start, slot.capacity = start, rows
                return True
            idle = [item for item in self._slots if not item.busy and item is not keep]
            if not idle:
                return False
            self._slots.remove(min(idle, key=lambda item: item.used_at))

    def _lowest_free(self, rows: int) -> int | None:
        end = 0
        for start, capacity in sorted((slot.start, slot.capacity) for slot in self._slots if slot.capacity):
            if start - end >= rows:
                return end
            end = start + capacity
        return end if self.max_tokens - end >= rows else None

    def _copy(self, source: int, target: int, length: int) -> None:
        overlap = abs(source - target) < length
        for tensor in (*self.keys, *self.values, *([] if self.experts is None else [self.experts])):
            rows = tensor[source : source + length]
            tensor[target : target + length] = rows.clone() if overlap else rows
