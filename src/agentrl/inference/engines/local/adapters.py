"""LoRA adapters of the local engine: read peft's files, and add each adapter to its rows of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from agentrl.errors import ModelError
from agentrl.model.lora import read_adapter

_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None), "use_rslora": (False, None), "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None), "alpha_pattern": ({}, None), "modules_to_save": (None, []),
    "bias": ("none", None), "lora_bias": (False, None),
}  # fmt: skip
"""Settings of peft, and the values with which an adapter is y = W x + scale · B (A x)."""


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """One adapter in memory. Two with the same name are different adapters: they are compared by identity."""

    name: str
    path: str
    scale: float
    layers: Mapping[str, tuple[Tensor, Tensor]]
    """Name of a linear layer → A transposed [inputs, rank], B transposed [rank, outputs]."""


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
            if (pair := adapter.layers.get(self._name)) is not None:
                output[0, first:end].addmm_(x[0, first:end] @ pair[0], pair[1], alpha=adapter.scale)
        return output


def load_adapter(
    name: str, folder: str, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> LoadedAdapter:
    """Read the adapter in ``folder``, which peft wrote, for linear layers of ``shapes`` (outputs, inputs).

    It is held in ``dtype``, that of the model's products. Raises ModelError if the files cannot be read, name
    a layer that the model lacks, or describe more than a plain LoRA.
    """
    config, tensors = read_adapter(Path(folder))
    odd = [key for key, plain in _PLAIN.items() if config.get(key) not in plain]
    if odd:
        raise ModelError(
            f"the adapter in {folder} sets {', '.join(odd)}, which the local engine does not support",
            hint="merge it: python -m agentrl.model.merge_adapter ADAPTER BASE TARGET",
        )
    layers: dict[str, tuple[Tensor, Tensor]] = {}
    for key in tensors:
        layer, kind, _ = key.rpartition(".lora_A.")
        if not kind:
            if ".lora_B." not in key:
                raise ModelError(
                    f"the adapter in {folder} has a tensor {key}; LoRA has lora_A and lora_B only"
                )
            continue
        a, b = tensors[key], tensors.get(key.replace(".lora_A.", ".lora_B."))
        if b is None or shapes.get(layer) != (b.shape[0], a.shape[1]) or a.shape[0] != b.shape[1]:
            raise ModelError(
                f"the adapter in {folder} does not fit the model: {layer} with A {list(a.shape)} and B"
                f" {None if b is None else list(b.shape)}; the layer is {shapes.get(layer, 'missing')}"
            )
        if b.any():  # as it begins, and stays in a frozen layer: it adds nothing
            layers[layer] = (_held(a, dtype, device), _held(b, dtype, device))
    return LoadedAdapter(name, folder, config["lora_alpha"] / config["r"], layers)


def _held(weight: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``weight`` transposed, in memory of its own: the file may be deleted."""
    return weight.to(device=device, dtype=dtype, copy=True).t()
