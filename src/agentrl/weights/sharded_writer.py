"""Write the weights that engines load, rounded once, one safetensors file in memory at a time.

``huggingface_hub.save_torch_state_dict`` would need the whole state dict in memory, and would write fused
tensors as they are instead of in the form in which transformers loads them.
"""

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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.weights.folder import write_dtype

logger = logging.getLogger(__name__)


FILE_BYTES = 2 << 30
"""Largest size of a file of weights; a single larger layer still goes into one file."""
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Part:
    """One tensor of a model."""

    name: str
    like: Tensor
    """A tensor of the same shape and dtype, possibly on the meta device."""
    make: Callable[[], Tensor]
    """Returns the tensor; a DTensor if it is sharded over several processes."""

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.like.numel() * self.like.element_size()


def model_parts(model: Any) -> Iterator[Part]:
    """Yield the tensors of ``model`` in the order of its state dict; tied tensors once."""
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
    """Write ``parts`` into files of at most ``limit`` bytes, with their index and the model's configuration.

    ``fetch`` is called once per part, in order, and returns the whole tensor on the CPU. The files have the
    form that transformers reads and writes: tensors that it fuses when it loads a model are split again.
    """
    files = plan_files(model, parts, limit)
    file_of: dict[str, str] = {}
    for number, group in enumerate(files, 1):
        name = _WHOLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        weights = {part.name: fetch(part) for part in group}
        file_of |= dict.fromkeys(_write_file(model, folder, weights, name), name)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(part.bytes for part in parts)}, "weight_map": file_of}
        (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def plan_files(model: Any, parts: Sequence[Part], limit: int) -> list[list[Part]]:
    """Return the parts of each file, in order; a layer stays in one file, so that it can be split again.

    A model that transformers cannot split layer by layer is written as one file of any size.
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
    """Write one file and the model's configuration; return the names of the tensors in the file."""
    from safetensors import safe_open

    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch:
        model.save_pretrained(scratch, state_dict=weights, max_shard_size=sys.maxsize)
        for path in Path(scratch).iterdir():
            shutil.move(path, folder / (name if path.name == _WHOLE else path.name))
    with safe_open(folder / name, "pt") as written:
        return list(written.keys())


def _original_names(model: Any, files: Sequence[Sequence[Part]]) -> set[tuple[str, torch.Size]]:
    """Return the tensor names and shapes that transformers writes, computed on the meta device."""
    from transformers.core_model_loading import revert_weight_conversion

    found: set[tuple[str, torch.Size]] = set()
    for group in files:
        empty = {part.name: torch.empty(part.like.shape, dtype=part.like.dtype, device="meta")
                 for part in group}  # fmt: skip
        found |= {(name, value.shape) for name, value in revert_weight_conversion(model, empty).items()}
    return found


def _layer(part: Part) -> str:
    """Return the layer of a part, such as ``model.layers.3``; the part's own name outside of layers."""
    found = re.match(r"(.*?\.\d+)\.", part.name)
    return found[1] if found else part.name


@dataclass(frozen=True)
class PublishedModel:
    """A SavableModel: the tensors of ``source`` in ``dtype``, each converted when it is written."""

    model: Any
    source: Callable[[], Iterator[Part]]
    dtype: torch.dtype | None
    """None: the tensors keep their dtype."""

    def parts(self) -> Iterator[Part]:
        """Yield the tensors, converted where they are; those that the model keeps in float32 stay so."""
        kept = () if self.dtype is None else self.model._get_dtype_plan(self.dtype)
        pattern = re.compile("|".join(key.replace("*", ".*") for key in kept) or r"(?!)")
        for part in self.source():
            converts = part.like.is_floating_point() and not pattern.search(part.name)
            dtype = self.dtype if converts and self.dtype is not None else part.like.dtype
            like = torch.empty(part.like.shape, dtype=dtype, device="meta")
            yield Part(part.name, like, partial(_converted, part, dtype))

    def write(
        self, folder: Path, parts: list[Part], fetch: Callable[[Part], Tensor], limit: int = FILE_BYTES
    ) -> None:
        """Write config, safetensors and their index; see ``write_files``."""
        write_files(self.model, folder, parts, fetch, limit)
        if self.dtype is not None:
            write_dtype(folder, str(self.dtype).removeprefix("torch."))

    def save_pretrained(self, save_directory: str) -> None:
        """Write config, safetensors and their index."""
        self.write(Path(save_directory), list(self.parts()), lambda part: part.make().cpu())

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and empty tensors of the shapes and dtypes that are written; tied ones once."""
        return ((part.name, part.like) for part in self.parts())


def _converted(part: Part, dtype: torch.dtype) -> Tensor:
    return part.make().to(dtype)
