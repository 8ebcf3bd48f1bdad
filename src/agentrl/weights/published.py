"""The weights that engines load: whole tensors in the model's own dtype, rounded once, while written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.weights.sharded_writer import FILE_BYTES, Part, write_files
from agentrl.weights.stored_dtype import write_dtype


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
