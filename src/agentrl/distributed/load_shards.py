"""Fill a split and sharded model on the meta device: each rank reads its own parts of a checkpoint's files.

transformers' renamings and conversions say which tensors of the files make a parameter. Its own reader of
slices (``DtensorShardOperation``) takes the same slice of each tensor that is concatenated, which is not the
shard of the result: it suits its plans, and not a shard within an expert. It takes twice the memory: a rank
that reads a bfloat16 model into float32 grows by 2.4 times its shard, and here by 1.2 times
(``scripts/bench/load.py``).
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import load_state_dict
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from transformers.utils.loading_report import LoadStateDictInfo

from agentrl.config.schema import ModelConfig
from agentrl.errors import ModelError
from agentrl.model.load import allocate, check_names, compute_buffers, load_model, tied_apart
from agentrl.weights.folder import read_config

_BLOCK = 64 << 20
"""Bytes of a tensor that are read and converted at once."""

Box = tuple[slice, ...]
"""A part of a tensor: a range along each dimension."""
Reader = Callable[[Box], Tensor]
"""Returns a part of a tensor of the checkpoint."""


@torch.no_grad()
def load_shards(
    model: Any, folder: Path, device: torch.device, config: ModelConfig, new: Collection[str] = ()
) -> None:
    """Allocate this rank's parts of ``model``, which is on the meta device, and read them from ``folder``.

    Tensors ``new`` are in no file: they are allocated, with undefined values.

    Each part is read and converted to its parameter's dtype block by block. Adapters keep their values. What
    transformers converts in another way than by stacking and concatenating is read whole, one tensor at a
    time; a quantized model is loaded whole. Raises ModelError for files that do not hold the whole model.
    """
    checkpoint = _open_checkpoint(folder, model, config)
    allocate(model, device)
    compute_buffers(model, _read_parts(model, folder, checkpoint, new))


@torch.no_grad()
def replace_weights(model: Any, folder: Path, config: ModelConfig) -> None:
    """Read ``folder`` into this rank's parts of ``model``, as ``load_shards`` does, in place of its weights.

    After a ModelError the model holds a mixture of both.
    """
    _read_parts(model, folder, _open_checkpoint(folder, model, config))


def _read_parts(
    model: Any, folder: Path, checkpoint: CheckpointFiles, new: Collection[str] = ()
) -> Collection[Tensor]:
    """Fill this rank's parts of ``model`` and return them. Raises ModelError as ``load_shards``."""
    targets = _targets(model)
    filled: dict[int, Tensor] = {}
    groups, unused, rules = _match(model, checkpoint, targets)
    model._weight_conversions = [rule for rule in rules if rule.was_used()]  # saving reverts them
    try:
        for group in groups:
            with checkpoint.open(group.names) as sources:
                for name, read in group.readers(model, sources, targets):
                    _fill(name, targets[name], read, is_filled=id(targets[name]) in filled)
                    filled[id(targets[name])] = targets[name]
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"the weights in {folder} cannot be loaded: {error}", hint="check its config.json and weights"
        ) from error
    missing = {name for name, target in targets.items() if id(target) not in filled and name not in new}
    report = LoadStateDictInfo(missing, unused, set(), [], {}, set())
    model._adjust_missing_and_unexpected_keys(report)
    check_names(str(folder), model, targets, report.missing_keys, report.unexpected_keys)
    return filled.values()


@dataclass(frozen=True)
class ShardRows:
    """Some rows of this rank's part of a parameter; a row lies along the last dimension."""

    places: Tensor
    """Row numbers, with the part viewed as a matrix."""
    values: Tensor

    def of(self, part: Tensor) -> Tensor:
        """Return the same rows of another tensor of that shape."""
        return part.reshape(-1, part.shape[-1]).index_select(0, self.places.to(part.device))


def read_rows(model: Any, folder: Path, names: Collection[str], limit: int) -> dict[str, ShardRows]:
    """Read at most ``limit`` rows, evenly spread, of this rank's part of each parameter in ``names``.

    The values are those that loading ``folder`` would give, in the dtype of its files. Parameters that have
    no dimension are left out, and so are all of a quantized model. Raises ModelError for files that do not
    fit ``model``.
    """
    if "quantization_config" in read_config(folder):
        return {}
    checkpoint, targets = _open_files(folder), _targets(model)
    found = {}
    try:
        for group in _match(model, checkpoint, targets)[0]:
            with checkpoint.open(group.names) as sources:
                for name, read in group.readers(model, sources, targets):
                    local, first = _part(targets[name])
                    if name in names and local.numel() and local.dim():
                        found[name] = _spread_rows(local.shape, first, read, limit)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ModelError(f"the weights in {folder} cannot be read: {error}") from error
    return found


