"""What a run keeps on disk: how many bytes that is, and whether its folders can take them."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.atomic_folder import TEMPORARY
from agentrl.config.schema import TrainConfig
from agentrl.errors import ConfigError

logger = logging.getLogger(__name__)

_HEADER_BYTES = 8
_LARGEST_HEADER = 100 << 20
_STATE_COPIES = 3
"""A checkpoint holds the weights and two states of the optimizer for each."""
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What is kept of one run."""

    versions: int
    version_bytes: int
    checkpoints: int
    checkpoint_bytes: int
    """0 where it is not known: an adapter alone."""
    keep_every: int = 0

    @property
    def bytes(self) -> int:
        """All that is kept at a time, and one more of each while it is written."""
        return (self.versions + 1) * self.version_bytes + (self.checkpoints + 1) * self.checkpoint_bytes

    def __str__(self) -> str:
        checkpoint = f"{amount(self.checkpoint_bytes)} each" if self.checkpoint_bytes else "of the adapter"
        forever = (
            f", and every {self.keep_every}th version for ever ({amount(self.version_bytes)} each)"
            if self.keep_every
            else ""
        )
        return (
            f"the newest {self.versions} published versions ({amount(self.version_bytes)} each) and"
            f" {self.checkpoints} checkpoints ({checkpoint}){forever}: {amount(self.bytes)} at most"
            f"{' besides those' if self.keep_every else ''}, one more of each included while it is written"
        )


def retention(base: Path, dtype: str, config: TrainConfig, *, is_adapter: bool) -> Retention:
    """What a run on the model in ``base`` keeps with these flags."""
    weights = model_bytes(base, _BYTES[dtype])
    return Retention(
        versions=config.published_versions_kept,
        version_bytes=weights,
        checkpoints=config.save_total_limit,
        checkpoint_bytes=0 if is_adapter else weights * _STATE_COPIES,
        keep_every=config.keep_every,
    )


def check_output(output: Path, kept: Retention, others: Sequence[Path] = ()) -> None:
    """Log what will be kept. Raises ConfigError where a folder is not writable or lacks space for it.

    ``others`` are further folders that must be writable. What ``output`` holds of checkpoints and versions
    counts as space: it is deleted before the limits are exceeded.
    """
    for folder in (output, output / "weights", *others):
        _require_writable(folder)
    free = shutil.disk_usage(output).free
    present = _size(_newest(output, "checkpoint-*", kept.checkpoints))
    present += _size(_newest(output / "weights", "v*", kept.versions))
    logger.info("%s keeps %s; %s are free", output, kept, amount(free))
    if free + present < kept.bytes:
        raise ConfigError(
            f"the disk of {output} has {amount(free)} free, and the run keeps {kept}"
            + (f"; {amount(present)} of it are there" if present else ""),
            hint="free space, lower --published_versions_kept or --save_total_limit, or give another"
            " --output_dir",
        )


def model_bytes(folder: Path, bytes_per_parameter: int) -> int:
    """Bytes of the weights in a Hugging Face folder, written with ``bytes_per_parameter``.

    Weights in other files than safetensors count with their size.
    """
    files = list(folder.glob("*.safetensors"))
    if files:
        return sum(map(_parameters, files)) * bytes_per_parameter
    return sum(path.stat().st_size for name in ("*.bin", "*.gguf") for path in folder.glob(name))


def amount(count: int) -> str:
    """A number of bytes for a person: ``1.6 GB``."""
    value = float(count)
    for unit in ("bytes", "kB", "MB"):
        if value < 1000:
            return f"{value:.{0 if unit == 'bytes' else 1}f} {unit}"
        value /= 1000
    return f"{value:,.1f} GB"


def _parameters(file: Path) -> int:
    """The number of parameters in a safetensors file, by its header."""
    with file.open("rb") as source:
        length = int.from_bytes(source.read(_HEADER_BYTES), "little")
        if length > _LARGEST_HEADER:
            raise ConfigError(f"{file} is no safetensors file", hint="fetch the model again")
        header = json.loads(source.read(length))
    return sum(math.prod(item["shape"]) for name, item in header.items() if name != "__metadata__")


def _require_writable(folder: Path) -> None:
    probe = folder / f"{TEMPORARY}probe-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with probe.open("xb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            probe.unlink()
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror or error}",
            hint="give a folder that this user can write, on a disk with space, e.g. with --output_dir",
        ) from error


def _newest(folder: Path, pattern: str, count: int) -> list[Path]:
    return sorted(folder.glob(pattern))[-count:]


def _size(folders: Iterable[Path]) -> int:
    """Bytes of all files in ``folders``; a file with several names counts once."""
    files = {
        (status.st_dev, status.st_ino): status.st_size
        for folder in folders
        for status in (path.stat() for path in folder.rglob("*") if path.is_file())
    }
    return sum(files.values())
