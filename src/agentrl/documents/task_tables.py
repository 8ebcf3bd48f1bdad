"""Read Parquet, CSV, TSV, Arrow and Feather files as task files: each row becomes a line of JSON."""

from __future__ import annotations

import base64
import csv
import datetime
import decimal
import io
import json
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from agentrl.documents.task_json import MAX_LINE_BYTES, parse
from agentrl.documents.task_messages import BadTaskError
from agentrl.documents.task_source import Places, TaskSource, Unpacked, open_binary
from agentrl.errors import TaskFileError
from agentrl.extras import require

_BATCH = 256
"""Rows that are converted at a time."""
_MAGIC = {b"PAR1": "parquet", b"ARRO": "arrow", b"FEA1": "arrow"}
_SUFFIXES = {
    ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow", ".csv": "csv", ".tsv": "csv",
    ".jsonl": "json", ".ndjson": "json", ".json": "json",
}  # fmt: skip
_IMAGES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
_JSON_CELLS: Final = frozenset({
    "messages", "prompt", "aug_answers", "images", "tools", "scorer", "meta", "tags", "raw", "reward_model",
    "extra_info",
})  # fmt: skip
"""Columns of a CSV file whose cells may hold a JSON list or object."""


def kind_of_file(path: Path) -> str:
    """Return ``parquet``, ``arrow``, ``csv`` or ``json`` by a file's first bytes and its name."""
    by_name = kind_of_name(path.name)
    if by_name == "csv" or not path.is_file():
        return by_name or "json"
    try:
        with path.open("rb") as file:
            return _MAGIC.get(file.read(4)) or ("arrow" if by_name == "arrow" else "json")
    except OSError:
        return "json"  # opening it says why it cannot be read


def kind_of_name(name: str) -> str | None:
    """Return the kind of a data file by its name; None for other files."""
    return _SUFFIXES.get(Path(name.lower().removesuffix(".gz")).suffix)


def open_tables(files: Sequence[Path], path: Path, folder: Path | None = None) -> TaskSource:
    """Convert files into one temporary task file, a row a line, in their order.

    Errors name file and row, from 1. Memory does not grow with the files. Raises TaskFileError for a file
    that cannot be read, and ConfigError without pyarrow.
    """
    copy = tempfile.TemporaryFile()  # noqa: SIM115  TaskSource closes it
    places = Places()
    line = 0
    try:
        for file in files:
            places.begin(line, file)
            unpacked = Unpacked(file, file.stat().st_size if file.is_file() else 0)
            for row in _rows(file):
                line += 1
                if isinstance(row, BadTaskError):
                    places.bad[line] = row
                    row = b"null"
                unpacked.add(copy.write(row + b"\n"))
    except BaseException:
        copy.close()
        raise
    copy.seek(0)
    return TaskSource(path, cast("Any", copy), places=places, folder=folder)


def _rows(file: Path) -> Iterator[bytes | BadTaskError]:
    """Yield the JSON of each row, or why it has none."""
    kind = kind_of_file(file)
    if kind == "json":
        source = TaskSource(file)
        for item in source.items():
            is_bad = isinstance(item.value, BadTaskError)
            yield item.value if is_bad else source.read(item.offset, item.length).replace(b"\n", b" ")
        return
    try:
        file.stat()  # a missing file is named before a missing package
        if kind != "csv":
            require("pyarrow", f"the task file {file}")
        yield from _csv_rows(file) if kind == "csv" else _arrow_rows(file, kind)
    except (OSError, ValueError, csv.Error) as error:  # pyarrow's errors are ValueErrors
        reason = " ".join((getattr(error, "strerror", None) or str(error)).split())
        raise TaskFileError(
            f"the task file {file} cannot be read: {reason[:300]}", hint=f"give an intact {kind} file"
        ) from error


def _arrow_rows(file: Path, kind: str) -> Iterator[bytes | BadTaskError]:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    if kind == "parquet":
        with pyarrow.parquet.ParquetFile(file, pre_buffer=False) as table:
            _require_unique(file, table.schema_arrow.names)
            for batch in table.iter_batches(batch_size=_BATCH):
                yield from _batch_rows(batch)
        return
    with pyarrow.memory_map(str(file)) as content:
        is_file = content.read(6) == b"ARROW1"
        content.seek(0)
        reader = pyarrow.ipc.open_file(content) if is_file else pyarrow.ipc.open_stream(content)
        _require_unique(file, reader.schema.names)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for whole in batches:
            for start in range(0, whole.num_rows, _BATCH):
                yield from _batch_rows(whole.slice(start, _BATCH))


def _batch_rows(batch: Any) -> Iterator[bytes | BadTaskError]:
    names, kinds = batch.schema.names, batch.schema.types
    narrow = [(name, kind) for name, kind in zip(names, kinds, strict=True) if _is_narrow(kind)]
    try:
        rows = batch.to_pylist(maps_as_pydicts="strict")
    except (ValueError, KeyError) as error:  # UnicodeDecodeError, nanoseconds, a map with a key twice
        if batch.num_rows > 1:
            for index in range(batch.num_rows):
                yield from _batch_rows(batch.slice(index, 1))
        else:
            name = next(filter(lambda name: not _converts(batch.column(name)), names))
            kind = batch.schema.field(name).type
            yield BadTaskError(f"{name}: its value of type {kind} cannot be converted: {error}")
        return
    for row in rows:
        for name, kind in narrow:
            row[name] = _shortest(row[name], kind)
        try:
            yield json.dumps(_plain(row, ""), ensure_ascii=False).encode()
        except BadTaskError as error:
            yield error


