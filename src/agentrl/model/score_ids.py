"""Compute the logprobs of given ids under a model folder, for a teacher in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.config.schema import ModelConfig
from agentrl.data.forest import forest_from_sequences
from agentrl.model.attention.executor import build_executor
from agentrl.model.load import disable_dropout, load_model, resolve_dtype
from agentrl.model.logprobs import Projection, output_head

_CHUNK = 256
"""Tokens whose logits are in memory at a time."""


class IdScorer:
    """A model that scores one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        """Load the model to the accelerator, or to the CPU without one. Raises ModelError."""
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = load_model(folder, ModelConfig(), resolve_dtype("auto"))
        disable_dropout(model)
        model.to(device=self._device).eval()  # type: ignore[call-arg]
        self._head = output_head(model)
        self._executor = build_executor(model, trains=False)

    @torch.no_grad()
    def score(
        self, ids: Sequence[int], first: int, top: int
    ) -> tuple[NDArray[np.float32], list[dict[int, float]]]:
        """Return the logprobs of ``ids[first:]``, float32, and {id: logprob} of the ``top`` likeliest ids.

        Logits are those of temperature 1, in float32.
        """
        forest = forest_from_sequences([ids], [[place >= first for place in range(len(ids))]])
        hidden = self._executor(forest)
        target = torch.tensor(ids[first:], device=self._device)
        projection = Projection(self._head, len(self._head.weight))
        values: list[Tensor] = []
        rows: list[dict[int, float]] = []
        for start in range(first - 1, len(ids) - 1, _CHUNK):
            states = hidden[start : min(start + _CHUNK, len(ids) - 1)]
            ((_, logits),) = projection.blocks(states, 1.0)
            logprobs = logits.log_softmax(-1)
            own = target[start - first + 1 : start - first + 1 + len(states)]
            values.append(logprobs.gather(1, own[:, None])[:, 0])
            if top:
                best = logprobs.topk(min(top, logprobs.shape[1]), -1)
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                rows += [dict(zip(*pair, strict=True)) for pair in pairs]
        return torch.cat(values).float().cpu().numpy(), rows
