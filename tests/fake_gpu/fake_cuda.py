"""A CUDA device that is not there: stubs of ``torch.cuda``, and records of what a step does with it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fake_gpu.memory_tracker import MemoryTracker

_SOURCES = ("/src/agentrl/", "/site-packages/transformers/")
"""A clone may be called agentrl too, with its tests and its environment in it."""
COLLECTIVES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::")
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm")
_COPIES = ("aten::_to_copy", "aten::copy_")


GUARD = "noop_guard.so"


def compile_guard(folder: Path) -> Path:
    """Compile the device guard that does nothing, for LD_PRELOAD, with ``g++``."""
    library, source, built = folder / GUARD, Path(__file__).parent, Path(torch.__file__).parent
    include = built / "include"
    subprocess.run(
        [
            *("g++", "-shared", "-fPIC", "-O1", "-std=c++20", "-o", library, source / "noop_guard.cpp"),
            *(f"-I{include}", f"-I{include}/torch/csrc/api/include"),
            *(f"-L{built}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{built}/lib"),
        ],
        check=True,
        timeout=900,
    )
    return library


def _fused_norm(x: Tensor, shape: Sequence[int], weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _fused_norm_backward(
    gradient: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    return torch.empty_like(x) if mask[0] else None, torch.empty_like(weight) if mask[1] else None


_GPU_KERNELS = torch.library.Library("aten", "IMPL")
"""What torch builds for GPUs alone: without it the operation is taken apart before it is counted."""
_GPU_KERNELS.impl("_fused_rms_norm", _fused_norm, "CUDA")
_GPU_KERNELS.impl("_fused_rms_norm_backward", _fused_norm_backward, "CUDA")


class _Event:
    def __init__(self, *unused: Any, **named: Any) -> None:
        pass

    def record(self, *unused: Any) -> _Event:
        return self

    def wait(self, *unused: Any) -> None:
        pass

    synchronize = wait

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return 0.0


class _Stream(contextlib.nullcontext[None]):
    def __init__(self, *unused: Any, **named: Any) -> None:
        super().__init__()

    def wait_stream(self, *unused: Any) -> None:
        pass

    wait_event = synchronize = wait_stream

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def cuda_stubs() -> Iterator[None]:
    """Make ``torch.cuda`` answer as a node of H100 does, without a driver."""
    nothing = contextlib.nullcontext
    stubs: dict[str, Any] = {
        "Stream": _Stream, "Event": _Event, "stream": nothing, "device": nothing,
        "current_stream": _Stream, "default_stream": _Stream,
        "current_device": lambda: 0, "set_device": lambda device: None, "device_count": lambda: 8,
        "is_initialized": lambda: True, "synchronize": lambda *device: None,
        "is_bf16_supported": lambda *unused: True, "get_device_capability": lambda *device: (9, 0),
        "get_device_name": lambda *device: "NVIDIA H100 80GB HBM3",
        "get_rng_state": lambda *device: torch.empty(16, dtype=torch.uint8),
        "set_rng_state": lambda *state: None,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, value in stubs.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", bool))
        yield


class GpuMemory(MemoryTracker):
    """Tracks FlexAttention too, and gives values to the operations whose result depends on them.

    A mask selects everything.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation on masks without False, and on the tracker's scalars."""
        for tensor in args:
            if isinstance(tensor, FakeTensor):
                tensor.constant = None  # a known value would be copied to the device for real
        if func is torch.ops.aten.nonzero.default and isinstance(args[0], FakeTensor):
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default) and not kwargs:
            args = (args[0], [_positions(index) for index in args[1]], *args[2:])
        if func is torch.ops.aten._unique2.default:
            return tuple(args[0].new_empty(1, dtype=kind) for kind in (args[0].dtype, *[torch.int64] * 2))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _positions(index: Any) -> Any:
    if isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() == 1:
        return index.new_empty(len(index), dtype=torch.int64)
    return index


class Recorder(TorchDispatchMode):
    """Counts collectives, matrix products, and the places where the host waits for the device."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        """By "operation dtype ranks"; operations within one rank are left out."""
        self.bytes: Counter[str] = Counter()
        """Of the larger one of input and output, of all of ``calls``."""
        self.products: Counter[str] = Counter()
        """By "operation dtype function"."""
        self.reads: Counter[str] = Counter()
        """Reads of a CUDA value by the host, by "file function"."""
        self.mixed: Counter[str] = Counter()
        """Operations on tensors of several devices, by "operation function"."""
        self.moved: Counter[str] = Counter()
        """Bytes that are copied from the device to the host, by dtype."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record the operation, and run it."""
        if any(not issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented  # a DTensor: its operations on local tensors come here
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if isinstance(func, torch._ops.HigherOrderOperator):
            self.products[f"{func.name()} {name_of(tensors[0])}"] += 1
        else:
            self._record(func.overloadpacket._qualified_op_name, args, tensors)
        return func(*args, **(kwargs or {}))

    def _record(self, name: str, args: Sequence[Any], tensors: list[Tensor]) -> None:
        devices = {tensor.device.type for tensor in tensors if tensor.dim()}
        if name.startswith(COLLECTIVES):
            self._record_collective(name, args, tensors)
        elif name in _PRODUCTS:
            operand = next(tensor for tensor in tensors if tensor.dim() > 1)
            self.products[f"{name} {name_of(operand)} {_caller()}"] += 1
        elif tensors and tensors[0].device.type == "cuda" and _reads(name, tensors):
            self.reads[_caller()] += 1
        if name == "aten::copy_" and [tensor.device.type for tensor in tensors] == ["cpu", "cuda"]:
            self.moved[name_of(tensors[1])] += tensors[1].nbytes
        if len(devices) > 1 and name not in _COPIES:
            self.mixed[f"{name} {_caller()}"] += 1

    def _record_collective(self, name: str, args: Sequence[Any], tensors: list[Tensor]) -> None:
        ranks = next((size for size in map(group_size, args) if size), 0)
        if "wait" in name or ranks == 1:
            return
        key = f"{name.split('::')[1].strip('_')} {name_of(tensors[0])} {ranks}"
        self.calls[key] += 1
        self.bytes[key] += max(
            sum(leaf.nbytes for leaf in tree_leaves(each) if isinstance(leaf, Tensor)) for each in args
        )


def _reads(name: str, tensors: list[Tensor]) -> bool:
    """Return whether the host waits for the value of a tensor on the device."""
    if name in ("aten::index", "aten::index_put_"):
        return any(tensor.dtype == torch.bool for tensor in tensors[1:])
    return name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2")


def group_size(argument: Any) -> int:
    """Return the number of ranks of a process group, or of the group with that name; 0 for anything else."""
    if isinstance(argument, str):
        try:
            return dist.distributed_c10d._resolve_process_group(argument).size()  # type: ignore[arg-type]
        except (RuntimeError, LookupError):
            return 0
    if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
        return dist.ProcessGroup.unbox(argument).size()
    return 0


def name_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _caller() -> str:
    """Return "file function" of the innermost frame of ours or of transformers; "backward" without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        for source in _SOURCES:
            if source in name and "/plan/" not in name:
                package = source.split("/")[-2]
                return f"{package}/{name.rpartition(source)[2]} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return "backward"