def _converts(column: Any) -> bool:
    try:
        column.to_pylist(maps_as_pydicts="strict")
    except (ValueError, KeyError):
        return False
    return True


def _is_narrow(kind: Any) -> bool:
    """Return whether values of an Arrow type hold floats of 16 or 32 bits."""
    import pyarrow

    inner = _inner(kind)
    if inner is not None:
        return _is_narrow(inner)
    is_float = pyarrow.types.is_float32(kind) or pyarrow.types.is_float16(kind)
    return is_float or any(_is_narrow(kind.field(index).type) for index in range(kind.num_fields))


def _inner(kind: Any) -> Any:
    """Return the type of the values of a dictionary, a run-end encoding or an extension; None for others."""
    import pyarrow

    if isinstance(kind, pyarrow.BaseExtensionType):
        return kind.storage_type
    is_encoded = pyarrow.types.is_dictionary(kind) or pyarrow.types.is_run_end_encoded(kind)
    return kind.value_type if is_encoded else None


def _shortest(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type with each narrow float as its shortest decimal: 0.1, as JSON has it.

    Python reads the float32 0.1 as 0.10000000149, which no answer 0.1 would equal.
    """
    import pyarrow

    inner = _inner(kind)
    if value is None or inner is not None:
        return None if value is None else _shortest(value, inner)
    if pyarrow.types.is_float32(kind) or pyarrow.types.is_float16(kind):
        return float(str((np.float32 if pyarrow.types.is_float32(kind) else np.float16)(value)))
    if pyarrow.types.is_struct(kind):
        return {field.name: _shortest(value[field.name], field.type) for field in kind}
    if pyarrow.types.is_map(kind):
        return {key: _shortest(item, kind.item_type) for key, item in value.items()}
    if kind.num_fields == 1:  # a list of any kind
        return [_shortest(item, kind.value_type) for item in value]
    return value


def _plain(value: Any, where: str) -> Any:
    """Return a value of a table as JSON has it, without nulls in structs. Raises BadTaskError."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, dict):
        if value.keys() <= {"bytes", "path"} and isinstance(value.get("bytes"), bytes):
            return _data_url(value["bytes"], where)
        prefix = f"{where}." if where else ""
        return {str(key): _plain(item, f"{prefix}{key}") for key, item in value.items() if item is not None}
    if isinstance(value, list):  # a tuple is a calendar interval
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, (decimal.Decimal, uuid.UUID)):
        return str(value)
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise BadTaskError(f"{where}: {len(value):,} bytes that are not UTF-8 text") from None
    raise BadTaskError(f"{where}: a value of type {type(value).__name__}")


def _data_url(content: bytes, where: str) -> str:
    """Return an image of the type that the library ``datasets`` writes, ``{bytes, path}``, as a URL."""
    kind = next((kind for magic, kind in _IMAGES.items() if content.startswith(magic)), None)
    if kind is None:
        raise BadTaskError(f"{where}: {len(content):,} bytes that are neither PNG, JPEG, GIF nor WebP")
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _csv_rows(file: Path) -> Iterator[bytes | BadTaskError]:
    """Yield the rows below the header. Cells are text, and an empty cell is a missing field."""
    csv.field_size_limit(MAX_LINE_BYTES)
    tab = "\t" if ".tsv" in file.name.lower() else ","
    with open_binary(file) as binary:
        text = io.TextIOWrapper(binary, "utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.reader(text, delimiter=tab, strict=True)
        header = next(reader, [])
        _require_unique(file, header)
        for cells in reader:
            if len(cells) != len(header):
                if cells:
                    yield BadTaskError(f"{len(cells)} cells, and the header has {len(header)}")
                continue
            given = ((name, cell) for name, cell in zip(header, cells, strict=True) if cell)
            row = ", ".join(f"{_text(name)}: {_cell(name, cell)}" for name, cell in given)
            yield f"{{{row}}}".encode("utf-8", "surrogateescape")


_text = json.JSONEncoder(ensure_ascii=False).encode


def _cell(name: str, cell: str) -> str:
    """Return the JSON of a cell. JSON in it stays as it is: what MongoDB cannot store is named later."""
    if name == "max_turns" and cell.isdecimal():
        return str(int(cell))
    if name in _JSON_CELLS and cell.lstrip()[:1] in ("[", "{"):
        with suppress(BadTaskError):
            parse(cell.encode("utf-8", "surrogateescape"))
            return " ".join(cell.splitlines())
    return _text(cell)


def _require_unique(file: Path, names: Sequence[str]) -> None:
    twice = next((name for name in names if list(names).count(name) > 1), None)
    if twice is not None:
        raise TaskFileError(f"the task file {file} has two columns {twice!r}", hint="rename one of them")
