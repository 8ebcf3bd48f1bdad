"""Choose, once per model, the executor that runs forests through it.

Every executor runs any forest and returns the same hidden states:

- ``flex``: FlexAttention under a block mask; GPU
- ``varlen``: attention segment by segment, without padding
- ``sdpa``: one dense mask
- ``per_sequence``: each path as a sequence of its own, for models that no mask makes exact
- ``per_sequence_padded``: the same in one padded call, for accelerators and ranks that shard a model
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from agentrl.data.forest import TokenForest
from agentrl.data.planner import SequenceRows
from agentrl.errors import ConfigError, ModelError
from agentrl.model.attention.compatibility import MaskLimits, check_compatibility
from agentrl.model.attention.flex import has_flex, run_flex
from agentrl.model.attention.sdpa import run_per_sequence, run_per_sequence_padded, run_sdpa
from agentrl.model.attention.varlen import run_varlen

logger = logging.getLogger(__name__)

EXECUTORS: dict[str, Callable[[Any, TokenForest], Tensor]] = {
    "sdpa": run_sdpa,
    "varlen": run_varlen,
    "flex": run_flex,
    "per_sequence": run_per_sequence,
    "per_sequence_padded": run_per_sequence_padded,
}
_WITH_IMAGES = ("varlen", "sdpa")
_WITHOUT_MASK = ("per_sequence", "per_sequence_padded")

DENSE_TOKENS = 512
"""A CPU runs a branching forest of up to this many tokens under one dense mask: fewer, larger calls."""


@dataclass(frozen=True)
class ForestExecutor:
    """Runs forests through the model that it was built for; ``build_executor`` makes it."""

    model: Any
    name: str
    """A key of ``EXECUTORS``, or ``auto``: the fastest exact one for each forest."""
    limits: MaskLimits
    has_flex: bool
    equal_calls: bool

    def __call__(self, forest: TokenForest) -> Tensor:
        """Return the last hidden states [N, H] of ``forest``, before the output head, with gradient.

        Each token sees its ancestors and itself, at positions that count from its root. Runs on the model's
        device. The model keeps the attention implementation that was used, because recomputed activations
        need it in the backward. Raises ModelError if the executor would not be exact on ``forest``.
        """
        return EXECUTORS[self.choose(forest)](self.model, forest)

    @property
    def rows(self) -> SequenceRows | None:
        """How forests run that no mask makes exact, as planning micro-batches needs it; None: all are."""
        if self.limits.state is None and self.limits.window is None:
            return None
        above = 0 if self.limits.state is not None else self.limits.window or 0
        return SequenceRows(above, padded=self._pads)

    @property
    def _pads(self) -> bool:
        """Run paths in one padded call: ranks need it, and an accelerator waits for the host at each call."""
        return self.equal_calls or self.model.device.type != "cpu"

    def choose(self, forest: TokenForest) -> str:
        """Return the name of the executor for ``forest``.

        ``auto`` is ``flex`` on a GPU; elsewhere ``varlen``, or ``sdpa`` for a small branching forest. A model
        that no mask makes exact runs each path alone, and one warning says why.
        """
        if forest.images is not None:
            return self._choose_for_images(forest)
        reason = self.limits.reason(forest.depth)
        model = type(self.model).__name__
        if self.name != "auto":
            if reason is not None and self.name not in _WITHOUT_MASK:
                raise ModelError(
                    f"{model} has {reason}: {self.name!r} would not be exact",
                    hint="use executor 'auto' or 'per_sequence', which run each sequence alone",
                )
            return self.name
        if reason is not None:
            _warn_once(f"{model} has {reason}: each sequence runs alone, without shared prefixes")
            return "per_sequence_padded" if self._pads else "per_sequence"
        if self.has_flex:
            return "flex"
        return "varlen" if forest.is_chains or forest.tokens > DENSE_TOKENS else "sdpa"

    def _choose_for_images(self, forest: TokenForest) -> str:
        """Return ``varlen`` or ``sdpa``: the executors that pass images to the model."""
        reason = self.limits.reason(forest.depth)
        if reason is not None or self.name not in ("auto", *_WITH_IMAGES):
            what = f"{type(self.model).__name__} has {reason}" if reason else f"executor {self.name!r}"
            raise ModelError(
                f"{what}, and the data hold images: they run through {' and '.join(_WITH_IMAGES)} only",
                hint="use executor 'auto' and a model with full attention, or sample without images",
            )
        if self.name != "auto":
            return self.name
        return "varlen" if forest.is_chains or forest.tokens > DENSE_TOKENS else "sdpa"

    def choices(self, forest: TokenForest) -> list[str]:
        """Return every executor that ``auto`` may choose for forests such as ``forest``."""
        if self.limits.reason(forest.depth) is not None:
            return list(_WITHOUT_MASK)
        return ["flex"] if self.has_flex else ["sdpa", "varlen"]


def build_executor(
    model: Any, name: str = "auto", *, trains: bool = True, equal_calls: bool = False
) -> ForestExecutor:
    """Check ``model``, which is on its device already, and return what runs forests through it.

    ``trains`` refuses dropout and other noise of the training mode. ``equal_calls`` is for ranks that shard
    the model's weights: each must call it equally often. Raises ConfigError for an unknown executor,
    ModelError for a model whose result depends on what its sequences are packed with.
    """
    if name not in ("auto", *EXECUTORS):
        raise ConfigError(f"attention executor {name!r}", hint=f"use auto, {' or '.join(EXECUTORS)}")
    check_compatibility(model, trains=trains)
    return ForestExecutor(model, name, MaskLimits.of(model), has_flex(model), equal_calls)


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
