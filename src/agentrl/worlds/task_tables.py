"""Read Parquet, CSV, TSV, Arrow and Feather files, folders and repositories of the hub as task files.

Only data files of a repository are downloaded, into the hub's cache; none of its code is run. Without network
the cache is read.
"""

from __future__ import annotations

import base64
import csv
import datetime
import decimal
import fnmatch
import io
import json
import logging
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, cast

import httpx2
import numpy as np
import yaml

from agentrl.base.installation import require
from agentrl.documents.document import excerpt
from agentrl.documents.task_file import (
    HUB,
    Places,
    TaskSource,
    Unpacked,
    kind_of_file,
    kind_of_name,
    open_binary,
    task_format,
)
from agentrl.documents.task_json import MAX_LINE_BYTES, BadTaskError, parse
from agentrl.errors import TaskFileError, nearest

logger = logging.getLogger(__name__)

_BATCH = 256
"""Rows that are converted at a time."""
_IMAGES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
_JSON_CELLS: Final = frozenset({
    "messages", "prompt", "aug_answers", "images", "tools", "scorer", "meta", "tags", "raw", "reward_model",
    "extra_info",
})  # fmt: skip
"""Columns of a CSV file whose cells may hold a JSON list or object."""


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
        columns = [_values(column) for column in batch.columns]
    except (ValueError, KeyError) as error:  # UnicodeDecodeError, nanoseconds, a map with a key twice
        if batch.num_rows > 1:
            for index in range(batch.num_rows):
                yield from _batch_rows(batch.slice(index, 1))
        else:
            name = next(filter(lambda name: not _converts(batch.column(name)), names))
            kind = batch.schema.field(name).type
            yield BadTaskError(f"{name}: its value of type {kind} cannot be converted: {error}")
        return
    for values in zip(*columns, strict=True):
        row = dict(zip(names, values, strict=True))
        for name, kind in narrow:
            row[name] = _shortest(row[name], kind)
        try:
            yield json.dumps(_plain(row, ""), ensure_ascii=False).encode()
        except BadTaskError as error:
            yield error


def _converts(column: Any) -> bool:
    try:
        _values(column)
    except (ValueError, KeyError):
        return False
    return True


def _values(column: Any) -> list[Any]:
    """Return the values of a column. Raises ValueError for nanoseconds, and KeyError.

    Times become those of Python: pyarrow would take pandas's, or drop nanoseconds, where pandas is installed.
    """
    kind = _in_microseconds(column.type)
    plain = column if kind == column.type else column.cast(kind)
    return list(plain.to_pylist(maps_as_pydicts="strict"))


def _in_microseconds(kind: Any) -> Any:
    """Return an Arrow type with microseconds in place of nanoseconds, also within lists, structs and maps."""
    import pyarrow

    types = pyarrow.types
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_in_microseconds(field.type)) for field in kind])
    if types.is_map(kind):
        return pyarrow.map_(_in_microseconds(kind.key_type), _in_microseconds(kind.item_type))
    if types.is_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_in_microseconds(kind.value_type)))
    if types.is_large_list(kind):
        return pyarrow.large_list(kind.value_field.with_type(_in_microseconds(kind.value_type)))
    if types.is_fixed_size_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_in_microseconds(kind.value_type)), kind.list_size)
    if getattr(kind, "unit", None) != "ns":
        return kind
    if types.is_timestamp(kind):
        return pyarrow.timestamp("us", kind.tz)
    return pyarrow.duration("us") if types.is_duration(kind) else pyarrow.time64("us")


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


SPLITS: Final[Mapping[str, str]] = {
    "train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test",
    "evaluation": "test", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation",
}  # fmt: skip
"""Words in the names of files and folders → the split that they name."""
_NOT_DATA = frozenset({"state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"})
_SHOWN = 20
_README_BYTES = 2**20


@task_format("tables")
def open_files(text: str, wanted: str) -> TaskSource | None:
    """Open a file of a table, or ``FOLDER[:SPLIT]``; ``wanted`` is the split without ``:SPLIT``.

    Raises TaskFileError if it cannot be read.
    """
    path, split = Path(text), None
    if not path.exists() and ":" in text:
        folder, _, name = text.rpartition(":")
        if Path(folder).is_dir():
            path, split = Path(folder), name
    if path.is_dir():
        files = files_of_folder(path, split, wanted)
        return open_tables(files, Path(text), folder=files[0].parent)
    return None if kind_of_file(path) == "json" else open_tables([path], path)


