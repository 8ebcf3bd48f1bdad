"""Copy the weights that a rank writes to host memory; write them as safetensors while training goes on.

transformers 5 writes ``rope_parameters`` instead of ``rope_theta``, ``rope_scaling`` and
``partial_rotary_factor``, ``dtype`` instead of ``torch_dtype``, and ``num_local_experts`` instead of
``num_experts``. A reader of the older spelling finds none of these and takes defaults without a word, such as
a rotary base of 10,000 instead of 1,000,000.

Every rank owns whole layers, because transformers splits and joins tensors within a layer. All ranks that
hold a layer gather it; its owner alone converts it to the names in the files and copies it.
``huggingface_hub.save_torch_state_dict`` would need the whole state dict on one rank.

Why not ``safetensors.torch.save_file``? It would leave the files to be read again for their checksums.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.documents.run import FileChecksum
from agentrl.weights.folder import TensorChecksum, file_header, raw, read_config, weights_digest

_OWN = frozenset(("architectures", "dtype", "torch_dtype", "quantization_config"))
"""Fields that describe what is written, not the base: the class, its dtype, and that nothing is quantized."""
_MOVED = ("rope_theta", "partial_rotary_factor")
"""Fields that transformers 5 moved into ``rope_parameters`` under the same name."""
_OLDER_NAMES = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}


def write_config(folder: Path, base: Path | None, dtype: str | None, config: Any = None) -> None:
    """Complete the config.json in ``folder``, which transformers wrote, in both spellings.

    Fields of the config.json in ``base`` keep their spelling and their values. ``dtype``, if given, is
    written into each part of the model that names one. ``config`` is what transformers wrote, as an object:
    it knows the other names of its fields. Raises ModelError if a file cannot be read.
    """
    content = read_config(folder)
    if base is not None:
        content = _joined(read_config(base), content)
    for key, part in [
        ("", content),
        *((key, part) for key, part in content.items() if isinstance(part, dict)),
    ]:
        if not key or part.keys() & {"dtype", "torch_dtype"}:
            named = dtype or part.get("dtype")
            part.update({} if named is None else {"dtype": named, "torch_dtype": named})
        owner = getattr(config, key, None) if key else config
        for other, name in getattr(owner, "attribute_map", {}).items():
            if name in part:
                part.setdefault(other, part[name])
        _spell_rope(part)
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _joined(base: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ``base``, and beside them those that ``written`` alone has."""
    joined = {**written, **{key: value for key, value in base.items() if key not in _OWN}}
    for key, value in written.items():
        if key.endswith("_config") and isinstance(value, dict) and isinstance(base.get(key), dict):
            joined[key] = _joined(base[key], value)
    return joined


def _spell_rope(part: dict[str, Any]) -> None:
    """Write beside ``rope_parameters`` of a part what it says in the older spelling."""
    found = part.get("rope_parameters")
    if not isinstance(found, dict):
        return
    # By kind of layer in some models. The older spelling has one, of layers with full attention.
    whole, sliding = found.get("full_attention", found), found.get("sliding_attention")
    if not isinstance(whole, dict) or any(isinstance(value, dict) for value in whole.values()):
        return
    kind = str(part.get("model_type"))
    for name in _MOVED:
        older = _OLDER_NAMES.get(kind, {}).get(name, name)
        if name in whole and part.get(older) != whole[name]:
            part[older] = whole[name]
    if kind.startswith("gemma3") and isinstance(sliding, dict) and "rope_theta" in sliding:
        part["rope_local_base_freq"] = sliding["rope_theta"]
    scaling = {name: value for name, value in whole.items() if name not in _MOVED}
    part.setdefault("rope_scaling", None if scaling in ({}, {"rope_type": "default"}) else scaling)


logger = logging.getLogger(__name__)

FILE_BYTES = 2 << 30
"""Largest size of a file of weights; a single larger layer still goes into one file."""
WHOLE = "model.safetensors"


@dataclass(frozen=True)
class Part:
    """One tensor of a model."""

    name: str
    like: Tensor
    """A tensor of the shape and dtype in the files, possibly on the meta device."""
    make: Callable[[], Tensor]
    """Returns the tensor, which the copy converts to that dtype; a DTensor if processes share it."""

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.like.nbytes


