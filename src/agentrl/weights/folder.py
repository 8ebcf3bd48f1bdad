"""A model's folder, without torch: read it, write it with checksums, verify it, hash it; adapters too.

Everything that reads an adapter comes through here: the trainer, the local engine and the merge into whole
weights. Other engines get adapters that AgentRL trained, or merged weights.

A tensor's checksum is XXH3 of 128 bits, which costs a tenth of SHA-256: it finds damage, not forgery. Files
that cross a network have a SHA-256 beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from agentrl.base.atomic_folder import atomic_folder, replace_file
from agentrl.config.schema import ModelConfig
from agentrl.documents.model_call import ExpertShape
from agentrl.documents.run import FileChecksum
from agentrl.errors import ConfigError, ModelError, PublishError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_ARCHITECTURE_KEYS = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "intermediate_size", "head_dim", "tie_word_embeddings", "num_experts",
)  # fmt: skip
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_WHOLE_WEIGHTS = ("model.safetensors", ADAPTER_WEIGHTS, "pytorch_model.bin")
PEFT_PREFIX = "base_model.model."
"""What peft's files put before the name of each module of the model."""
_IN_FILES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_DTYPE_KEYS = ("dtype", "torch_dtype")


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of ``config.json``. Raises ModelError if it cannot be read."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder} is not a model folder: its config.json cannot be read: {error}",
            hint="give a folder that save_pretrained wrote",
        ) from error
    return config


def stored_dtype(folder: Path) -> str:
    """Return the dtype of the model in ``folder``: float32, bfloat16 or float16.

    It is the one that config.json names; if it names none of these, the one of most weights in safetensors
    files; float32 without such files. Raises ModelError if a file cannot be read.
    """
    config = read_config(folder)
    for part in (config, config.get("text_config") or {}):
        for key in _DTYPE_KEYS:
            named = str(part.get(key)).removeprefix("torch.")
            if named in _IN_FILES.values():
                return named
    counts: Counter[str] = Counter()
    for file in tensor_files(folder):
        for entry in read_header(file).values():
            counts[entry["dtype"]] += math.prod(entry["shape"])
    found = [_IN_FILES[kind] for kind, _ in counts.most_common() if kind in _IN_FILES]
    return found[0] if found else "float32"


def replayed_experts(model: ModelConfig, folder: str) -> ExpertShape | None:
    """Return the shape of the experts in ``folder`` if their routing is replayed; None for a dense model.

    Raises ConfigError if ``--router_replay on`` names a model without experts, or one that cannot be read.
    """
    if model.router_replay == "off":
        return None
    try:
        shape = expert_shape(read_config(Path(folder)))
    except ModelError:
        shape = None
    if shape is None and model.router_replay == "on":
        raise ConfigError(
            f"--router_replay on: {folder} names no experts in a config.json", hint="leave it at auto"
        )
    return shape


