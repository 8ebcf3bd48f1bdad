"""Read the dtype and the size of the weights in a model folder, and write the dtype; without torch."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any

_IN_FILES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_KEYS = ("dtype", "torch_dtype")


def stored_dtype(folder: Path) -> str:
    """Return the dtype of the model in ``folder``: float32, bfloat16 or float16.

    It is the one that config.json names; if it names none of these, the one of most weights in safetensors
    files; float32 without such files. Raises OSError or ValueError if a file cannot be read.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for part in (config, config.get("text_config") or {}):
        for key in _KEYS:
            named = str(part.get(key)).removeprefix("torch.")
            if named in _IN_FILES.values():
                return named
    counts: Counter[str] = Counter()
    for file in folder.glob("*.safetensors"):
        for entry in read_header(file).values():
            counts[entry["dtype"]] += math.prod(entry["shape"])
    found = [_IN_FILES[kind] for kind, _ in counts.most_common() if kind in _IN_FILES]
    return found[0] if found else "float32"


def stored_bytes(folder: Path) -> int:
    """Return the bytes of the files of weights in ``folder``. Raises OSError if it cannot be read."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))


def write_dtype(folder: Path, dtype: str) -> None:
    """Write ``dtype`` into config.json, also into the configurations of the model's parts."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = dtype
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        part.update(dict.fromkeys(part.keys() & set(_KEYS), dtype))
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Return {name: {dtype, shape, …}} of the tensors in a safetensors file.

    Raises OSError if it cannot be read, and ValueError if it is not a safetensors file.
    """
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header: dict[str, dict[str, Any]] = json.loads(stream.read(length))
    except (struct.error, OverflowError, MemoryError) as error:
        raise ValueError(str(error)) from error
    header.pop("__metadata__", None)
    return header