def model_parts(model: Any) -> Iterator[Part]:
    """Yield the tensors of ``model`` in the order of its state dict; tied tensors once."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield Part(name, tensor, tensor.detach)


class WeightSource(Protocol):
    """What is written: a model's weights, or an adapter alone."""

    def parts(self) -> Iterator[Part]:
        """Yield this rank's tensors, in the same order on every rank that holds them."""

    def convert(self, tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the whole tensors of a layer under their names in the files."""

    def configuration(self) -> dict[str, bytes]:
        """Return the content of the files beside the weights, by name."""


@dataclass(frozen=True)
class PublishedModel:
    """What engines load: the tensors of ``source`` in ``dtype``, each converted when it is gathered."""

    model: Any
    source: Callable[[], Iterator[Part]]
    dtype: torch.dtype | None
    """None: the tensors keep their dtype."""
    base: Path | None = None
    """The folder whose config.json keeps its spelling, and whose other files ``complete_folder`` copies."""

    def parts(self) -> Iterator[Part]:
        """Yield the tensors, converted where they are; those that the model keeps in float32 stay so."""
        kept = () if self.dtype is None else self.model._get_dtype_plan(self.dtype)
        pattern = re.compile("|".join(key.replace("*", ".*") for key in kept) or r"(?!)")
        ignored = self.model._keys_to_ignore_on_save or ()
        for part in self.source():
            if part.name in ignored:
                continue
            converts = part.like.is_floating_point() and not pattern.search(part.name)
            dtype = self.dtype if converts and self.dtype is not None else part.like.dtype
            like = torch.empty(part.like.shape, dtype=dtype, device="meta")
            yield Part(part.name, like, partial(_converted, part, dtype))

    def convert(self, tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """Split again what transformers fused when it loaded the model, and restore the names."""
        from transformers.core_model_loading import revert_weight_conversion

        converted: dict[str, Tensor] = revert_weight_conversion(self.model, tensors)
        return converted

    def configuration(self) -> dict[str, bytes]:
        """Return config.json, and those of generation_config.json and the model's code that no base has."""
        dtype = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        with tempfile.TemporaryDirectory() as scratch:
            # Pass no tensors: the configuration alone is written.
            self.model.save_pretrained(scratch, state_dict={})
            write_config(Path(scratch), self.base, dtype, self.model.config)
            found = {path.name: path for path in Path(scratch).iterdir() if path.is_file()}
            if self.base is not None:  # ``complete_folder`` copies them as they are
                copied = {name for name in found if (self.base / name).is_file()} - {"config.json"}
                found = {name: path for name, path in found.items() if name not in copied}
            return {name: path.read_bytes() for name, path in found.items()}


def _converted(part: Part, dtype: torch.dtype) -> Tensor:
    """Return a part, in ``dtype`` if ranks gather it: these are fewer bytes."""
    tensor = part.make()
    is_gathered = isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1
    return tensor.to(dtype) if is_gathered else tensor


@dataclass(frozen=True)
class Holding:
    """Which ranks hold a tensor, and its shape and dtype."""

    ranks: tuple[int, ...]
    like: Tensor
    """A tensor on the meta device."""


@dataclass(frozen=True)
class FilePlan:
    """One file of weights, and the rank that writes it."""

    name: str
    owner: int
    layers: tuple[tuple[str, ...], ...]
    """The names of the tensors of each layer."""
    bytes: int


def exchange_holdings(source: WeightSource) -> dict[str, Holding]:
    """Exchange which ranks hold which tensor; every rank calls it, and has the same result in one order."""
    own = {part.name: (part.like.shape, part.like.dtype) for part in source.parts()}
    held: list[Any] = [own]
    if dist.is_initialized():
        held = [None] * dist.get_world_size()
        dist.all_gather_object(held, own)
    ranks: dict[str, list[int]] = {}
    for rank, names in enumerate(held):
        for name in names:
            ranks.setdefault(name, []).append(rank)
    return {
        name: Holding(
            tuple(holders),
            torch.empty(held[holders[0]][name][0], dtype=held[holders[0]][name][1], device="meta"),
        )
        for name, holders in ranks.items()
    }


def plan_files(
    source: WeightSource, holdings: Mapping[str, Holding], limit: int = FILE_BYTES
) -> list[FilePlan]:
    """Return the files, each with its writer: whole layers, balanced by bytes among the ranks that hold them.

    A file has at most ``limit`` bytes, or one layer. Layers that cannot be converted one by one are one file.
    """
    layers = _layers(source, holdings)
    loads: dict[int, int] = dict.fromkeys({rank for item in holdings.values() for rank in item.ranks}, 0)
    owned: dict[int, list[tuple[str, ...]]] = {rank: [] for rank in sorted(loads)}
    for layer in sorted(layers, key=lambda names: -_bytes(holdings, names)):
        owner = min(holdings[layer[0]].ranks, key=lambda rank: (loads[rank], rank))
        loads[owner] += _bytes(holdings, layer)
        owned[owner].append(layer)
    position = {layer: number for number, layer in enumerate(layers)}
    groups: list[tuple[int, list[tuple[str, ...]]]] = []
    for rank, mine in owned.items():
        # Start above the limit, so that the first layer of each rank opens a file.
        size = limit + 1
        for layer in sorted(mine, key=position.__getitem__):
            size += _bytes(holdings, layer)
            if size > limit:
                groups.append((rank, []))
                size = _bytes(holdings, layer)
            groups[-1][1].append(layer)
    return [
        FilePlan(
            WHOLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors",
            rank,
            tuple(group),
            sum(_bytes(holdings, layer) for layer in group),
        )
        for number, (rank, group) in enumerate(groups, 1)
    ]


def _layers(source: WeightSource, holdings: Mapping[str, Holding]) -> list[tuple[str, ...]]:
    """Group the tensors by layer; all tensors of the same ranks are one group if a layer needs another."""

    def names_in_files(groups: Iterable[Iterable[str]]) -> set[tuple[str, torch.Size]]:
        empty = ({name: torch.empty_like(holdings[name].like) for name in group} for group in groups)
        return {(name, value.shape) for group in empty for name, value in source.convert(group).items()}

    def layer_of(name: str) -> tuple[tuple[int, ...], str]:
        found = re.match(r"(.*?\.\d+)\.", name)
        return holdings[name].ranks, found[1] if found else name

    layers = [tuple(group) for _, group in itertools.groupby(holdings, layer_of)]
    if names_in_files(layers) == names_in_files([list(holdings)]):
        return layers
    logger.warning("the weights are written without splitting them by layer: the layers depend on each other")
    return [tuple(group) for _, group in itertools.groupby(holdings, lambda name: holdings[name].ranks)]


def _bytes(holdings: Mapping[str, Holding], names: Sequence[str]) -> int:
    return sum(holdings[name].like.nbytes for name in names)


@dataclass(frozen=True)
class Snapshot:
    """This rank's share of the weights of one step, in host memory."""

    files: dict[str, dict[str, Tensor]]
    """{file name: {name in the file: tensor}}."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the share by name."""
        return {name: tensor for file in self.files.values() for name, tensor in file.items()}


@dataclass
class Snapshots:
    """Takes the snapshots of one rank. Released ones give their memory to later ones."""

    source: WeightSource
    plan: Sequence[FilePlan]
    rank: int = 0
    _spare: list[Snapshot] = field(default_factory=list)

    @classmethod
    def of(cls, source: WeightSource, limit: int = FILE_BYTES) -> Snapshots:
        """Plan who writes what; every rank calls it."""
        plan = plan_files(source, exchange_holdings(source), limit)
        return cls(source, plan, dist.get_rank() if dist.is_initialized() else 0)

    @torch.no_grad()
    def take(self) -> Snapshot:
        """Gather all tensors and copy this rank's share; every rank calls it. It ends when all are copied.

        No memory is allocated if an earlier snapshot was released. On a GPU it is pinned, and the copies of
        one layer overlap the gathering of the next.
        """
        spare = self._spare.pop() if self._spare else Snapshot({})
        parts = {part.name: part for part in self.source.parts()}
        taken = Snapshot({file.name: {} for file in self.plan if file.owner == self.rank})
        layers = {layer[0]: (file, layer) for file in self.plan for layer in file.layers}
        is_cuda = False
        for name in parts:  # in the order of the model, in which all ranks gather
            if name not in layers:
                continue
            file, layer = layers[name]
            # Gather for other owners too: an owner waits for every rank that holds a part.
            whole = {key: gather(parts[key].make()) for key in layer}
            if file.owner != self.rank:
                continue
            dtypes = {parts[key].like.dtype for key in layer}
            if len(dtypes) > 1:  # by the names in the files they are not known
                whole = {key: value.to(parts[key].like.dtype) for key, value in whole.items()}
            used = spare.files.get(file.name, {})
            for key, value in self.source.convert(whole).items():
                is_cuda |= value.is_cuda
                dtype = value.dtype if len(dtypes) > 1 else parts[name].like.dtype
                taken.files[file.name][key] = _copy(value, dtype, used.get(key))
            del whole  # before the next layer is gathered
        if is_cuda:
            torch.cuda.current_stream().synchronize()
        return taken

    @property
    def bytes(self) -> int:
        """Bytes of the weights of all ranks."""
        return sum(file.bytes for file in self.plan)

    def release(self, snapshot: Snapshot) -> None:
        """Let later snapshots use the memory of ``snapshot``, which nobody reads any more."""
        self._spare.append(snapshot)


def gather(tensor: Tensor) -> Tensor:
    """Return the whole tensor on its device; every rank that holds a part calls it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _copy(value: Tensor, dtype: torch.dtype, used: Tensor | None) -> Tensor:
    """Copy ``value`` to the host as ``dtype``, into ``used`` if it fits."""
    if used is None or (used.shape, used.dtype) != (value.shape, dtype):
        used = torch.empty(value.shape, dtype=dtype, pin_memory=value.is_cuda)
    return used.copy_(value, non_blocking=True)


INDEX = f"{WHOLE}.index.json"
_PARALLEL_FILES = 4


@dataclass(frozen=True)
class Written:
    """What was written of a set of weights: a rank's share, or all of it."""

    files: tuple[FileChecksum, ...] = ()
    tensors: Mapping[str, TensorChecksum] = field(default_factory=dict)
    """By name; of the whole weights also where the files hold only what differs from a base."""
    places: Mapping[str, str] = field(default_factory=dict)
    """{tensor: file} of the tensors in the files."""

    @property
    def digest(self) -> str:
        """The same for the same weights, however they are encoded and distributed over files."""
        return weights_digest(self.tensors)

    @property
    def bytes(self) -> int:
        """Bytes of the files."""
        return sum(file.bytes for file in self.files)


def join(shares: Iterable[Written]) -> Written:
    """Return what all ranks together have written."""
    shares = list(shares)
    return Written(
        tuple(sorted((file for share in shares for file in share.files), key=lambda file: file.name)),
        {name: checksum for share in shares for name, checksum in share.tensors.items()},
        {name: place for share in shares for name, place in share.places.items()},
    )


def write_share(folder: Path, snapshot: Snapshot) -> Written:
    """Write a rank's files into ``folder``, which exists, and flush them to disk. Raises OSError."""
    # Use two pools: in one, writers that wait for hashers could hold every thread.
    with ThreadPoolExecutor(_PARALLEL_FILES) as writers, ThreadPoolExecutor(_PARALLEL_FILES) as hashers:
        return join(
            writers.map(lambda item: _write_file(folder / item[0], item[1], hashers), snapshot.files.items())
        )


def write_beside(folder: Path, written: Written, configuration: Mapping[str, bytes]) -> None:
    """Write what rank 0 adds to the files of all ranks: the index of several files, and the configuration."""
    for name, content in configuration.items():
        (folder / name).write_bytes(content)
    if len(set(written.places.values())) > 1:
        index = {"metadata": {"total_size": written.bytes}, "weight_map": dict(written.places)}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_alone(source: WeightSource, folder: Path) -> Written:
    """Write the weights of a single process into ``folder``, with their configuration. Raises OSError."""
    written = write_share(folder, Snapshots.of(source).take())
    write_beside(folder, written, source.configuration())
    return written


def _write_file(path: Path, tensors: Mapping[str, Tensor], hashers: ThreadPoolExecutor) -> Written:
    """Write one file; another thread computes the tensors' own checksums meanwhile."""
    names, start = file_header(tensors)
    whole = hashlib.sha256(start)
    checksums = {name: hashers.submit(TensorChecksum.of, tensors[name]) for name in names}
    with path.open("xb") as file:
        file.write(start)
        for name in names:
            data = raw(tensors[name]).data
            whole.update(data)
            file.write(data)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    written = FileChecksum(name=path.name, bytes=size, sha256=whole.hexdigest())
    found = {name: checksum.result() for name, checksum in checksums.items()}
    return Written((written,), found, dict.fromkeys(names, path.name))
