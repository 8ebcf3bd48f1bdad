"""Measure how far two sets of weights lie apart, and how much of a change rounding leaves."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.errors import ModelError
from agentrl.weights.folder import tensor_files

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """The distance of two sets of weights in one layer; both are Euclidean norms."""

    layer: str
    """``layer 3``, or the name of a tensor outside the layers."""
    difference: float
    norm: float
    """Of the first set."""

    @property
    def relative(self) -> float:
        """``difference`` as a share of ``norm``."""
        return self.difference / self.norm if self.norm else 0.0


@dataclass
class Rounding:
    """Sums over this rank's weights: Δ², and Δ times the change that is left after rounding."""

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
        """Return the share of Δ that is left on all ranks, about 0 to 1, and reset; None without a Δ.

        Every rank calls it.
        """
        sums = [(self.whole, self.kept)]
        if dist.is_initialized():
            sums *= dist.get_world_size()
            dist.all_gather_object(sums, (self.whole, self.kept))
        self.whole = self.kept = 0.0
        whole, kept = (sum(column) for column in zip(*sums, strict=True))
        return kept / whole if whole else None


def layer_differences(first: Path, second: Path) -> list[LayerDifference]:
    """Compare the ``.safetensors`` files of two folders, one tensor at a time.

    Raises ModelError for folders with other tensors or that cannot be read.
    """
    names = _names(first)
    if names.keys() != (other := _names(second)).keys():
        unknown = sorted(names.keys() ^ other.keys())
        raise ModelError(f"{first} and {second} hold other tensors, {unknown[0]} among them")
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, file in names.items():
        one, two = _read(file, name), _read(other[name], name)
        if one.shape != two.shape:
            raise ModelError(
                f"{name} has the shape {list(one.shape)} in {first}, and {list(two.shape)} in {second}"
            )
        found = _LAYER.search(name)
        total = sums[f"layer {found[1]}" if found else name]
        total[0] += float((one - two).square().sum())
        total[1] += float(one.square().sum())
    return [
        LayerDifference(layer, math.sqrt(apart), math.sqrt(norm)) for layer, (apart, norm) in sums.items()
    ]


def _names(folder: Path) -> dict[str, Path]:
    """Return {tensor: file}, layers in order of their number."""
    found = {name: file for file in tensor_files(folder) for name in _keys(file)}
    if not found:
        raise ModelError(f"{folder} holds no weights: no file *.safetensors")
    return dict(sorted(found.items(), key=lambda item: _place(item[0])))


def _place(name: str) -> tuple[int, str]:
    found = _LAYER.search(name)
    return (int(found[1]) if found else -1, name)


def _keys(file: Path) -> Iterator[str]:
    try:
        with safe_open(file, "pt") as content:
            yield from content.keys()
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as content:
        tensor: Tensor = content.get_tensor(name)
    return tensor.double()
