"""Check before training that the disk has space for the checkpoints and versions that a run keeps."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.base.atomic_folder import TEMPORARY
from agentrl.config.schema import TrainConfig
from agentrl.errors import ConfigError
from agentrl.weights.folder import read_header, stored_bytes, stored_dtype, tensor_files

logger = logging.getLogger(__name__)

_MOMENTS = 2
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class KeptFiles:
    """How many versions and checkpoints a run keeps, and their sizes."""

    versions: int
    version_bytes: int
    """0 for an adapter, whose size is not known yet."""
    checkpoints: int
    checkpoint_bytes: int
    """0 for an adapter, whose size is not known yet."""
    keep_every: int = 0

    @property
    def bytes(self) -> int:
        """The most bytes at a time: everything kept, and one more of each while it is written."""
        return (self.versions + 1) * self.version_bytes + (self.checkpoints + 1) * self.checkpoint_bytes

    def __str__(self) -> str:
        sizes = self.version_bytes, self.checkpoint_bytes
        version, checkpoint = (f"{amount(size)} each" if size else "of the adapter" for size in sizes)
        forever = f", and every {self.keep_every}th version forever ({version})" if self.keep_every else ""
        kept = (
            f"the newest {self.versions} published versions ({version}) and"
            f" {self.checkpoints} checkpoints ({checkpoint}){forever}"
        )
        if not self.bytes:
            return kept
        uncounted = ["the latter"] * (self.keep_every > 0) + ["the adapter's"] * (not all(sizes))
        without = f" without {' and '.join(uncounted)}" if uncounted else ""
        return f"{kept}: {amount(self.bytes)} at most{without}, with one more of each while it is written"


def retention(base: Path, dtype: str, config: TrainConfig, *, is_adapter: bool) -> KeptFiles:
    """Return what a run on the model in ``base`` keeps with these flags; it is trained in ``dtype``.

    A checkpoint holds the weights as they are published, the optimizer's moments in ``dtype``, and the
    weights in ``dtype`` if publication rounds them.
    """
    own = stored_dtype(base)
    copies = _MOMENTS + (dtype != own and own != "float32")
    holds_adapter = is_adapter and config.publish in ("auto", "adapter")
    return KeptFiles(
        versions=config.published_versions_kept if config.publish_to is None else 0,
        version_bytes=0 if holds_adapter else model_bytes(base, _BYTES[own]),
        checkpoints=config.save_total_limit,
        checkpoint_bytes=0 if is_adapter else model_bytes(base, _BYTES[own] + copies * _BYTES[dtype]),
        keep_every=config.keep_every,
    )


def check_output(output: Path, kept: KeptFiles, others: Sequence[Path] = ()) -> None:
    """Log what will be kept. Raises ConfigError for a folder that is not writable or has too little space.

    ``others`` are more folders that must be writable. The newest checkpoints and versions in ``output`` count
    as free space, since they are deleted before the limits are exceeded.
    """
    # Ask before anything is made: a start that is refused leaves no folder.
    there = next(path for path in (output, *output.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    present = _size(_newest(output, "checkpoint-*", kept.checkpoints))
    present += _size(_newest(output / "weights", "v*", kept.versions))
    logger.info("%s keeps %s; %s are free", output, kept, amount(free))
    if free + present < kept.bytes:
        raise ConfigError(
            f"the disk of {output} has {amount(free)} free, and the run keeps {kept}"
            + (f"; {amount(present)} of it are already in use" if present else ""),
            hint="free space, lower --published_versions_kept or --save_total_limit, or give another"
            " --output_dir",
        )
    for folder in (output, output / "weights", *others):
        _require_writable(folder)


def model_bytes(folder: Path, bytes_per_parameter: int) -> int:
    """Return the bytes of a Hugging Face folder's weights at ``bytes_per_parameter``.

    Files other than safetensors count with their size on disk. Raises ModelError for a damaged file.
    """
    files = tensor_files(folder)
    if files:
        entries = (entry for file in files for entry in read_header(file).values())
        parameters: int = sum(math.prod(entry["shape"]) for entry in entries)
        return parameters * bytes_per_parameter
    return stored_bytes(folder)


def amount(count: int) -> str:
    """Format a number of bytes, such as ``1.6 GB``."""
    value = float(count)
    for unit in ("bytes", "kB", "MB"):
        if value < 1000:
            return f"{value:.{0 if unit == 'bytes' else 1}f} {unit}"
        value /= 1000
    return f"{value:,.1f} GB"


def _require_writable(folder: Path) -> None:
    probe = folder / f"{TEMPORARY}probe-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with probe.open("xb") as file:
            file.write(bytes(4096))
            file.flush()
            # Flush: a quota or a file server may refuse the bytes only when they are written out.
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
    """Return the bytes of all files in ``folders``; hard links to one file count once."""
    files = {
        (status.st_dev, status.st_ino): status.st_size
        for folder in folders
        for status in (path.stat() for path in folder.rglob("*") if path.is_file())
    }
    return sum(files.values())
