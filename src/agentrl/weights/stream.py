"""Writes a model's weights a safetensors file at a time: no more than one file of them is in memory."""

from __future__ import annotations

import itertools
import json
import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

FILE_BYTES = 2 << 30
"""The most that a file of weights holds, unless one layer is more."""
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Part:
    """One tensor of a model."""

    name: str
    like: Tensor
    """Of the tensor's shape and dtype."""
    make: Callable[[], Tensor]
    """The tensor; a DTensor where several processes hold it."""

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return self.like.numel() * self.like.element_size()


def model_parts(model: Any) -> Iterator[Part]:
    """The tensors of ``model`` in the order of its state dict, tied ones once."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield Part(name, tensor, tensor.detach)


def write_files(
    model: Any,
    folder: Path,
    parts: Sequence[Part],
    fetch: Callable[[Part], Tensor],
    limit: int = FILE_BYTES,
) -> None:
    """Write ``parts`` into files of at most ``limit`` bytes, their index and the model's configuration.

    ``fetch`` is called for one part after the other and returns it whole on the CPU. The files are those that
    transformers writes and reads: what it fuses when it loads a model is taken apart again.
    """
    files = plan_files(model, parts, limit)
    place: dict[str, str] = {}
    for number, group in enumerate(files, 1):
        name = _WHOLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        weights = {part.name: fetch(part) for part in group}
        place |= dict.fromkeys(_write_file(model, folder, weights, name), name)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(part.bytes for part in parts)}, "weight_map": place}
        (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def plan_files(model: Any, parts: Sequence[Part], limit: int) -> list[list[Part]]:
    """The parts of each file, in order. A layer stays whole: transformers takes its tensors apart together.

    It is one file, whatever its size, for a model that transformers cannot take apart layer by layer.
    """
    files: list[list[Part]] = []
    size = 0
    for _, members in itertools.groupby(parts, key=_layer):
        group = list(members)
        more = sum(part.bytes for part in group)
        if not files or size + more > limit:
            files.append([])
            size = 0
        files[-1] += group
        size += more
    if _original_names(model, [parts]) == _original_names(model, files):
        return files
    logger.warning("%s is written as one file: its layers depend on each other", type(model).__name__)
    return [list(parts)]


def _write_file(model: Any, folder: Path, weights: dict[str, Tensor], name: str) -> list[str]:
    """Write one file, and the configuration beside it; returns the names of its tensors."""
    from safetensors import safe_open

    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch:
        model.save_pretrained(scratch, state_dict=weights, max_shard_size=sys.maxsize)
        for path in Path(scratch).iterdir():
            shutil.move(path, folder / (name if path.name == _WHOLE else path.name))
    with safe_open(folder / name, "pt") as written:
        return list(written.keys())


def _original_names(model: Any, files: Sequence[Sequence[Part]]) -> set[tuple[str, torch.Size]]:
    """Names and shapes that transformers writes for each file, without its numbers."""
    from transformers.core_model_loading import revert_weight_conversion

    found: set[tuple[str, torch.Size]] = set()
    for group in files:
        empty = {part.name: torch.empty(part.like.shape, dtype=part.like.dtype, device="meta")
                 for part in group}  # fmt: skip
        found |= {(name, value.shape) for name, value in revert_weight_conversion(model, empty).items()}
    return found


def _layer(part: Part) -> str:
    """``model.layers.3`` for what lies in it, else the part's own name."""
    found = re.match(r"(.*?\.\d+)\.", part.name)
    return found[1] if found else part.name
