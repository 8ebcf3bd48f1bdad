"""The output head of a causal LM, and its logits a block of the vocabulary at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from agentrl.errors import ModelError


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The last layer of a causal LM: logits = softcap·tanh(scale·(hidden @ weightᵀ + bias)/softcap)."""

    weight: Tensor
    """[V, H]; the embedding itself if the model ties them."""
    bias: Tensor | None = None
    """[V]."""
    scale: float = 1.0
    softcap: float | None = None
    group: distributed.ProcessGroup | None = None
    """Tensor-parallel ranks, each of which holds a slice of the vocabulary as ``weight`` and ``bias``."""
    first: int = 0
    """The token id of the slice's first row."""

    @property
    def vocabulary(self) -> int:
        """The rows of the whole head, over all ranks of ``group``."""
        return len(self.weight) * (1 if self.group is None else self.group.size())

    def own_rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row of ``weight`` of each id, and whether it has one: bool; row 0 or the last if not."""
        row = ids - self.first
        return row.clamp(0, len(self.weight) - 1), (row >= 0) & (row < len(self.weight))


def output_head(model: nn.Module) -> OutputHead:
    """Return the head of a Hugging Face causal LM, with the logit scaling that its config declares.

    Raises ModelError for a head that is not a linear layer. ``check_output_head`` compares it with the model.
    """
    layer = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(layer, nn.Linear):
        raise ModelError(
            f"{type(model).__name__} ends in {type(layer).__name__}, not a linear layer",
            hint="use a causal language model with an lm_head",
        )
    config: Any = model.config
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
        getattr(config, "logits_scaling", None) or 1.0
    )
    return OutputHead(layer.weight, layer.bias, scale, getattr(config, "final_logit_softcapping", None))


class Projection:
    """Computes float32 logits / temperature a block at a time, in one buffer that each block overwrites."""

    def __init__(self, head: OutputHead, width: int) -> None:
        self._head = head
        self._width = min(width, len(head.weight))
        self._buffer: Tensor | None = None

    def blocks(self, states: Tensor, divisor: Tensor | float) -> Iterator[tuple[slice, Tensor]]:
        """Yield (vocabulary slice, float32[n, width]) of ``states`` [n, H]; ``divisor``: see ``rows_of``."""
        for start in range(0, len(self._head.weight), self._width):
            here = slice(start, min(start + self._width, len(self._head.weight)))
            yield here, self._block(states, divisor, here)

    def _block(self, states: Tensor, divisor: Tensor | float, here: slice) -> Tensor:
        head, weight = self._head, self._head.weight[here]
        if states.is_cuda and states.dtype == weight.dtype != torch.float32:
            logits = torch.mm(states, weight.T, out_dtype=torch.float32)
        else:
            logits = torch.mm(states.float(), weight.float().T, out=self._block_buffer(states, here))
        if head.bias is not None:
            logits += head.bias[here].float()
        if head.softcap is not None:
            logits.mul_(head.scale / head.softcap).tanh_().mul_(head.softcap / divisor)
        elif isinstance(divisor, Tensor) or head.scale != divisor:
            logits.mul_(head.scale / divisor)
        return logits

    def _block_buffer(self, states: Tensor, here: slice) -> Tensor:
        rows, width = len(states), here.stop - here.start
        if self._buffer is None or len(self._buffer) < rows * width:
            self._buffer = states.new_empty(rows * width, dtype=torch.float32)
        return self._buffer[: rows * width].view(rows, width)


def rows_of(divisor: Tensor | float, rows: slice) -> Tensor | float:
    """Return the divisor of ``rows``; ``divisor`` is one number or float32[n, 1]."""
    return divisor[rows] if isinstance(divisor, Tensor) else divisor
