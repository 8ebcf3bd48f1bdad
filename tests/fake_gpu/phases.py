"""Follow the phases of a training step: the layers, the logits and the loss, and the backward of both."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from agentrl.distributed.pipeline_stages import Identity
from fake_gpu.memory_tracker import MemoryTracker


def watch_phases(tracker: MemoryTracker, model: Any) -> None:
    """Set the tracker's phase and segment while micro-batches run through ``model``.

    A segment is (phase, micro-batch, position of the layer): first, middle or last.
    """
    _PhaseHooks(tracker).attach(model)


class _PhaseHooks:
    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._forwards = 0
        self._backwards = 0

    def attach(self, model: Any) -> None:
        decoder = model.get_decoder()
        decoder.register_forward_pre_hook(self._begin_forward)
        decoder.register_forward_hook(self._end_forward)
        layers = [layer for layer in getattr(decoder, "layers", []) if not isinstance(layer, Identity)]
        for place, layer in enumerate(layers):
            position = "first" if place == 0 else "last" if place == len(layers) - 1 else "middle"
            self._attach_layer(layer, position)

    def _attach_layer(self, layer: nn.Module, position: str) -> None:
        def backward(_: Tensor) -> None:
            self._tracker.begin("backward", self._backwards, position)

        def begin(*_: Any) -> None:
            if self._tracker.phase != "backward":  # otherwise its activations are computed again
                self._tracker.begin("forward", self._forwards, position)

        def end(_: nn.Module, __: Any, output: Any) -> None:
            if self._tracker.phase == "backward":
                return
            leaves: list[Any] = tree_leaves(output)
            for tensor in leaves:
                if getattr(tensor, "requires_grad", False):
                    tensor.register_hook(backward)

        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(end)

    def _begin_forward(self, *_: Any) -> None:
        self._tracker.phase = "activations"
        self._forwards += 1
        self._tracker.begin("embedding", self._forwards)

    def _end_forward(self, _: nn.Module, __: Any, output: Any) -> None:
        self._tracker.phase = "logits and loss"
        self._tracker.begin("loss", self._forwards)
        hidden: Any = output.last_hidden_state
        if hidden.requires_grad:
            hidden.register_hook(self._begin_backward)

    def _begin_backward(self, _: Tensor) -> None:
        self._tracker.phase = "backward"
        self._backwards += 1
        self._tracker.begin("backward", self._backwards, "norm")
