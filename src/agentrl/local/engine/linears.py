"""Linear layers of the local engine: packed for a CPU, with LoRA adapters by row, and changed in place."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from agentrl.errors import ModelError
from agentrl.model.lora import read_layers
from agentrl.weights.delta import WORDS, DeltaFile, StoredShape
from agentrl.weights.folder import torch_dtype

_BATCH_ROWS = 32


class PackedLinear(nn.Module):
    """A linear layer with its weight in the layout of oneDNN: up to three times faster on a CPU."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        # Converted one by one: a whole model in another dtype would be memory that is written twice.
        self.packed = pack(linear.weight.detach().to(dtype))
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], ""))


def pack(weight: Tensor) -> Tensor:
    """Return ``weight`` [outputs, inputs] in the layout of oneDNN for products of a few dozen rows."""
    return cast("Tensor", torch.ops.mkldnn._reorder_linear_weight(weight, _BATCH_ROWS))


def pack_linears(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace every linear layer by one with a packed weight, if this CPU multiplies those of ``dtype``."""
    mkldnn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not mkldnn or (dtype != torch.float32 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return
    for name in [name for name, module in model.named_modules() if type(module) is nn.Linear]:
        # No list of the modules: each weight is freed when its packed copy takes its place.
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, leaf, PackedLinear(getattr(owner, leaf), dtype))


def round_to_fp8(model: Any) -> None:
    """Round the weights of a causal LM's decoder as engines with fp8 weights do; the dtype stays.

    Each row of a linear layer, and of each expert's, has the scale that maps its largest weight to the
    largest number of e4m3, as in SGLang. Embeddings, norms, routers and the output head stay as they are.
    """
    for name, weight in model.get_decoder().named_parameters():
        owner = model.get_decoder().get_submodule(name.rpartition(".")[0])
        if weight.dim() == 3 or (isinstance(owner, nn.Linear) and name.endswith("weight")):
            weight.data = rounded_to_fp8(weight.data)


def rounded_to_fp8(weight: Tensor) -> Tensor:
    """Return ``weight`` [..., in], rounded to e4m3 with a scale for each row."""
    exact = weight.float()
    scale = exact.abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return ((exact / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """One adapter in memory. Two with the same name are different adapters: they are compared by identity."""

    name: str
    path: str
    layers: Mapping[str, tuple[Tensor, Tensor, float]]
    """Name of a linear layer → A transposed [inputs, rank], B transposed [rank, outputs], scale."""


@dataclass(slots=True)
class AdapterRows:
    """Which rows of the current batch belong to which adapter: (adapter, first row, end)."""

    segments: Sequence[tuple[LoadedAdapter, int, int]] = ()

    def assign(self, adapters: Sequence[LoadedAdapter | None], counts: Sequence[int]) -> None:
        """Begin a batch of chunks with ``adapters`` and ``counts`` rows; join neighbours of an adapter."""
        segments: list[tuple[LoadedAdapter, int, int]] = []
        end = 0
        for adapter, count in zip(adapters, counts, strict=True):
            first, end = end, end + count
            if adapter is None:
                continue
            if segments and segments[-1][0] is adapter and segments[-1][2] == first:
                first = segments.pop()[1]
            segments.append((adapter, first, end))
        self.segments = segments


class AdaptedLinear(nn.Module):
    """A linear layer that adds scale · B (A x) to the rows of each adapter."""

    def __init__(self, name: str, base: nn.Module, rows: AdapterRows) -> None:
        super().__init__()
        self.base = base
        self._name = name
        self._rows = rows

    def forward(self, x: Tensor) -> Tensor:
        """Return [1, rows, outputs] for x [1, rows, inputs]."""
        output = cast("Tensor", self.base(x))
        for adapter, first, end in self._rows.segments:
            if (layer := adapter.layers.get(self._name)) is not None:
                a, b, scale = layer
                output[0, first:end].addmm_(x[0, first:end] @ a, b, alpha=scale)
        return output


def load_adapter(
    name: str, folder: str, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> LoadedAdapter:
    """Read the adapter in ``folder``, which peft wrote, for linear layers of ``shapes`` (outputs, inputs).

    It is held in ``dtype``, that of the model's products. Raises ModelError as ``read_layers`` does.
    """
    layers = {
        layer: (_held(each.a, dtype, device), _held(each.b, dtype, device), each.scale)
        for layer, each in read_layers(Path(folder), shapes).items()
    }
    return LoadedAdapter(name, folder, layers)


def _held(weight: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``weight`` transposed, in memory of its own: the file may be deleted."""
    return weight.to(device=device, dtype=dtype, copy=True).t()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_C_INTEGERS = {2: ctypes.c_int16, 4: ctypes.c_int32}
_DIGITS = 256
"""Integers up to this are exact in bfloat16."""
_PRIME = 251
_ROWS = 1024
"""Rows that are verified at a time."""


@dataclass(frozen=True)
class _Place:
    """Where the elements of a tensor lie in the memory of the served model."""

    memory: Tensor
    """One-dimensional, as integers: writing to it changes the model."""
    dtype: torch.dtype
    rows: NDArray[np.int64]
    """All dimensions but the last count rows. Element j of row i is at ``rows[i] + columns[j]``."""
    columns: NDArray[np.int64]

    def offsets(self, positions: NDArray[np.int64]) -> Tensor:
        """Return where elements are that are counted in row-major order. NumPy does it faster than torch."""
        row = positions // self.columns.size
        found = self.columns.take(positions - row * self.columns.size)
        found += self.rows.take(row)
        return torch.from_numpy(found)


@dataclass(frozen=True)
class Patch:
    """New values for some elements of a served model."""

    tensors: Sequence[Sequence[tuple[Tensor, Tensor, Tensor]]]
    """Memory, offsets in it, and values: for each tensor in the order in which they are written."""

    def apply(self) -> None:
        """Change the model. No forward pass may run."""

        @torch.inference_mode()  # a thread's own, and the served weights were made in it
        def write(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
            for memory, offsets, values in parts:
                memory[offsets] = values

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(write, self.tensors))


Places = Mapping[str, tuple[tuple[int, ...], Sequence[_Place]]]
"""The shape of each tensor, by its name in files, and where it lies; tied ones lie in two places."""


def read_patch(places: Places, deltas: Sequence[Path], dtype: torch.dtype | None) -> Patch:
    """Return what ``deltas``, oldest first, change in a model whose weights were rounded to ``dtype``.

    Raises ModelError if the served model holds a changed tensor in a way that cannot be changed in place, and
    PublishError if a delta is damaged or belongs to another model.
    """

    def read(name: str) -> list[tuple[Tensor, Tensor, Tensor]]:
        parts = []
        for delta in (delta for delta in opened if name in delta.index):
            code = str(delta.index[name]["dtype"])
            kind = torch_dtype(code)
            if name not in places or (dtype is not None and kind != dtype):
                raise ModelError(f"{name} is served in another form than it is published in")
            shape, owners = places[name]
            positions, words = delta.changes(name, StoredShape(code, shape, WORDS[kind.itemsize]))
            values = torch.from_numpy(words).view(kind)
            for place in owners:
                held = values.to(place.dtype if kind.is_floating_point else kind).view(place.memory.dtype)
                device = place.memory.device
                parts.append((place.memory, place.offsets(positions).to(device), held.to(device)))
        return parts

    with contextlib.ExitStack() as files:
        opened = [DeltaFile(files.enter_context(path.open("rb")), path) for path in deltas]
        # In one thread: the calls are short, and several would wait for the interpreter's lock.
        return Patch([read(name) for name in dict.fromkeys(name for delta in opened for name in delta.index)])


def find_places(model: Any) -> Places:
    """Return where the tensors of a served model lie, which has to outlive the result.

    transformers joins and renames tensors when it loads a model. What is undone here are numbers in place of
    the rows: they say which rows of the served tensors a tensor in the files has.
    """
    served: dict[str, Tensor | PackedLinear] = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            raise ModelError("the served model has adapters")
        if isinstance(module, PackedLinear):
            served[f"{name}.weight"] = module
    tied: dict[str, list[Tensor | PackedLinear]] = {}
    for name, source in model.all_tied_weights_keys.items():
        if name in served and source in served:
            tied.setdefault(source, []).append(served.pop(name))
    numbers: dict[str, Tensor] = {}
    starts, names, count = list[int](), list(served), 0
    for name in names:
        shape = _shape(served[name])
        lines = (*shape[:-1], 1) if len(shape) > 1 else shape
        starts.append(count)
        count += math.prod(lines)
        numbers[name] = torch.arange(starts[-1], count).view(lines)
    found = revert_weight_conversion(model, dict(numbers))
    if not torch.equal(torch.cat([each.flatten() for each in found.values()]).sort()[0], torch.arange(count)):
        raise ModelError("it is not known under which names in files the served tensors are")
    places = {}
    for name, lines in found.items():
        first = bisect.bisect_right(starts, int(lines.min())) - 1
        owner, rows = names[first], lines.flatten() - starts[first]
        if int(rows.max()) >= numbers[owner].numel():
            continue  # of several served tensors
        width = math.prod(_shape(served[owner])) // numbers[owner].numel()
        shape = (*lines.shape[:-1], width) if lines.dim() > 1 else tuple(lines.shape)
        places[name] = shape, [_place(each, rows, width) for each in (served[owner], *tied.get(owner, ()))]
    return places


def _shape(owner: Tensor | PackedLinear) -> tuple[int, ...]:
    if isinstance(owner, PackedLinear):
        return owner.out_features, owner.in_features
    return tuple(owner.shape)


def _place(owner: Tensor | PackedLinear, rows: Tensor, width: int) -> _Place:
    """Return where ``rows`` of a served tensor lie."""
    if isinstance(owner, PackedLinear):
        kind = owner.packed.dtype
        lines, columns = _layout((owner.out_features, owner.in_features), kind)
        return _Place(_memory(owner.packed), kind, lines[rows].numpy(), columns.numpy())
    if not owner.is_contiguous():
        raise ModelError("a served tensor is not contiguous")
    memory = owner.view(-1).view(_INTEGERS[owner.element_size()])
    return _Place(memory, owner.dtype, (rows * width).numpy(), np.arange(width))


def _memory(packed: Tensor) -> Tensor:
    """Return the memory of a tensor of oneDNN, as integers, in its own layout; it must outlive the result."""
    size = packed.dtype.itemsize
    elements = _C_INTEGERS[size] * (torch.ops.mkldnn._nbytes(packed) // size)
    return torch.from_numpy(np.ctypeslib.as_array(elements.from_address(torch.ops.mkldnn.data_ptr(packed))))


@cache
def _layout(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return by how much each row and each column moves an element in the memory of a packed weight.

    oneDNN's layouts are blocks in blocks: the offset of an element is the sum of one for its row and one for
    its column. They are found by packing weights that hold the digits of these numbers, and verified on one
    with other values everywhere. Raises ModelError if a layout is another.
    """

    def offsets(axis: int) -> Tensor:
        numbers, digit = torch.arange(shape[axis]), 1
        found = torch.zeros_like(numbers)
        while True:
            weight = torch.zeros(shape, dtype=dtype)
            weight.select(1 - axis, 0).copy_(numbers // digit % _DIGITS + 1)
            packed = pack(weight)
            memory = _memory(packed)
            at = torch.from_numpy(np.flatnonzero(memory.numpy()))
            if len(at) != len(numbers):
                raise ModelError(f"a packed weight of {list(shape)} is not a permutation of its elements")
            found += (memory.view(dtype)[at].long() - 1) * digit
            digit *= _DIGITS
            if digit >= len(numbers):
                return at[found.argsort()]

    rows, columns = offsets(0), offsets(1)
    columns -= rows[0].clone()
    codes = (torch.randint(_PRIME, (size,), dtype=torch.int16) for size in shape)
    weight = (next(codes)[:, None] + next(codes)).remainder_(_PRIME).to(dtype)
    packed = pack(weight)
    memory = _memory(packed).view(dtype)
    for first in range(0, shape[0], _ROWS):
        block = slice(first, first + _ROWS)
        if not torch.equal(memory[rows[block, None] + columns], weight[block]):
            raise ModelError(f"a packed weight of {list(shape)} is not laid out in blocks")
    return rows, columns
