"""Write rows as Parquet, with pyarrow of the extra ``parquet``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from agentrl.errors import ConfigError


def require_pyarrow() -> None:
    """Raise ConfigError without pyarrow, before anything is read."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "Parquet needs pyarrow, which is not installed", hint='pip install "agentrl[parquet]"'
        ) from error


def write_rows(rows: Sequence[Mapping[str, Any]], file: BinaryIO) -> None:
    """Write rows of the same keys; the types of the columns come from the values. Raises ConfigError."""
    require_pyarrow()
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file, compression="zstd")
