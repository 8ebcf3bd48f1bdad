"""Measure how much of what training has changed is left once weights are rounded to the dtype of engines."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass
class Rounding:
    """Sums over weights that this rank holds: Δ², and Δ times what is left of it after rounding."""

    whole: float = 0.0
    kept: float = 0.0

    def add(self, delta: Tensor, written: Tensor, times: float = 1.0) -> None:
        """Add a layer: its Δ, and the difference that the rounded weights make.

        A sample stands for ``times`` as many weights.
        """
        delta, written = (each.to_local() if isinstance(each, DTensor) else each for each in (delta, written))
        self.whole += times * float((delta * delta).sum(dtype=torch.float64))
        self.kept += times * float((delta * written).sum(dtype=torch.float64))

    def take_share(self) -> float | None:
        """Return the share of Δ that survived on all ranks, about 0 to 1, and start again; None without a Δ.

        Every rank calls it.
        """
        sums = [(self.whole, self.kept)]
        if dist.is_initialized():
            sums *= dist.get_world_size()
            dist.all_gather_object(sums, (self.whole, self.kept))
        self.whole = self.kept = 0.0
        whole, kept = (sum(column) for column in zip(*sums, strict=True))
        return kept / whole if whole else None
