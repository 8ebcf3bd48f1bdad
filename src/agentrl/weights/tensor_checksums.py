"""Checksums of tensors, and the digest of all weights: the same in every encoding of a version.

A checksum is XXH3 of 128 bits, which costs a tenth of SHA-256: it finds damage, not forgery. Files that cross
a network have a SHA-256 beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from agentrl.errors import PublishError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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
    return hashlib.sha256() if len(like) == _SHA256_LENGTH else xxhash.xxh3_128()


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
