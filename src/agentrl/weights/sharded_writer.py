"""Write a rank's share of the weights as safetensors, hashing while writing, and join the ranks' shares.

``safetensors.torch.save_file`` would leave the files to be read again for their checksums.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from agentrl.documents.run import FileChecksum
from agentrl.weights.snapshot import WHOLE, Snapshot, Snapshots, WeightSource
from agentrl.weights.tensor_checksums import TensorChecksum, file_header, raw, weights_digest

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
