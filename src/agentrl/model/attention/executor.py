"""Choose, once per model, the executor that runs forests through it, and check that it is exact.

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

from torch import Tensor, nn

from agentrl.data.forest import TokenForest
from agentrl.data.planner import SequenceRows
from agentrl.errors import ConfigError, ModelError
from agentrl.model.attention.flex import has_flex, run_flex
from agentrl.model.attention.sdpa import run_per_sequence, run_per_sequence_padded, run_sdpa, run_varlen

logger = logging.getLogger(__name__)

_FULL = frozenset({"full_attention", "attention"})
_WINDOWED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_NOISE = ("dropout", "pdrop", "router_jitter_noise", "layerdrop")
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


@dataclass(frozen=True, slots=True)
class MaskLimits:
    """Reasons why no attention mask makes a model exact on a forest; a path run alone is always exact."""

    state: str | None
    """Layers that carry a state along the row (linear attention, convolutions, recurrences), and so read
    the tokens packed before a sequence."""
    window: int | None
    """Tokens of the smallest attention window: a layer measures it along the row, not by depth in a tree."""

    @classmethod
    def of(cls, model: Any) -> MaskLimits:
        """Read them from the model's configuration."""
        config = model.config.get_text_config()
        layers = set(getattr(config, "layer_types", None) or ())
        # Count a kind that nobody knows as stateful: each path alone is exact for any layer.
        stateful = sorted(layers - _FULL - set(_WINDOWED))
        state = None
        if stateful or getattr(model, "_is_stateful", False):
            state = ", ".join(stateful) or "a recurrent state"
        return cls(state, _window(config))

    def reason(self, depth: int) -> str | None:
        """Return why no mask is exact on paths of up to ``depth`` tokens; None if one is."""
        if self.state is not None:
            return f"{self.state}, which carries over from one sequence to the next"
        if self.window is not None and depth > self.window:
            return f"layers that see only {self.window} tokens back, less than a sequence"
        return None


def check_compatibility(model: Any, *, trains: bool = True) -> None:
    """Raise ModelError for a model whose result depends on what its sequences are packed with.

    The causes are an auxiliary router loss over a micro-batch, experts with a token capacity, attention
    scores that are capped inside the kernel, and, if the model ``trains``, dropout and other noise.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    if trains:
        _check_noise(name, model, config)
    if getattr(config, "output_router_logits", False):
        raise ModelError(
            f"{name} adds an auxiliary loss of its router, a mean over the tokens of a micro-batch: it would"
            " depend on how trajectories are packed and merged",
            hint="set output_router_logits to false in the model's config.json",
        )
    if getattr(config, "expert_capacity", None):
        raise ModelError(
            f"{name} drops tokens beyond {config.expert_capacity} per expert: neighbors change its result",
            hint="use a mixture-of-experts model whose experts take every token",
        )
    if getattr(config, "attn_logit_softcapping", None):
        raise ModelError(
            f"{name} caps its attention scores at {config.attn_logit_softcapping}, which no executor does",
            hint="use a model without attn_logit_softcapping",
        )


def _window(config: Any) -> int | None:
    """Return the smallest window of the attention layers, in tokens; None if all see every token."""
    layers = getattr(config, "layer_types", None)
    if layers is None:
        # Ask for both: Qwen2's config.json names a window also where it is switched off.
        used = getattr(config, "use_sliding_window", True)
        names = ["sliding_window"] if used else []
    else:
        names = [_WINDOWED[layer] for layer in set(layers) if layer in _WINDOWED]
    windows = [getattr(config, attribute, None) for attribute in names]
    return min((int(window) for window in windows if window is not None), default=None)


def _check_noise(name: str, model: nn.Module, config: Any) -> None:
    # Ask modules and configuration: adapters add modules, and attention reads its rate from the other alone.
    rates = {f"dropout {module.p}": module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    for key, value in vars(config).items():
        # Pass over classifier_dropout: it is of a head that a causal LM does not have.
        if isinstance(value, float) and key.endswith(_NOISE) and not key.startswith("classifier"):
            rates[f"{key} {value}"] = value
    worst = max(rates, key=lambda key: rates[key], default=None)
    if worst is not None and rates[worst] > 0:
        raise ModelError(
            f"{name} trains with {worst}: its loss would depend on how trajectories are packed, and its"
            " ratios to the behavior policy would be noise",
            hint="set it to 0: in the model's config.json, or in the arguments of an adapter",
        )


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
        return _on_sdpa(forest)

    def _choose_for_images(self, forest: TokenForest) -> str:
        """Return ``varlen`` or ``sdpa``: the executors that pass images to the model."""
        reason = self.limits.reason(forest.depth)
        if reason is not None or self.name not in ("auto", *_WITH_IMAGES):
            what = f"{type(self.model).__name__} has {reason}" if reason else f"executor {self.name!r}"
            raise ModelError(
                f"{what}, and the data hold images: they run through {' and '.join(_WITH_IMAGES)} only",
                hint="use executor 'auto' and a model with full attention, or sample without images",
            )
        return _on_sdpa(forest) if self.name == "auto" else self.name

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


def _on_sdpa(forest: TokenForest) -> str:
    return "varlen" if forest.is_chains or forest.tokens > DENSE_TOKENS else "sdpa"


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
