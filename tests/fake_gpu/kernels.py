"""Count what a step's operations compute and move on a GPU that is not there: FLOPs, bytes, exchanges."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fake_gpu.fake_cuda import COLLECTIVES, Recorder, group_size, name_of

_PLACES = (
    ("/torch/distributed/fsdp/", "", "FSDP"),
    ("/torch/optim/", "", "optimizer"),
    ("/agentrl/distributed/fsdp.py", "", "clipping"),
    ("/agentrl/distributed/expert_parallel.py", "", "dispatch"),
    ("/agentrl/model/logprobs.py", "", "head"),
    ("/agentrl/model/attention.py", "block_attention", "attention"),
    ("/agentrl/losses/", "", "loss"),
    ("/agentrl/train/", "StepLoss", "loss"),
    ("/agentrl/model/norms.py", "", "norms"),
    ("/transformers/", "Norm.", "norms"),
    ("/transformers/", "rot", "rotary"),
    ("/transformers/", "Rot", "rotary"),
    ("/transformers/", "Attention.", "projections"),
    ("/transformers/", "MLP.", "MLP"),
    ("/transformers/integrations/moe.py", "", "experts"),
    ("/transformers/", "Experts.", "experts"),
    ("/transformers/", "Router.", "router"),
    ("/transformers/", "SparseMoe", "router"),
    ("/transformers/", "DecoderLayer.", "residuals"),
)
"""Part of a file's path, part of a function's name, and the part of the step that runs there."""
_NO_KERNEL = frozenset({
    "detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias", "empty", "empty_like", "new_empty",
    "empty_strided", "new_empty_strided", "record_stream", "_local_scalar_dense", "set_", "resize_",
})  # fmt: skip
_FILLS = frozenset({
    "zero_", "fill_", "zeros", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full",
})  # fmt: skip
_READS_ROWS = ("index", "embedding", "gather", "index_select")
_ADDS_ROWS = {
    "index_put_": 2, "scatter_add_": 3, "index_add_": 3, "index_put": 2, "scatter_add": 3, "index_add": 3,
}  # fmt: skip
"""The place of the argument with the rows that are added."""


class Kernel(NamedTuple):
    """An operation on the device. Equal ones are counted together."""

    name: str
    part: str
    """Of the step, as ``_PLACES`` names it: in the backward, that of the forward."""
    phase: str
    """``forward``, ``recompute``, ``backward`` or ``update``."""
    dtype: str
    flops: int
    bytes: int
    """Read and written; of an exchange, those of the larger one of input and output."""
    ranks: int
    """Of an exchange; 0 for a computation."""


class Kernels(Recorder):
    """Counts the operations that start a kernel, each as one; of views and empty tensors there is none."""

    def __init__(self, pairs: int = 0) -> None:
        """``pairs``: of a query and a key in one row of attention, whole blocks of the mask."""
        super().__init__()
        self.kernels: Counter[Kernel] = Counter()
        self._pairs = pairs
        self._parts: dict[int, str] = {}
        """Of the node of autograd with that number."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and count it."""
        if any(not issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented
        number = torch.autograd._get_sequence_nr() - 1
        result = super().__torch_dispatch__(func, types, args, kwargs)
        leaves = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if any(leaf.device.type == "cuda" for leaf in leaves):
            self._count(func, args, kwargs or {}, result, number)
        return result

    def _count(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, number: int
    ) -> None:
        name = func.name() if callable(func.name) else func.name
        name = name.removeprefix("aten::").partition(".")[0]
        if name in _NO_KERNEL or name.startswith("prim::") or getattr(func, "is_view", False):
            return
        node = torch._C._current_autograd_node()
        if node is not None and node.name() == "SiluBackward0":
            if name != "sigmoid":  # this build of torch has no kernel of it for CUDA, and takes six
                return
            name = "silu_backward"
        part, phase = self._place(number)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        wide = next((leaf for leaf in inputs if leaf.dim() > 1), None)
        dtype = name_of(
            wide if wide is not None else next(iter(_tensors(result)), inputs[0] if inputs else None)
        )
        if name.startswith(COLLECTIVES):
            ranks = next((size for size in map(group_size, args) if size), 0)
            if ranks > 1 and "wait" not in name:
                moved = max(sum(map(_bytes, _tensors(each))) for each in args)
                name = name.split("::")[1].strip("_")
                self.kernels[Kernel(name, part, phase, dtype, 0, moved, ranks)] += 1
            return
        moved = moved_bytes(func, name, args, kwargs, result)
        if name == "silu_backward":  # reads the gradient too
            moved += moved // 2
        flops = self._flops(func, name, args, result)
        self.kernels[Kernel(name, part, phase, dtype, flops, moved, 0)] += 1

    def _flops(self, func: Any, name: str, args: Sequence[Any], result: Any) -> int:
        if name.startswith("flex_attention"):
            _, heads, _, width = args[0].shape
            return (10 if "backward" in name else 4) * self._pairs * heads * width
        if name == "_grouped_mm":
            return 2 * prod(args[0].shape) * args[1].shape[-1]
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        return int(formula(*args, out_val=result)) if formula and args else 0

    def _place(self, number: int) -> tuple[str, str]:
        """Return the part of the step that runs, and its phase."""
        is_backward = torch._C._current_graph_task_id() != -1
        part, function = _part()
        if not is_backward:
            part = part or "other"
            self._parts.setdefault(number, part)
            return part, "update" if part in ("optimizer", "clipping") else "forward"
        if part is not None:
            return part, "backward" if part == "FSDP" or "backward" in function else "recompute"
        node = torch._C._current_autograd_node()
        return ("other" if node is None else self._parts.get(node._sequence_nr(), "other")), "backward"


def _part() -> tuple[str | None, str]:
    """Return the part of the innermost frame that has one, and its outermost function in that file."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path, function = frame.f_code.co_filename, frame.f_code.co_qualname
        for place, called, part in _PLACES:
            if place in path and called in function:
                while frame.f_back is not None and frame.f_back.f_code.co_filename == path:
                    frame = frame.f_back
                return part, frame.f_code.co_qualname
        frame = frame.f_back
    return None, ""


def moved_bytes(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that an operation reads and writes if each number moves once."""
    written = sum(map(_bytes, _tensors(result)))
    if name in _FILLS:
        return written
    if name in _READS_ROWS:
        return 2 * written
    if name in _ADDS_ROWS and len(args) > _ADDS_ROWS[name]:
        return 3 * sum(map(_bytes, _tensors(args[_ADDS_ROWS[name]])))
    if name in ("copy_", "fsdp::all_gather_copy_in"):
        read = sum(map(_bytes, _tensors(args[0 if name.startswith("fsdp") else 1])))
        return 2 * read if name.startswith("fsdp") else read + written
    schema = getattr(func, "_schema", None)
    if schema is None:  # FlexAttention
        return written + sum(map(_bytes, _tensors(args)))
    read = changed = 0
    for place, argument in enumerate(schema.arguments):
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        size = sum(map(_bytes, _tensors(given)))
        is_changed = argument.alias_info is not None and argument.alias_info.is_write
        changed += size * is_changed
        read += size * (not argument.is_out)
    return read + max(changed, written)


def _tensors(given: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.device.type != "cpu"]


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; a number that it repeats counts once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