def expert_shape(config: Mapping[str, Any]) -> ExpertShape | None:
    """Return the shape of a mixture's experts by its configuration; None for a dense model."""
    # Of a vision model, the part for text has the experts.
    text = config.get("text_config") or config
    counts = (text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    experts = next((count for count in counts if isinstance(count, int) and count > 1), None)
    layers, top_k = text.get("num_hidden_layers"), text.get("num_experts_per_tok")
    if experts is None or not isinstance(layers, int) or not isinstance(top_k, int):
        return None
    return ExpertShape(layers=layers, top_k=top_k, experts=experts)


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights that loading ``folder`` reads, by name.

    These are the one file of the whole weights, else those that the index lists, as transformers chooses
    them: Mistral's ``consolidated.safetensors`` beside them is a second copy. Without either they are all
    files of weights. Raises ModelError for an index that cannot be read.
    """
    for name in _WHOLE_WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                listed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
                return sorted(folder / file for file in listed)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ModelError(
                    f"{index} cannot be read: {error}", hint="download the model again"
                ) from error
    return sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".gguf"))


def tensor_files(folder: Path) -> list[Path]:
    """Return the safetensors files among ``weight_files``."""
    return [path for path in weight_files(folder) if path.suffix == ".safetensors"]


def stored_bytes(folder: Path) -> int:
    """Return the bytes of the ``weight_files``. Raises OSError if one cannot be read, and ModelError."""
    return sum(path.stat().st_size for path in weight_files(folder))


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Return {name: {dtype, shape, …}} of the tensors in a safetensors file. ModelError for another file."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header: dict[str, dict[str, Any]] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
    # Expect any length: the first 8 bytes of another file are any number.
    except (OSError, ValueError, AttributeError, struct.error, OverflowError, MemoryError) as error:
        raise ModelError(
            f"{file} cannot be read as safetensors: {error}", hint="download the model again"
        ) from error
    return header


def require_config(folder: Path, flag: str) -> None:
    """Raise ModelError if ``folder``, the value of ``flag``, has no config.json."""
    if not folder.is_dir():
        raise ModelError(
            f"{flag} {folder} is not a folder",
            hint="give a local Hugging Face folder; `hf download NAME --local-dir FOLDER` fetches one",
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json", hint="give a folder that save_pretrained wrote")


def base_folder(config: ModelConfig) -> Path:
    """Return the folder of ``--model_name_or_path``; ModelError if it is missing or lacks a model's files."""
    if config.model_name_or_path is None:
        raise ModelError("no model is given", hint="give --model_name_or_path FOLDER")
    folder = Path(config.model_name_or_path)
    require_config(folder, "--model_name_or_path")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"{folder} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)})",
            hint="copy the tokenizer's files into the folder",
        )
    if is_adapter(folder):
        raise ModelError(
            f"{folder} holds an adapter, not a model",
            hint="give the folder of published weights, …/weights/v…",
        )
    return folder


def require_folder(config: ModelConfig) -> None:
    """Raise ModelError as ``base_folder`` does, if a folder is given. Call it before a run is begun."""
    if config.model_name_or_path is not None:
        base_folder(config)


def require_weights(folder: Path) -> None:
    """Raise ModelError unless the weights of ``folder`` are there; of safetensors read the headers alone."""
    hint = "download the model again: hf download NAME --local-dir FOLDER"
    files = weight_files(folder)
    missing = [file.name for file in files if not file.is_file()] if files else ["model.safetensors"]
    if missing:
        raise ModelError(f"{folder} has no weights: {', '.join(missing[:5])} is not there", hint=hint)
    for file in files:
        if file.suffix == ".safetensors":
            read_header(file)


def architecture(folder: Path) -> dict[str, Any]:
    """Return the keys of config.json that decide whether weights fit: type, sizes, tied embeddings."""
    content = read_config(folder)
    content |= content.get("text_config") or {}
    return {key: content[key] for key in _ARCHITECTURE_KEYS if content.get(key) is not None}


ADAPTER_CONFIG = "adapter_config.json"
"""The file by which peft's folder of an adapter is recognized."""
_APPLIED = frozenset(("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"))
_SELECT = frozenset(("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"))
"""Which layers have an adapter: the names of the tensors say so too."""
_WITHOUT_EFFECT = frozenset(
    ("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision",
     "inference_mode", "lora_dropout", "megatron_core", "qalora_group_size", "eva_config")
)  # fmt: skip
"""Fields without effect on a stored adapter; the last three have one only with a setting that is refused."""
_UNSET: tuple[Any, ...] = (None, False, "none", {}, [])
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initializations that leave the base model's weights as they are. The others, such as PiSSA, change them."""


