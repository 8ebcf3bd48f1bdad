"""Count the bytes of live tensors while code runs, and name at the peak what they are and what runs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl.distributed.pipeline_stages import Identity

Storages = Mapping[str, Iterable[Tensor]]
"""Part of the memory → the tensors of it, for example ``gradients``."""

_SNAPSHOT_STEP = 1.001
"""The parts are counted again when the total exceeds the last count by this factor."""


Segment = tuple[Hashable, ...]
"""A part of the run, for example the backward of the first layer in the second micro-batch."""


@dataclass(frozen=True)
class Peak:
    """The most bytes that are alive at once."""

    parts: Mapping[str, int]
    """Bytes by part."""
    phase: str
    """What runs at the peak."""

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the storages of all tensors that operations return; each counts once, however many view it.

    It sees the local tensors of DTensors. What an operation allocates inside itself and frees before it
    returns is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "build"
        """What runs now: the name that storages made now get, unless ``owned`` names them."""
        self.owned: Callable[[], Storages] = dict
        """Returns the tensors whose part is known by what holds them."""
        self.resized: Callable[[], Iterable[Iterable[Tensor]]] = tuple
        """Returns groups of tensors whose storages change in size together, as FSDP2 frees gathered ones."""
        self.scalar = 0
        """The value of a number that is read from a fake tensor."""
        self.total = 0
        self.peaks: dict[Segment, Peak] = {}
        """The peak of each segment, in the order in which they ran first."""
        self._segment: Segment = ()
        self._peak = 0
        self._alive: dict[int, tuple[int, str]] = {}
        self._counted = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and add the storages that it returns."""
        if any(not issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented  # a DTensor or the like: its operations on local tensors come here
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return _number(args[0].dtype, self.scalar)
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32:
            # The fake product of grouped rows refuses float32, which the real one takes.
            result = func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **(kwargs or {})).float()
        else:
            result = func(*args, **(kwargs or {}))
        for group in self.resized():
            self._follow(group)
        for tensor in tree_leaves(result):
            if isinstance(tensor, FakeTensor):
                self.add(tensor)
        return result

    def add(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor`` as alive until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        self._alive[key] = (0, self.phase)
        weakref.finalize(storage, self._drop, key)
        self._resize(key, storage.nbytes())

    def begin(self, *segment: Hashable) -> None:
        """Track the peak of ``segment`` from now on; a segment may run several times."""
        self._segment = segment
        self._peak = self._counted = self.peaks[segment].total if segment in self.peaks else 0
        if self.total > self._peak:
            self._raise_peak()

    def restart(self) -> None:
        """Forget all peaks."""
        self.peaks.clear()
        self.begin("start")

    def _follow(self, group: Iterable[Tensor]) -> None:
        """Count the storages of a group at their present sizes, unless the first is as it was."""
        for tensor in group:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if storage._cdata not in self._alive or self._alive[storage._cdata][0] == size:
                return
            self._resize(storage._cdata, size)

    def _drop(self, key: int) -> None:
        self.total -= self._alive.pop(key)[0]

    def _resize(self, key: int, size: int) -> None:
        before, phase = self._alive[key]
        self._alive[key] = (size, phase if before or not size else self.phase)
        self.total += size - before
        if self.total > self._peak:
            self._raise_peak()

    def _raise_peak(self) -> None:
        """Set the peak; count its parts if it has grown enough, else add the growth to what runs now."""
        growth, self._peak = self.total - self._peak, self.total
        if self.total > self._counted * _SNAPSHOT_STEP:
            parts, self._counted = self._count(), self.total
        else:
            parts = dict(self.peaks[self._segment].parts)
            parts[self.phase] = parts.get(self.phase, 0) + growth
        self.peaks[self._segment] = Peak(parts, self.phase)

    def _count(self) -> dict[str, int]:
        named = {
            tensor.untyped_storage()._cdata: part
            for part, tensors in self.owned().items()
            for tensor in tensors
        }
        parts: dict[str, int] = {}
        for key, (size, phase) in self._alive.items():
            part = named.get(key, phase)
            parts[part] = parts.get(part, 0) + size
        return parts


def _number(dtype: torch.dtype, value: int) -> float | int | bool:
    if dtype == torch.bool:
        return bool(value)
    return float(value) if dtype.is_floating_point else value


def watch_phases(tracker: MemoryTracker, model: Any) -> None:
    """Set the tracker's phase and segment while micro-batches run through ``model``.

    A segment is (phase, micro-batch, position of the layer): first, middle or last.
    """
    counts = Counter[str]()

    def begin_forward(*_: Any) -> None:
        tracker.phase = "activations"
        counts["forward"] += 1
        tracker.begin("embedding", counts["forward"])

    def end_forward(_: nn.Module, __: Any, output: Any) -> None:
        tracker.phase = "logits and loss"
        tracker.begin("loss", counts["forward"])
        if output.last_hidden_state.requires_grad:
            output.last_hidden_state.register_hook(begin_backward)

    def begin_backward(_: Tensor) -> None:
        tracker.phase = "backward"
        counts["backward"] += 1
        tracker.begin("backward", counts["backward"], "norm")

    def watch_layer(layer: nn.Module, position: str) -> None:
        def begin(*_: Any) -> None:
            if tracker.phase != "backward":  # otherwise its activations are computed again
                tracker.begin("forward", counts["forward"], position)

        def end(_: nn.Module, __: Any, output: Any) -> None:
            if tracker.phase == "backward":
                return
            for tensor in tree_leaves(output):
                if getattr(tensor, "requires_grad", False):
                    tensor.register_hook(lambda _: tracker.begin("backward", counts["backward"], position))

        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(end)

    decoder = model.get_decoder()
    decoder.register_forward_pre_hook(begin_forward)
    decoder.register_forward_hook(end_forward)
    layers = [layer for layer in getattr(decoder, "layers", []) if not isinstance(layer, Identity)]
    for place, layer in enumerate(layers):
        watch_layer(layer, "first" if place == 0 else "last" if place == len(layers) - 1 else "middle")