def files_of_folder(folder: Path, split: str | None, wanted: str) -> list[Path]:
    """Return the files of a split, also as the library ``datasets`` saves them. Raises TaskFileError."""
    saved = folder / "dataset_dict.json"
    if saved.is_file():
        splits = {name: folder / name for name in _names_in(saved, _read_json(saved).get("splits"))}
        return files_of_folder(choose(splits, split, wanted, str(folder)), None, wanted)
    state = folder / "state.json"
    if state.is_file():
        files = _read_json(state).get("_data_files")
        named = [item.get("filename") if isinstance(item, dict) else item for item in _list(files)]
        return [folder / name for name in _names_in(state, named)]
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    found = find_files(names, lambda name: read_plain(folder / name), str(folder))
    return [folder / name for name in found.files(None, split, wanted)]


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The data files of a folder by configuration and split."""

    configs: Mapping[str, Mapping[str, Sequence[str]]]
    where: str

    def files(self, config: str | None, split: str | None, wanted: str) -> Sequence[str]:
        """Return the files of a split, all of one kind. Raises TaskFileError for an unknown one."""
        splits = self.configs.get("default") if config is None else self.configs.get(config)
        if splits is None:
            names = sorted(self.configs)
            if config is None and len(names) == 1:
                splits = self.configs[names[0]]
            else:
                shown = ", ".join(names[:_SHOWN])
                asked = "has several configurations" if config is None else f"has no configuration {config!r}"
                raise TaskFileError(
                    f"{self.where} {asked}: {shown}",
                    hint=f"write hf://ORG/NAME/{names[0]}[:SPLIT], in quotes",
                )
        files: Sequence[str] = choose(splits, split, wanted, self.where)
        kinds = {kind_of_name(name) for name in files}
        if len(kinds) > 1:
            raise TaskFileError(
                f"{self.where} has files of several kinds for one split: {', '.join(files[:_SHOWN])}",
                hint="give one of the files",
            )
        return files


def choose(splits: Mapping[str, Any], split: str | None, wanted: str, where: str) -> Any:
    """Return what ``splits`` has for ``split``; without one for ``wanted``, or the only one there is."""
    if split is None and len(splits) == 1:
        return next(iter(splits.values()))
    name = wanted if split is None else split
    for key in (name, SPLITS.get(name, name)):
        if key in splits:
            return splits[key]
    has = ", ".join(sorted(splits)[:_SHOWN]) or "none"
    raise TaskFileError(
        f"{where} has no split {name!r}; it has {has}",
        hint=nearest(name, splits) or "name one behind a colon, such as FOLDER:test or hf://ORG/NAME:test",
    )


def find_files(names: Sequence[str], read: Callable[[str], str], where: str) -> DataFiles:
    """Return the data files among ``names`` by configuration and split.

    The metadata of README.md name them, as on the hub; otherwise words in the paths do, such as
    ``data/train-0.parquet`` and ``main/test/0000.parquet``. A path without such a word is of the split train.
    Raises TaskFileError.
    """
    data = [
        name for name in names
        if kind_of_name(name) and PurePosixPath(name).name not in _NOT_DATA
        and not any(part.startswith(".") for part in PurePosixPath(name).parts)
    ]  # fmt: skip
    if not data:
        script = any(name.endswith(".py") for name in names)
        raise TaskFileError(
            f"{where} has no Parquet, Arrow, CSV or JSON files"
            + (", and its Python script is not run" if script else ""),
            hint="hf://ORG/NAME@refs/convert/parquet is the hub's own copy of many data sets as Parquet",
        )
    configs = _named(data, read("README.md")) if "README.md" in names else {}
    if not configs:
        for name in data:
            config, split = _place(PurePosixPath(name))
            configs.setdefault(config, {}).setdefault(split, []).append(name)
    return DataFiles(configs, where)


def _named(data: Sequence[str], readme: str) -> dict[str, dict[str, list[str]]]:
    """Return the files that the metadata of README.md name."""
    front = re.match(r"---\n(.*?)\n---", readme, re.DOTALL)
    try:
        metadata = yaml.safe_load(front.group(1)) if front else None
    except (yaml.YAMLError, RecursionError):
        metadata = None
    found: dict[str, dict[str, list[str]]] = {}
    configs = metadata.get("configs") if isinstance(metadata, dict) else None
    for config in configs if isinstance(configs, list) else ():
        given = config.get("data_files") if isinstance(config, dict) else None
        items = given if isinstance(given, list) else [given]
        for item in items:
            entry = item if isinstance(item, dict) else {"split": "train", "path": item}
            paths = entry.get("path")
            patterns = [*filter(None, map(_name, paths if isinstance(paths, list) else [paths]))]
            files = [name for name in data if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
            if files:
                config_name, split = config.get("config_name", "default"), entry.get("split", "train")
                if _name(config_name) and _name(split):
                    found.setdefault(_name(config_name), {})[_name(split)] = files
    return found


def _place(path: PurePosixPath) -> tuple[str, str]:
    """Return the configuration and the split of a file by its path."""
    folders = [part for part in path.parts[:-1] if part != "data"]
    words = re.split(r"[._-]", path.name)
    split = next((SPLITS[word] for word in words if word in SPLITS), None)
    for folder in folders:
        if split is None and folder in SPLITS:
            split = SPLITS[folder]
    others = [folder for folder in folders if folder not in SPLITS]
    return others[0] if others else "default", split or "train"


def read_plain(path: Path) -> str:
    """Return the first MiB of a README, which may hold anything."""
    with path.open("rb") as file:
        return file.read(_README_BYTES).decode("utf-8", "replace")


def _name(value: object) -> str:
    """Return a name; empty for a list or object: YAML aliases can expand one to gigabytes of text."""
    return str(value) if isinstance(value, (str, int, float)) else ""


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _names_in(file: Path, names: object) -> list[str]:
    """Return names of files or folders beside ``file``, which lists them. Raises TaskFileError for others."""
    for name in _list(names):
        if not isinstance(name, str) or name in ("", ".", "..") or PurePosixPath(name).name != name:
            raise TaskFileError(
                f"{file} names {excerpt(name, _SHOWN * 4)}, which is nothing beside it",
                hint="save the data set again, by save_to_disk of the library datasets",
            )
    return _list(names)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TaskFileError(f"{path} cannot be read: {error}", hint="save the data set again") from error
    return value if isinstance(value, dict) else {}


_ADDRESS = re.compile(r"hf://([\w.-]+(?:/[\w.-]+)?)(?:/([^@:]+))?(?:@([^:]+))?(?::(.+))?")
_SECONDS = 30.0


@task_format("hub")
def open_hub(text: str, wanted: str) -> TaskSource | None:
    """Download a split, ``wanted`` unless the address names one, and open it. Raises TaskFileError.

    Its tasks may not name Python code: others write them.
    """
    if not text.startswith(HUB):
        return None
    address = _ADDRESS.fullmatch(text)
    if address is None:
        raise TaskFileError(
            f"{text}: this is not the address of a data set",
            hint="write hf://ORG/NAME[/CONFIG][@REVISION][:SPLIT], such as hf://openai/gsm8k/main:train",
        )
    require("huggingface_hub", text)
    name, config, revision, split = address.groups()
    folder = _download(text, name, revision, ["README.md"])
    names = _listing(text, name, folder)
    found = find_files(names, lambda item: read_plain(folder / item), text)
    files = found.files(config, split, wanted)
    folder = _download(text, name, folder.name, files)
    missing = [item for item in files if not (folder / item).is_file()]
    if missing:
        raise TaskFileError(
            f"{text}: the file {missing[0]} is not in the cache", hint="load it with network once"
        )
    sha = folder.name
    pinned = "" if revision else f"; {HUB}{name}{'/' + config if config else ''}@{sha[:10]} stays with it"
    logger.info("%s is revision %s%s", text, sha[:10], pinned)
    source = open_tables([folder / item for item in files], Path(text), folder=folder)
    source.is_trusted = False
    return source


def _listing(text: str, name: str, folder: Path) -> Sequence[str]:
    """Return the files of the commit in ``folder``: of the repository, or of the cache without network."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi().dataset_info(name, revision=folder.name, timeout=_SECONDS)
    except HfHubHTTPError as error:
        raise _refused(text, error) from error
    except (OSError, httpx2.TransportError):
        logger.warning("%s: the hub cannot be reached; its cache is read", text)
        return [item.relative_to(folder).as_posix() for item in sorted(folder.rglob("*")) if item.is_file()]
    return sorted(item.rfilename for item in info.siblings or ())


def _download(text: str, name: str, revision: str | None, files: Sequence[str]) -> Path:
    """Download files of a revision; return its folder in the cache, which is named by the commit."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                repo_type="dataset",
                revision=revision,
                etag_timeout=_SECONDS,
                allow_patterns=list(files),
            )
        )
    except (OSError, ValueError, httpx2.TransportError) as error:
        raise _refused(text, error) from error


def _refused(text: str, error: Exception) -> TaskFileError:
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    unreached = (LocalEntryNotFoundError, OfflineModeIsEnabled, httpx2.TransportError, ConnectionError)
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, HfHubHTTPError):
        error = error.__cause__  # the hub has answered
    if isinstance(error, unreached) and not isinstance(error, HfHubHTTPError):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        return TaskFileError(
            f"{text} cannot be downloaded: {why}, and it is not in this machine's cache",
            hint="check the network and HF_ENDPOINT, or download its files elsewhere and give their folder",
        )
    reason = " ".join(str(error).split())[:300]
    return TaskFileError(
        f"{text} cannot be downloaded: {reason}",
        hint="check the name and the revision; a private or gated data set needs HF_TOKEN",
    )