def _spread_rows(shape: torch.Size, first: Sequence[int], read: Reader, limit: int) -> ShardRows:
    count = math.prod(shape[:-1])
    places = torch.linspace(0, count - 1, min(limit, count)).long()
    indices = torch.stack(torch.unravel_index(places, shape[:-1]), -1).tolist() if shape[:-1] else [[]]
    last = slice(first[-1], first[-1] + shape[-1])
    boxes = [
        (*(slice(at + i, at + i + 1) for at, i in zip(first, index, strict=False)), last) for index in indices
    ]
    return ShardRows(places, torch.stack([read(box).reshape(-1) for box in boxes]))


@dataclass(frozen=True)
class CheckpointFiles:
    """The tensors of a model's folder, by name."""

    files: Mapping[str, Path]
    """The safetensors file of each tensor."""
    tensors: Mapping[str, Tensor]
    """Tensors that are in no such file: mapped from a file of PyTorch, or in memory."""
    is_converted: bool = False
    """Whether names and tensors are the model's own already."""

    @property
    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return (*self.files, *self.tensors)

    @contextmanager
    def open(self, names: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Yield what reads parts of the tensors ``names``.

        The files are mapped for the length of the block only: pages that were read count as used memory.
        """
        with ExitStack() as stack:
            paths = {self.files[name] for name in names if name in self.files}
            opened = {path: stack.enter_context(safe_open(path, "pt")) for path in paths}
            yield {
                name: opened[self.files[name]].get_slice(name) if name in self.files else self.tensors[name]
                for name in names
            }


def _open_checkpoint(folder: Path, model: Any, config: ModelConfig) -> CheckpointFiles:
    if hasattr(model.config, "quantization_config"):
        whole = load_model(folder, config, model.dtype)
        del model.config.quantization_config
        return CheckpointFiles({}, whole.state_dict(), is_converted=True)
    return _open_files(folder)


def _open_files(folder: Path) -> CheckpointFiles:
    try:
        paths = _files(folder, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
        files: dict[str, Path] = {}
        for path in paths:
            with safe_open(path, "pt") as opened:
                files |= dict.fromkeys(opened.keys(), path)
        tensors: dict[str, Tensor] = {}
        for path in () if paths else _files(folder, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
            tensors |= load_state_dict(str(path))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"the weights in {folder} cannot be read: {error}", hint="fetch the folder again"
        ) from error
    if not files and not tensors:
        raise ModelError(
            f"{folder} has no weights: neither {SAFE_WEIGHTS_NAME} nor {WEIGHTS_NAME}, nor their index",
            hint="give a folder that save_pretrained wrote",
        )
    return CheckpointFiles(files, tensors)


def _files(folder: Path, single: str, index: str) -> list[Path]:
    if (folder / single).is_file():
        return [folder / single]
    if not (folder / index).is_file():
        return []
    content = json.loads((folder / index).read_text(encoding="utf-8"))
    return [folder / name for name in sorted(set(content["weight_map"].values()))]


def _targets(model: Any) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint of ``model`` without its adapters has, tied ones by each name."""
    tensors = model.state_dict(keep_vars=True).items()
    return {_plain(name): tensor for name, tensor in tensors if ".lora_" not in name}


def _plain(name: str) -> str:
    """Return the name that a parameter has without an adapter beside it."""
    return name.replace(".base_layer.", ".")


@dataclass(frozen=True)
class Group:
    """The tensors of a checkpoint that make a parameter, or several."""

    target: str
    """The name of the parameter, or of the first one."""
    converter: WeightConverter | None
    """None for one tensor that is taken as it is."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Names of the tensors for each pattern of the converter."""

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return [name for names in self.sources.values() for name in names]

    def readers(
        self, model: Any, sources: Mapping[str, Any], targets: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Reader]]:
        """Yield the name of each parameter that this rank holds, and what reads a part of it."""
        shape = targets[self.target].shape
        if self.converter is None:
            (source,) = sources.values()
            _check_shape(self.target, _shape(source), shape)
            yield self.target, partial(_read, source)
            return
        patterns = [name for name in self.converter.source_patterns if name in self.sources]
        parts = [[sources[name] for name in self.sources[pattern]] for pattern in patterns]
        dimension = _stacking(self.converter, parts, shape)
        if dimension is not None:
            _check_shape(self.target, _stacked_shape(parts, dimension), shape)
            yield self.target, partial(_read_stacked, parts, dimension)
            return
        for name, whole in self._convert(model, sources).items():
            if name in targets:
                _check_shape(name, whole.shape, targets[name].shape)
                yield name, whole.__getitem__

    def _convert(self, model: Any, sources: Mapping[str, Any]) -> dict[str, Tensor]:
        converter: Any = copy.deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names:
                converter.add_tensor(self.target, name, pattern, partial(_read, sources[name], ()))
        found = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def _match(
    model: Any, checkpoint: CheckpointFiles, targets: Mapping[str, Tensor]
) -> tuple[list[Group], set[str], list[Any]]:
    """Return the groups of which this rank holds a parameter, by the rules of ``from_pretrained``.

    The second result names the other tensors, of another stage of layers or of none. The third has the rules.
    """
    rules = [] if checkpoint.is_converted else get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix, known = model.base_model_prefix, dict(targets)
    groups: dict[str, Group] = {}
    unused = set()
    for key in sorted(checkpoint.names, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in targets and key in targets:
            name, pattern = rename_source_key(key, [], [], prefix, known)
        if name not in targets:
            unused.add(name)
        elif pattern is None:
            groups[key] = Group(name, None, {key: [key]})
        else:
            group = groups.setdefault(name, Group(name, by_pattern[pattern]))
            group.sources.setdefault(pattern, []).append(key)
    return list(groups.values()), unused, rules


def _fill(name: str, target: Tensor, read: Reader, *, is_filled: bool) -> None:
    """Copy this rank's part of ``target``; raise ValueError if it is filled with other values already."""
    for part, box in _blocks(target):
        values = read(box)
        if not is_filled:
            part.copy_(values)
        elif not torch.equal(part, values.to(part)):
            raise ValueError(tied_apart(name))


def _blocks(target: Tensor) -> Iterator[tuple[Tensor, Box]]:
    """Yield this rank's part of ``target`` in blocks of rows, each with its place in the whole."""
    local, first = _part(target)
    if local.numel() == 0:
        return
    if local.dim() == 0:
        yield local, ()
        return
    rows = max(1, _BLOCK * len(local) // (local.numel() * local.element_size()))
    for start in range(0, len(local), rows):
        block = local[start : start + rows]
        begins = (first[0] + start, *first[1:])
        yield block, tuple(slice(at, at + size) for at, size in zip(begins, block.shape, strict=True))


def _part(target: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of ``target``, and where it begins in the whole."""
    if not isinstance(target, DTensor):
        return target, tuple(0 for _ in target.shape)
    _, first = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    return target.to_local(), first


def _read(source: Any, box: Box) -> Tensor:
    values: Tensor = source[box or ...]
    return values


def _stacking(converter: WeightConverter, parts: list[list[Any]], shape: torch.Size) -> int | None:
    """Return the dimension along which ``converter`` concatenates stacks of tensors; None if it does not.

    Each of ``parts`` is stacked along a new first dimension, as the matrices of the experts are.
    """
    match converter.operations:
        case [MergeModulelist(dim=0)] if len(parts) == 1:
            dimension = 1
        case [MergeModulelist(dim=0), Concatenate(dim=int(dimension))] if dimension > 0:
            pass
        case _:
            return None
    are_rows = all(len(_shape(source)) == len(shape) - 1 for part in parts for source in part)
    return dimension if are_rows and len(converter.target_patterns) == 1 else None


def _read_stacked(parts: list[list[Any]], dimension: int, box: Box) -> Tensor:
    read, start = [], 0
    for part in parts:
        width = _shape(part[0])[dimension - 1]
        low, high = max(box[dimension].start, start), min(box[dimension].stop, start + width)
        if low < high:
            inner = list(box[1:])
            inner[dimension - 1] = slice(low - start, high - start)
            read.append(torch.stack([source[tuple(inner)] for source in part[box[0]]]))
        start += width
    return torch.cat(read, dimension)


def _stacked_shape(parts: list[list[Any]], dimension: int) -> torch.Size:
    counts = {len(part) for part in parts}
    if len(counts) > 1:
        raise ValueError(f"{sorted(counts)} tensors are to be stacked beside each other")
    shape = [*counts, *_shape(parts[0][0])]
    shape[dimension] = sum(_shape(part[0])[dimension - 1] for part in parts)
    return torch.Size(shape)


def _shape(source: Any) -> torch.Size:
    return source.shape if isinstance(source, Tensor) else torch.Size(source.get_shape())


def _check_shape(name: str, found: torch.Size, expected: torch.Size) -> None:
    if found != expected:
        raise ValueError(f"{name} has shape {list(found)}, and the model's is {list(expected)}")