def is_adapter(folder: Path) -> bool:
    """Return whether ``folder`` holds an adapter instead of a model's weights."""
    return (folder / ADAPTER_CONFIG).is_file()


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the content of peft's ``adapter_config.json``: r, lora_alpha and target_modules are in it.

    Raises ModelError if it cannot be read, describes no LoRA, or sets anything that ``layer_scale`` and the
    product of B and A do not express, such as DoRA.
    """
    try:
        config: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        is_lora = config.get("peft_type") in (None, "LORA") and bool(set(config["target_modules"]))
        if not is_lora or config["r"] < 1 or config["lora_alpha"] < 0:
            raise ValueError("it describes no LoRA")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{folder} holds no adapter that can be read: {ADAPTER_CONFIG}: {error}",
            hint="give a LoRA adapter in peft's files",
        ) from error
    known = _APPLIED | _SELECT | _WITHOUT_EFFECT | {"init_lora_weights"}
    odd = [f"{key} {value!r}" for key, value in config.items() if key not in known and value not in _UNSET]
    if config.get("init_lora_weights") not in _STARTS:
        odd.append(f"init_lora_weights {config['init_lora_weights']!r}, which changes the base model")
    if odd:
        raise ModelError(
            f"the adapter in {folder} sets {', '.join(odd)}: AgentRL does not apply that",
            hint="merge it with peft (merge_and_unload, then save_pretrained), and give the merged folder",
        )
    return config


def layer_rank(config: dict[str, Any], layer: str) -> int:
    """Return the rank of the adapter of ``layer``, a module's name."""
    return int(_of_layer(config.get("rank_pattern"), layer, config["r"]))


def layer_scale(config: dict[str, Any], layer: str) -> float:
    """Return the factor of B·A in ``layer``, as peft computes it."""
    rank, alpha = (
        layer_rank(config, layer),
        _of_layer(config.get("alpha_pattern"), layer, config["lora_alpha"]),
    )
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_layer(patterns: dict[str, Any] | None, layer: str, default: Any) -> Any:
    """Return the value of the first of peft's patterns that matches: a regular expression of a name's end."""
    found = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", layer))
    return next(found, default)


MERGED = Path(".agentrl/merged")
_MERGE_SECONDS = 1800.0
_KILL_SECONDS = 10.0
_ERROR_LINES = 5


async def merged_model(adapter: Path, base: str | None, root: Path = MERGED) -> Path:
    """Return a folder with the whole model; merge unless the same adapter was merged into the same model.

    ``base`` is the model that the run starts from; None takes the folder that the adapter names. Raises
    ModelError if there is no such folder, and if the adapter cannot be merged within half an hour.
    """
    model = await asyncio.to_thread(_base_of, adapter, base)
    files = await asyncio.to_thread(checksums, adapter)
    key = json.dumps([[file.name, file.sha256] for file in files] + [[str(model)]])
    target = root / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not target.is_dir():
        await _merge(adapter, model, target)
    return target


def _base_of(adapter: Path, base: str | None) -> Path:
    named = base or read_adapter_config(adapter).get("base_model_name_or_path")
    folder = Path(str(named))
    if named is None or not folder.is_dir():
        raise ModelError(
            f"{adapter} holds an adapter of {named or 'an unknown model'}, which is not a folder here",
            hint="give the model that the run starts from by --model_name_or_path",
        )
    return folder.resolve()


