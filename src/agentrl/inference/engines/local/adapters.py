"""LoRA adapters of the local engine: read peft's files, and add each adapter to its rows of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from agentrl.model.lora import read_layers


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """One adapter in memory. Two with the same name are different adapters: they are compared by identity."""

    name: str
    path: str
    layers: Mapping[str, tuple[Tensor, Tensor, float]]
    """Name of a linear layer → A transposed [inputs, rank], B transposed [rank, outputs], scale."""


@dataclass(slots=True)
class AdapterRows:
    """Which rows of the current batch belong to which adapter: (adapter, first row, end)."""

    segments: Sequence[tuple[LoadedAdapter, int, int]] = ()

    def assign(self, adapters: Sequence[LoadedAdapter | None], counts: Sequence[int]) -> None:
        """Begin a batch of chunks with ``adapters`` and ``counts`` rows; join neighbours of an adapter."""
        segments: list[tuple[LoadedAdapter, int, int]] = []
        end = 0
        for adapter, count in zip(adapters, counts, strict=True):
            first, end = end, end + count
            if adapter is None:
                continue
            if segments and segments[-1][0] is adapter and segments[-1][2] == first:
                first = segments.pop()[1]
            segments.append((adapter, first, end))
        self.segments = segments


class AdaptedLinear(nn.Module):
    """A linear layer that adds scale · B (A x) to the rows of each adapter."""

    def __init__(self, name: str, base: nn.Module, rows: AdapterRows) -> None:
        super().__init__()
        self.base = base
        self._name = name
        self._rows = rows

    def forward(self, x: Tensor) -> Tensor:
        """Return [1, rows, outputs] for x [1, rows, inputs]."""
        output = cast("Tensor", self.base(x))
        for adapter, first, end in self._rows.segments:
            if (layer := adapter.layers.get(self._name)) is not None:
                a, b, scale = layer
                output[0, first:end].addmm_(x[0, first:end] @ a, b, alpha=scale)
        return output


def load_adapter(
    name: str, folder: str, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> LoadedAdapter:
    """Read the adapter in ``folder``, which peft wrote, for linear layers of ``shapes`` (outputs, inputs).

    It is held in ``dtype``, that of the model's products. Raises ModelError as ``read_layers`` does.
    """
    layers = {
        layer: (_held(each.a, dtype, device), _held(each.b, dtype, device), each.scale)
        for layer, each in read_layers(Path(folder), shapes).items()
    }
    return LoadedAdapter(name, folder, layers)


def _held(weight: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``weight`` transposed, in memory of its own: the file may be deleted."""
    return weight.to(device=device, dtype=dtype, copy=True).t()
