"""Exclude the ids that a token was not sampled from, a block of logits at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.documents.sampling_mask import SamplingMask

LOWEST: Final = -1e30
"""Logit of an excluded id: finite, so that its share of a sum is 0 and not NaN."""


@dataclass(frozen=True, slots=True)
class KeptIds:
    """A SamplingMask on the device of the logits; K ids in all."""

    first: NDArray[np.int64]
    """int64[T + 1], on the host: the ids of token t are [first[t], first[t + 1])."""
    row: Tensor
    """int64[K], the token of each id."""
    ids: Tensor
    """int64[K]."""
    truncated: Tensor
    """bool[T]: whether a token keeps only some ids."""

    @classmethod
    def of(cls, mask: SamplingMask, device: torch.device) -> Self:
        """Copy a mask to ``device``."""
        row = np.repeat(np.arange(len(mask)), mask.counts)
        tensors = (torch.from_numpy(array).to(device) for array in (row, mask.ids, mask.counts > 0))
        return cls(np.append(0, np.cumsum(mask.counts)), *tensors)

    def apply(self, logits: Tensor, tokens: slice, id_of_column: int) -> None:
        """Set the logits of excluded ids to ``LOWEST``, in place.

        logits [n, width] are those of ``tokens``; the first column is that of ``id_of_column``. Ids that are
        not in the block mark one more column, so that the host need not wait to know how many these are.
        """
        start, end = self.first[tokens.start], self.first[tokens.stop]
        if start == end:
            return
        width = logits.shape[1]
        column = self.ids[start:end] - id_of_column
        column = torch.where((column >= 0) & (column < width), column, width)
        excluded = self.truncated[tokens, None].repeat(1, width + 1)
        excluded[self.row[start:end] - tokens.start, column] = False
        logits.masked_fill_(excluded[:, :width], LOWEST)