async def _merge(adapter: Path, base: Path, target: Path) -> None:
    # Merge in a process of its own: this one may have no torch, and would keep the memory.
    command = [sys.executable, "-m", "agentrl.model.merge_adapter", str(adapter), str(base), str(target)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_MERGE_SECONDS):
            _, words = await process.communicate()
    except TimeoutError as error:
        raise ModelError(f"{adapter} could not be merged within {_MERGE_SECONDS:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            async with asyncio.timeout(_KILL_SECONDS):
                await process.wait()
    if process.returncode != 0:
        last = "\n".join(words.decode(errors="replace").strip().splitlines()[-_ERROR_LINES:])
        raise ModelError(
            f"{adapter} cannot be merged into {base}:\n{last}",
            hint="give the model that it was trained with by --model_name_or_path",
        )


CHAT_TEMPLATE = "chat_template.jinja"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_HEADROOM_BYTES = 16 << 20
_READABLE = 0o644
"""Engines may run as another user, and safetensors writes files that only their owner can read."""
_TORCH_WRITER = ("inline_container.cc", "PytorchStreamWriter")
"""Parts of the RuntimeError that ``torch.save`` raises instead of the operating system's error."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_SIGNS = ("os error 28", "os error 27", "os error 122", "no space")
"""Parts of safetensors' error for a full disk."""
_FREE_SPACE = "free space, lower --published_versions_kept or --save_total_limit, or move --output_dir"
_FICLONE = 0x40049409
"""ioctl of Linux: share the blocks of two files until one of them is written (btrfs, XFS)."""
MANIFEST = "manifest.json"
_PARALLEL_FILES = 4


def complete_folder(base: Path, folder: Path, chat_template: str | None = None) -> None:
    """Copy the other Hugging Face files of ``base`` to the weights in ``folder``, and let everybody read all.

    ``chat_template`` replaces the template of ``base``, if given.
    """
    for path in base.iterdir():
        # Keep what is there: the configuration is written already, in both spellings.
        if _accompanies_weights(path) and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    if chat_template is not None:
        (folder / CHAT_TEMPLATE).write_text(chat_template, encoding="utf-8")
    for path in folder.iterdir():
        path.chmod(_READABLE)


@contextlib.contextmanager
def atomic_model_folder(target: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes ``target`` at the end of the block.

    Raises PublishError if the disk has fewer than ``needed_bytes`` free or a write fails; ``target`` then
    stays as it was.
    """
    with explain_write_errors(target, needed_bytes):
        require_space(target, needed_bytes)
        with atomic_folder(target) as temporary:
            yield temporary


def require_space(target: Path, needed_bytes: int) -> None:
    """Raise PublishError unless the disk of ``target`` has ``needed_bytes`` free, and 16 MiB more."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(target.parent).free < needed_bytes + _HEADROOM_BYTES:
        raise _disk_full(target, needed_bytes)


@contextlib.contextmanager
def explain_write_errors(target: Path, needed_bytes: int) -> Iterator[None]:
    """Convert write errors of the block, which writes ``target``, to PublishError."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise _disk_full(target, needed_bytes) from error
        raise PublishError(
            f"{target} could not be written: {error.strerror or error}", hint="check the folder's permissions"
        ) from error
    except Exception as error:
        text = str(error)
        if type(error).__name__ == "SafetensorError":
            if any(sign in text.lower() for sign in _FULL_SIGNS):
                raise _disk_full(target, needed_bytes) from error
            raise PublishError(
                f"{target} could not be written: {text}", hint="check the folder and its disk"
            ) from error
        if isinstance(error, RuntimeError) and any(sign in text for sign in _TORCH_WRITER):
            raise PublishError(
                f"{target} could not be written, most likely because the disk is full: {text}",
                hint=_FREE_SPACE,
            ) from error
        raise


def link_files(source: Path, folder: Path) -> None:
    """Give the files of ``source`` a second name in ``folder``; a copy where the file system has no links.

    A checkpoint and a published version of one step thus are written once and take their space once. Files
    that ``complete_folder`` writes itself are left out: one with two names must never be written in place.
    """
    for path in source.iterdir():
        if not path.is_file() or path.name in (MANIFEST, CHAT_TEMPLATE) or path.name.startswith("."):
            continue
        target = folder / path.name
        # Share blocks where possible: unlike a second name, such a copy may be written in place.
        if _reflink(path, target):
            continue
        try:
            os.link(path, target)
        except OSError:
            shutil.copyfile(path, target)


def _accompanies_weights(path: Path) -> bool:
    name = path.name
    hidden = name.startswith(".") or name == MANIFEST
    return path.is_file() and not hidden and not name.endswith(WEIGHT_SUFFIXES)


def _reflink(source: Path, target: Path) -> bool:
    with source.open("rb") as reader, target.open("xb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
        except OSError:
            target.unlink()
            return False
    return True


def _disk_full(target: Path, needed_bytes: int) -> PublishError:
    free = shutil.disk_usage(target.parent).free
    return PublishError(
        f"the disk of {target.parent} is full: {target.name} needs {needed_bytes:,} bytes, {free:,} are free",
        hint=_FREE_SPACE,
    )


_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""The names of dtypes in safetensors files, by torch's."""
_SHA256_LENGTH = 64


@dataclass(frozen=True, slots=True)
class TensorChecksum:
    """The dtype as safetensors files name it (``BF16``), the shape, and the checksum of the bytes."""

    dtype: str
    shape: tuple[int, ...]
    checksum: str
    """Hexadecimal: of XXH3, or SHA-256 in a version that an older trainer published."""

    @classmethod
    def of(cls, tensor: Tensor) -> TensorChecksum:
        """Return the checksum of a tensor on the CPU."""
        digest = new_checksum()
        digest.update(raw(tensor).data)
        return cls(dtype_code(tensor), tuple(tensor.shape), digest.hexdigest())

    @classmethod
    def from_json(cls, value: Any) -> TensorChecksum:
        """Return the checksum that ``to_json`` wrote. Raises ValueError or TypeError for any other value."""
        dtype, shape, checksum = value
        return cls(str(dtype), tuple(int(size) for size in shape), str(checksum))

    def to_json(self) -> list[Any]:
        """Return ``[dtype, shape, checksum]``."""
        return [self.dtype, list(self.shape), self.checksum]


def new_checksum(like: str = "") -> Any:
    """Return an object to compute a checksum with, as hashlib's are; of the kind of ``like``."""
    if len(like) == _SHA256_LENGTH:
        return hashlib.sha256()
    # Not at the top: a machine that shows the dashboard alone has none, and `agentrl db check` runs there.
    import xxhash

    return xxhash.xxh3_128()


def dtype_code(tensor: Tensor) -> str:
    """Return the dtype of a tensor as safetensors files name it: ``BF16``."""
    return _CODES[str(tensor.dtype).removeprefix("torch.")]


def torch_dtype(code: str) -> torch.dtype:
    """Return the dtype that safetensors files name ``code``. Raises PublishError for an unknown one."""
    import torch

    name = next((name for name, known in _CODES.items() if known == code), None)
    if name is None:
        raise PublishError(f"a tensor has the dtype {code!r}; known are {', '.join(_CODES.values())}")
    return cast("torch.dtype", getattr(torch, name))


def raw(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a tensor on the CPU, without a copy if it is contiguous."""
    import torch

    found: NDArray[np.uint8] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def file_header(tensors: Mapping[str, Tensor]) -> tuple[list[str], bytes]:
    """Return the names of ``tensors`` in the order of their bytes, and what a safetensors file begins with.

    Larger dtypes come first, so that every tensor is aligned.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": dtype_code(tensor), "shape": list(tensor.shape), "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return names, len(text).to_bytes(8, "little") + text


def weights_digest(tensors: Mapping[str, TensorChecksum]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and checksums, ordered by name."""
    content = [[name, *tensors[name].to_json()] for name in sorted(tensors)]
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def checksums(folder: Path, known: Sequence[FileChecksum] = ()) -> tuple[FileChecksum, ...]:
    """Return SHA-256 and size of each regular file in ``folder``, ordered by name; hidden files are left out.

    Files of ``known`` are not read again. Several files are read at a time, in chunks: hashing releases the
    interpreter lock.
    """
    done = {file.name: file for file in known}
    try:
        paths = sorted(
            path
            for path in folder.iterdir()
            if path.is_file() and path.name != MANIFEST and not path.name.startswith(".")
        )
        with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            return tuple(pool.map(lambda path: done.get(path.name) or _checksum(path), paths))
    except OSError as error:
        raise PublishError(
            f"{error.filename or folder} cannot be read: {error.strerror}",
            hint="check that the folder exists and that this user may read it",
        ) from error


def write_manifest(
    folder: Path,
    *,
    version: int,
    files: Sequence[FileChecksum] | None = None,
    tensors: Mapping[str, TensorChecksum] | None = None,
) -> tuple[FileChecksum, ...]:
    """Write ``manifest.json`` and return the checksums of the files.

    It holds the version, each file's size and SHA-256, and the checksum of each tensor, if they are known.
    Pass ``files`` if the checksums are already known.
    """
    files = checksums(folder) if files is None else tuple(files)
    content: dict[str, Any] = {"version": version, "files": [file.to_document() for file in files]}
    if tensors:
        content["tensors"] = {name: found.to_json() for name, found in sorted(tensors.items())}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return files


def verify(folder: str | Path, files: Sequence[FileChecksum]) -> None:
    """Raise PublishError if a file of ``folder`` is missing or differs from its checksum."""
    folder = Path(folder)
    # Compare sizes before any hash: a file that was cut short is found without reading the others.
    for expected in files:
        try:
            size = (folder / expected.name).stat().st_size
        except OSError as error:
            raise _mismatch(folder, expected.name, "the file", error.strerror or "no file") from error
        if size != expected.bytes:
            raise _mismatch(folder, expected.name, f"{expected.bytes} bytes", f"{size} bytes")
    with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
        for expected, actual in zip(
            files, pool.map(_checksum, (folder / file.name for file in files)), strict=True
        ):
            if actual.sha256 != expected.sha256:
                raise _mismatch(folder, expected.name, f"sha256 {expected.sha256}", f"sha256 {actual.sha256}")


def _checksum(path: Path) -> FileChecksum:
    # Read unbuffered: file_digest fills a buffer of its own.
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileChecksum(name=path.name, bytes=file.tell(), sha256=digest.hexdigest())


def _mismatch(folder: Path, name: str, expected: str, actual: str) -> PublishError:
    return PublishError(
        f"{folder / name} differs from what was published: expected {expected}, found {actual}",
        hint="these weights are not loaded; the trainer's next version replaces them",
    )


logger = logging.getLogger(__name__)

_CACHE = Path(".agentrl/checksums")
_SMALL_BYTES = 64 << 20
"""A folder with fewer bytes is hashed at every start."""
_READ = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|merges"
    r"|chat_template|processor_config|preprocessor_config|video_preprocessor_config)\.(json|txt|jinja|model)"
    r"|.*\.(index\.json|py|tiktoken|spm)"
)
"""Files beside the weights that change what a model computes. A README does not."""


def read_files(folder: Path) -> dict[str, str]:
    """Return {name: SHA-256} of the files that loading ``folder`` reads: weights, configuration, tokenizer.

    Raises PublishError or ModelError if one cannot be read.
    """
    weights = {path.name for path in weight_files(folder)}
    found = known_checksums(folder)
    return {file.name: file.sha256 for file in found if file.name in weights or is_read(file.name)}


def is_read(name: str) -> bool:
    """Return whether loading a model reads its file ``name``, one of those beside the weights."""
    return _READ.fullmatch(name) is not None


def known_checksums(folder: Path) -> tuple[FileChecksum, ...]:
    """Return the checksums of all files in ``folder``, as ``checksums`` does, without reading one twice.

    A file is read again unless its inode, size, and times of modification and of change are those of the last
    time. Copies that keep the time of modification, as ``rsync -t`` makes, differ in the time of change,
    which no program can set; so a start with a large model costs a look at its folder.
    """
    place = folder.resolve()
    cache = _CACHE / f"{hashlib.sha256(str(place).encode()).hexdigest()[:32]}.json"
    states = dict(_states(place))
    stored = _read(cache)
    known = [
        FileChecksum.from_document(stored[name]["checksum"])
        for name, state in states.items()
        if stored.get(name, {}).get("state") == state
    ]
    found = checksums(place, known)
    if len(known) < len(found) and sum(file.bytes for file in found) > _SMALL_BYTES:
        # What changed while it was read has another state than ``states`` has, and is read again next time.
        listed = [file for file in found if file.name in states]
        files = {file.name: {"state": states[file.name], "checksum": file.to_document()} for file in listed}
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            replace_file(cache, json.dumps({"folder": str(place), "files": files}, indent=1).encode())
        except OSError as error:
            logger.debug("%s cannot be written, so that models are hashed at every start: %s", cache, error)
    return found


def _states(folder: Path) -> Iterable[tuple[str, list[int]]]:
    for entry in os.scandir(folder) if folder.is_dir() else ():
        if entry.is_file():
            status = entry.stat()
            yield entry.name, [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read(cache: Path) -> dict[str, Any]:
    try:
        found = json.loads(cache.read_text(encoding="utf-8"))["files"]
        return {name: item for name, item in found.items() if item["state"] and item["checksum"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
