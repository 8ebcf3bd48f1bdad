"""Read a task file in pieces, plain or gzip: each line a Task, or an error with file, line and reason.

A file is read twice: first to check it and to index its tasks, then task by task on demand.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import random
import tempfile
import weakref
import zlib
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar, cast, overload

from agentrl.base.registry import Registry
from agentrl.base.user_code import file_name, names_outside
from agentrl.documents.document import shortened
from agentrl.documents.images import Image
from agentrl.documents.mixture import Mixture, MixtureSource
from agentrl.documents.task import FINGERPRINT_BYTES, Task, fingerprint, scorer_weights, task_key
from agentrl.documents.task_json import (
    DECODER,
    MAX_LINE_BYTES,
    BadTaskError,
    image_sources,
    is_url,
    kind_of,
    make_task,
    nearest_field,
    parse,
    read_images,
)
from agentrl.documents.task_presets import TaskRows, asked_schema, column_of
from agentrl.errors import TaskFileError, quoted

_GZIP = b"\x1f\x8b"
_PACKED = {b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zX": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip"}
_CHUNK = 64 * 1024
_COPIED_BYTES = 2**20
_UNPACKED_RATIO = 100
_UNPACKED_BYTES = 256 * 2**20
"""A small file may unpack to this much; a larger one to its size times ``_UNPACKED_RATIO``."""
HUB: Final = "hf://"
_MAGIC = {b"PAR1": "parquet", b"ARRO": "arrow", b"FEA1": "arrow"}
_SUFFIXES = {
    ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow", ".csv": "csv", ".tsv": "csv",
    ".jsonl": "json", ".ndjson": "json", ".json": "json",
}  # fmt: skip
# Name three: gzip raises EOFError for a file that was cut, and zlib.error for a damaged one.
_READING = (OSError, EOFError, zlib.error)
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Item:
    """One task's JSON: its line, its byte range, and its value or the BadTaskError of an invalid one."""

    line: int
    offset: int
    length: int
    value: Any
    number: int = 0
    """The number of the task in the file, from 0."""


@dataclass(slots=True)
class Places:
    """Where the lines of a converted file come from, and the rows that could not be converted."""

    starts: list[int] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    bad: dict[int, BadTaskError] = field(default_factory=dict)
    """Line, from 1 → why it holds no task."""

    def begin(self, lines: int, file: Path) -> None:
        """Record that ``file`` begins below this number of lines."""
        self.starts.append(lines)
        self.files.append(file)

    def of(self, line: int) -> str:
        """Return ``file:row`` of a line."""
        index = bisect_right(self.starts, line - 1) - 1
        return f"{self.files[index]}:{line - self.starts[index]}"


class TaskSource:
    """A task file with random access. A pipe or gzip file is first copied to a temporary file."""

    def __init__(
        self,
        path: Path,
        file: BinaryIO | None = None,
        *,
        places: Places | None = None,
        folder: Path | None = None,
        is_trusted: bool = True,
    ) -> None:
        """Open ``path``, or read ``file``, which has no path of its own, with the ``places`` of its lines.

        Paths of images are relative to ``folder``, by default that of ``path``. Tasks of a source that is not
        trusted may not name Python code.

        Raises TaskFileError if it cannot be read, is packed by another program than gzip, UTF-16 or UTF-32.
        """
        self.path = path
        self.folder = path.parent if folder is None else folder
        self.is_trusted = is_trusted
        self._places = places
        self._is_list = False
        try:
            self._file = open_binary(path) if file is None else file
        except _READING as error:
            raise _unreadable(path, error) from error
        # Close it with the source: the tasks that read_tasks returns read it long after the call.
        weakref.finalize(self, self._file.close)
        self._start = self._skip_byte_order_mark()

    def items(self) -> Iterator[Item]:
        """Yield every task of JSONL or of a JSON list, in file order."""
        self._file.seek(self._start)
        first = self._file.read(_CHUNK)
        while first and not first.strip():
            first = self._file.read(_CHUNK)
        line, _, rest = first.lstrip().partition(b"\n")
        rows_are_lists = rest.lstrip().startswith(b"[") and isinstance(_parsed(line), list)  # ORZ as JSONL
        self._is_list = self._places is None and line.startswith(b"[") and not rows_are_lists
        items = self._list_items() if self._is_list else self._lines()
        bad = {} if self._places is None else self._places.bad
        for number, item in enumerate(items):
            value = bad.get(item.line, item.value)
            yield Item(item.line, item.offset, item.length, value, number)

    def where(self, item: Item) -> str:
        """Return ``file:line`` of a task; in a file of another kind ``file:row``, both from 1.

        Of a JSON list, which may be one line, it has the row too.
        """
        if self._places is not None:
            return self._places.of(item.line)
        return f"{self.path}:{item.line}" + (f" (row {item.number + 1})" if self._is_list else "")

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` decompressed bytes from ``offset``."""
        self._file.seek(offset)
        return self._file.read(length)

    def _lines(self) -> Iterator[Item]:
        offset, number = self._start, 0
        self._file.seek(offset)
        # Bound the read: a binary file may be one line of gigabytes.
        while raw := self._file.readline(MAX_LINE_BYTES + 1):
            number += 1
            length = len(raw)
            if length > MAX_LINE_BYTES:
                length += self._rest_of_line(raw)
                too_long = f"the line is {length:,} bytes long, and the limit is {MAX_LINE_BYTES:,}"
                yield Item(number, offset, length, BadTaskError(too_long))
            elif raw.strip():
                yield Item(number, offset, length, _parsed(raw))
            # Seek to it again: between two lines the caller may have read a task elsewhere in the file.
            offset += length
            self._file.seek(offset)

    def _rest_of_line(self, raw: bytes) -> int:
        """Skip the rest of a line; return its length in bytes."""
        length = 0
        while raw and not raw.endswith(b"\n"):
            raw = self._file.readline(_CHUNK)
            length += len(raw)
        return length

    def _list_items(self) -> Iterator[Item]:
        text = _Window(self._file, self._start)
        text.skip(_SPACE)
        text.take(1)
        while True:
            text.skip(_SPACE + ",")
            line, offset = text.line, text.offset
            if text.peek() == "]":
                text.take(1)
                text.skip(_SPACE)
                if not text.peek():
                    return
                raise _broken_list(self.path, text.line, "something follows the list's ']'")
            try:
                value = text.take_value()
            except (json.JSONDecodeError, RecursionError) as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
                raise _broken_list(self.path, line, reason) from error
            yield Item(line, offset, text.offset - offset, value)

    def _skip_byte_order_mark(self) -> int:
        head = self._file.read(4)
        packed = next((kind for magic, kind in _PACKED.items() if head.startswith(magic)), None)
        if packed is not None:
            raise TaskFileError(
                f"the task file {self.path} is packed by {packed}, and only gzip is read", hint="unpack it"
            )
        encoding = json.detect_encoding(head) if head else "utf-8"
        if not encoding.startswith("utf-8"):
            has_mark = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            mark = "" if has_mark else ", without a byte order mark"
            raise TaskFileError(
                f"the task file {self.path} is not UTF-8: it is {encoding.upper()}{mark}",
                hint=f"convert it: iconv -f {encoding.upper()} -t UTF-8 {quoted(self.path)} > FILE.jsonl",
            )
        return len(codecs.BOM_UTF8) if encoding == "utf-8-sig" else 0


class _Window:
    """A sliding window over the text of a file, with the current line and byte offset."""

    def __init__(self, file: BinaryIO, start: int) -> None:
        file.seek(start)
        self._file = file
        # Keep bad bytes as surrogates: encoded again they have their length, so that offsets stay right.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text = ""
        self._at = 0
        self.line = 1
        self.offset = start

    def peek(self) -> str:
        """Return the next character; an empty string at the end."""
        if self._at == len(self._text):
            self._more()
        return self._text[self._at : self._at + 1]

    def skip(self, characters: str) -> None:
        """Advance over characters that are in ``characters``."""
        while (next_one := self.peek()) and next_one in characters:
            self.take(1)

    def take(self, count: int) -> None:
        """Advance over ``count`` characters of the text read so far."""
        passed = self._text[self._at : self._at + count]
        self.line += passed.count("\n")
        self.offset += len(passed.encode("utf-8", "surrogateescape"))
        self._at += len(passed)

    def take_value(self) -> Any:
        """Return the next JSON value of bounded length. Raises JSONDecodeError and RecursionError."""
        while True:
            try:
                value, end = DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > MAX_LINE_BYTES:
                    message = f"no task ends within {MAX_LINE_BYTES:,} bytes, the limit ({error.msg})"
                    raise json.JSONDecodeError(message, "", 0) from error
                if not self._more():
                    raise
                continue
            # Read on behind a value that ends with the text: a number may have further digits.
            if end < len(self._text) or not self._more():
                self.take(end - self._at)
                return value

    def _more(self) -> bool:
        """Read at least as much text as is pending; return False at the end of the file."""
        pending = len(self._text) - self._at
        # Double the text: decoding begins anew each time, and fixed pieces would take quadratic time.
        raw = self._file.read(max(_CHUNK, pending))
        self._text = self._text[self._at :] + self._decoder.decode(raw, final=not raw)
        self._at = 0
        return len(self._text) > pending


def open_binary(path: Path) -> BinaryIO:
    """Open for reading and seeking; the copy of a gzip file or pipe is deleted when it is closed."""
    file = path.open("rb")
    try:
        if not file.seekable():
            copied = _copy(file)
            file.close()
            file = cast("Any", copied)
        is_compressed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        if not is_compressed:
            return file
        # Unpack it once: to seek back in gzip is to begin anew, and tasks are read in shuffled order.
        with file, gzip.GzipFile(fileobj=file) as content:
            return _copy(cast("BinaryIO", content), Unpacked(path, os.fstat(file.fileno()).st_size))
    except BaseException:
        file.close()
        raise


class Unpacked:
    """Counts what a compressed file unpacks to, and refuses one that would fill the disk."""

    def __init__(self, path: Path, packed: int) -> None:
        self._path = path
        self._most = max(_UNPACKED_BYTES, _UNPACKED_RATIO * packed)
        self._count = 0

    def add(self, count: int) -> None:
        """Count bytes. Raises TaskFileError for more than any data set has."""
        self._count += count
        if self._count > self._most:
            raise TaskFileError(
                f"the task file {self._path} unpacks to more than {self._most:,} bytes, its limit",
                hint="unpack it yourself if you trust it",
            )


def _copy(source: BinaryIO, unpacked: Unpacked | None = None) -> BinaryIO:
    copy = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        while chunk := source.read(_COPIED_BYTES):
            if unpacked is not None:
                unpacked.add(len(chunk))
            copy.write(chunk)
        copy.seek(0)
    except BaseException:
        copy.close()
        raise
    return cast("BinaryIO", copy)


def _parsed(raw: bytes) -> Any:
    try:
        return parse(raw)
    except BadTaskError as error:
        return error


def _unreadable(path: Path, error: Exception) -> TaskFileError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return TaskFileError(
        f"the task file {path} cannot be read: {reason}", hint="give an existing JSONL or JSON file"
    )


def _broken_list(path: Path, line: int, reason: str) -> TaskFileError:
    return TaskFileError(
        f"{path}:{line}: the JSON list cannot be parsed: {reason}",
        hint="correct the list, or write JSONL: one task a line",
    )


def kind_of_file(path: Path) -> str:
    """Return ``parquet``, ``arrow``, ``csv`` or ``json`` by a file's first bytes and its name."""
    by_name = kind_of_name(path.name)
    # Trust the name of a CSV file: it has no first bytes of its own.
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


TaskFormat = Callable[[str, str], TaskSource | None]
"""Opens a source for the split ``train`` or ``eval``; None if the source is of another format."""
F = TypeVar("F", bound=TaskFormat)

TASK_FORMATS: Registry[TaskFormat] = Registry(
    "task format",
    group="agentrl.task_formats",
    built_in=("agentrl.worlds.harbor.source", "agentrl.worlds.task_tables"),
)
"""The formats of task sources beside JSONL and JSON."""


def task_format(name: str) -> Callable[[F], F]:
    """Register a function ``(source, split) -> TaskSource | None`` under ``name``."""

    def decorate(function: F) -> F:
        TASK_FORMATS.add(function, name)
        return function

    return decorate


def open_task_source(text: str, wanted: str) -> TaskSource:
    """Open a task source for the split ``wanted``, ``train`` or ``eval``. Raises TaskFileError.

    Formats are asked in the order of their names: a folder of ``harbor`` tasks is none of ``tables``.
    """
    for name in TASK_FORMATS.names():
        source = TASK_FORMATS.get(name)(text, wanted)
        if source is not None:
            return source
    path = Path(text)
    if text.startswith(HUB) or path.is_dir() or kind_of_file(path) != "json":
        raise TaskFileError(
            f"{text} is neither JSONL nor JSON, and agentrl.worlds, which reads others, is not installed",
            hint="install the whole of agentrl, or write the tasks to a JSONL file",
        )
    return TaskSource(path)


NAMING = ("scorer", "agent_name", "answer_schema", "environment")
"""The fields of a task that may name code."""
_LONGEST_NAME = 120
_SHOWN = 20
_KINDS = 100
_EXCERPT = 60
_JUDGES = frozenset({"agentcpm", "asearcher"})
"""The scorers that judge by the task's answer, or else by its rubric or the question alone."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Tasks in sampling order, ``file:line: reason`` of each skipped line, and warnings.

    ``names`` has the scorers, agents, answer schemas and environments that the tasks use: {field: {name, …}}.
    """

    tasks: Sequence[Task]
    skipped: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    names: dict[str, set[str]] = field(default_factory=dict)
    images: Callable[[], Iterator[Image]] = lambda: iter(())
    """Reads the images of the tasks, each once."""
    presets: dict[str, int] = field(default_factory=dict)
    """Preset → the number of rows that it read; ``task`` are rows that are tasks already."""
    outside: frozenset[str] = frozenset()
    """The code, servers and files that the tasks name, as ``permissions`` writes them."""
    reading: str | None = None
    """How rows of another system are read, with the first of them as an example; None without such rows."""
    kinds: tuple[Task, ...] = ()
    """The first task of each kind of row: of scorer, schema, type of answer, form that its prompt wants."""
    mixture: tuple[MixtureSource, ...] = ()
    """The sources of a mixture; empty for any other source."""

    @classmethod
    def mixed(cls, parts: Mapping[str, ReadResult], mixture: Mixture) -> ReadResult:
        """Return what was read of a mixture, from its ``parts`` by the names of the sources."""
        read = parts.values()

        def images() -> Iterator[Image]:
            return (image for part in read for image in part.images())

        return cls(
            tasks=MixedTasks([part.tasks for part in read]),
            skipped=tuple(line for part in read for line in part.skipped),
            warnings=tuple(f"{name}: {line}" for name, part in parts.items() for line in part.warnings),
            names={field: set().union(*(part.names[field] for part in read)) for field in NAMING},
            images=images,
            presets=dict(sum((Counter(part.presets) for part in read), Counter())),
            outside=frozenset().union(*(part.outside for part in read)),
            reading="\n".join(f"{name}: {part.reading}" for name, part in parts.items() if part.reading)
            or None,
            kinds=tuple(task for part in read for task in part.kinds),
            mixture=mixture.stored,
        )


class FileTasks(Sequence[Task]):
    """A lazy sequence: reads each task from the file on access. Tasks are in sampling order."""

    def __init__(
        self, source: TaskSource, rows: TaskRows, split: str, num_generations: int, name: str | None = None
    ) -> None:
        """``name`` is that of the source in a mixture; ids then begin with it."""
        self._source = source
        self._rows = rows
        self._folder = source.folder
        self._split = split
        self._num_generations = num_generations
        self._name = name
        # Hold numbers in arrays: a list of Python's integers takes about four times the memory.
        self._numbers = array("Q")
        self._offsets = array("Q")
        self._lengths = array("Q")
        self._file_indexes = array("Q")
        """Sampling order → index of the task in the file."""
        self._ids: list[str] = []
        self._fingerprints = bytearray()
        self._has_images = bytearray()

    def make(self, value: Any, order: int = 0) -> Task:
        """Return the task of a row that presets have read. Raises BadTaskError."""
        task = make_task(value, self._split, self._num_generations, self._folder, order)
        if self._name is None:
            return task
        # Name the source in the id: rows without one are numbered, in every source from 0.
        task_id = f"{self._name}/{task.task_id}"
        return replace(task, id=task_key(self._split, 0, task_id), task_id=task_id, source=self._name)

    def add(self, item: Item, task: Task) -> None:
        """Append one task."""
        self._ids.append(task.task_id)
        self._fingerprints += fingerprint(task)
        self._has_images.append(bool(task.images))
        self._file_indexes.append(len(self._offsets))
        self._numbers.append(item.number)
        self._offsets.append(item.offset)
        self._lengths.append(item.length)

    def shuffle(self, seed: str) -> None:
        """Shuffle the order; the result is the same on every machine."""
        shuffled = list(self._file_indexes)
        # Seed by a text: Random takes its SHA-512, which is the same in every process.
        random.Random(seed).shuffle(shuffled)
        self._file_indexes = array("Q", shuffled)

    def fingerprint(self, order: int) -> tuple[str, bytes]:
        """Return the ``_id`` of a task and its fingerprint when the file was checked, without reading it."""
        index = self._file_indexes[order]
        start = FINGERPRINT_BYTES * index
        own = bytes(self._fingerprints[start : start + FINGERPRINT_BYTES])
        return task_key(self._split, 0, self._ids[index]), own

    def images(self) -> Iterator[Image]:
        """Yield each image that a task names."""
        seen: set[str] = set()
        for order, index in enumerate(self._file_indexes):
            if self._has_images[index] and any(image.sha256 not in seen for image in self[order].images):
                for image in read_images(image_sources(self._value(order)), self._folder):
                    if image.id not in seen:
                        seen.add(image.id)
                        yield image

    def _value(self, order: int) -> Any:
        index = self._file_indexes[order]
        value = parse(self._source.read(self._offsets[index], self._lengths[index]))
        return self._rows.read(value, self._numbers[index])[0]

    def __len__(self) -> int:
        return len(self._file_indexes)

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self._read(order) for order in range(*index.indices(len(self)))]
        return self._read(range(len(self))[index])

    def _read(self, order: int) -> Task:
        try:
            task = self.make(self._value(order), order)
            if (task.id, fingerprint(task)) != self.fingerprint(order):
                raise BadTaskError(f"task {self._ids[self._file_indexes[order]][:80]!r} has another text")
            return task
        except (BadTaskError, OSError) as error:
            raise TaskFileError(
                f"the task file {self._source.path} changed while it was loaded: {error}",
                hint="load it again when no process writes to it; the tasks loaded so far are kept",
            ) from error


class MixedTasks(Sequence[Task]):
    """The tasks of several files, one file after the other; each numbers its own."""

    def __init__(self, parts: Sequence[Sequence[Task]]) -> None:
        self._parts = [cast("FileTasks", part) for part in parts]
        self._ends = [*accumulate(map(len, self._parts))]

    def fingerprint(self, index: int) -> tuple[str, bytes]:
        """Return the ``_id`` and the fingerprint of a task: see ``FileTasks``."""
        part, order = self._place(index)
        return part.fingerprint(order)

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[order] for order in range(*index.indices(len(self)))]
        part, order = self._place(range(len(self))[index])
        return part[order]

    def _place(self, index: int) -> tuple[FileTasks, int]:
        part = bisect_right(self._ends, index)
        return self._parts[part], index - (self._ends[part - 1] if part else 0)


def read_tasks(
    path: str | Path, *, split: str = "train", seed: int = 0, shuffle: bool = True,
    num_generations: int = 8, skip_bad_lines: bool = False,
    source: TaskSource | None = None, rows: TaskRows | None = None,
    check: Callable[[Task, Item], None] = lambda task, item: None,
    look: Callable[[Task, Item], None] = lambda task, item: None,
    names: Callable[[Task], frozenset[str]] | None = None, name: str | None = None,
) -> ReadResult:  # fmt: skip
    """Check and index a task file, plain or gzip. A bad line raises TaskFileError unless ``skip_bad_lines``.

    The order is shuffled by ``seed`` and is the same on every machine. Tasks are read on access, so
    memory does not grow with their size. ``source`` is read instead of the file; errors name ``path``.
    ``rows`` says how rows become tasks. ``check`` gets each task with its row, and raises BadTaskError for a
    bad one; ``look`` gets each that is not bad, in the order of the source.
    ``names`` returns the code, servers and files that a task names; without it, those of its fields count,
    and a task of a source that is not trusted may name no environment. ``name`` is that of ``FileTasks``.
    """
    source = source or TaskSource(Path(path))
    rows = rows or TaskRows()
    tasks = FileTasks(source, rows, split, num_generations, name)
    reading = _Reading(tasks, rows, source.is_trusted, names, check)
    for item in source.items():
        where = source.where(item)
        try:
            if isinstance(item.value, BadTaskError):
                raise item.value
            value, preset = rows.read(item.value, item.number)
            reading.look(item.value)
            if not source.is_trusted:
                # Check it before make_task, which opens the images.
                _require_images_inside(value)
            task = tasks.make(value)
            reading.add(task, item, where, preset)
            tasks.add(item, task)
            look(task, item)
            reading.warn(where, value)
        except BadTaskError as error:
            reading.bad.append(f"{where}: {error}")
    reading.require_columns(path)
    if reading.bad and not (skip_bad_lines and len(tasks)):
        raise _bad_lines(path, reading.bad, len(tasks))
    if not len(tasks):
        raise TaskFileError(f"{path} holds no tasks", hint='write one {"id": …, "query": …} a line')
    if shuffle:
        tasks.shuffle(f"{seed}/0")  # as epoch 0 of ``Epochs.open``
    return ReadResult(
        tasks, tuple(reading.bad), reading.warnings(), reading.names, tasks.images,
        reading.presets, frozenset(reading.outside), reading.example, tuple(reading.kinds.values()),
    )  # fmt: skip


class _Reading:
    """The results of the first pass over a file."""

    def __init__(
        self,
        tasks: FileTasks,
        rows: TaskRows,
        is_trusted: bool,
        names: Callable[[Task], frozenset[str]] | None,
        check: Callable[[Task, Item], None],
    ) -> None:
        self.tasks = tasks
        self.bad: list[str] = []
        self.presets: dict[str, int] = {}
        self.example: str | None = None
        self._rows = rows
        self._is_trusted = is_trusted
        self._names_of = names
        self.outside: set[str] = set()
        self._unseen = set(rows.columns.values())
        self._columns: list[str] = []
        self.names: dict[str, set[str]] = {name: set() for name in NAMING}
        self._check = check
        self.kinds: dict[tuple[object, ...], Task] = {}
        self._ids: set[str] = set()
        self._misspelled: dict[str, tuple[str, int]] = {}
        self._unanswered: dict[str, tuple[str, int]] = {}
        """Judge → the first of its tasks without an answer and a rubric, and their number."""

    def look(self, row: Any) -> None:
        """Record which columns of ``--task_fields`` a row has."""
        if self._unseen and isinstance(row, dict):
            self._columns = self._columns or list(row)
            self._unseen = {path for path in self._unseen if column_of(row, path) is None}

    def require_columns(self, path: str | Path) -> None:
        """Raise TaskFileError if no row has a column of ``--task_fields``."""
        if self._unseen and self._columns:
            raise TaskFileError(
                f"{path}: no row has {', '.join(map(repr, sorted(self._unseen)))} of --task_fields",
                hint=f"the columns of the first row are {', '.join(self._columns[:_SHOWN])}",
            )

    def add(self, task: Task, item: Item, where: str, preset: str) -> None:
        """Check and record the names and the id of a task. Raises BadTaskError."""
        if not self._is_trusted:
            _require_nothing(names_in_fields(task))  # before what asks its environment imports it
        if self._names_of is not None:
            outside = self._names_of(task)
        elif not self._is_trusted and task.environment is not None:
            outside = frozenset({f"environment {task.environment}"})
        else:
            outside = names_in_fields(task)
        if not self._is_trusted:
            _require_nothing(outside)
        if task.task_id in self._ids:
            raise BadTaskError(f"id {task.task_id[:80]!r} is used above")
        self._check(task, item)  # last: nothing of a bad task is recorded
        self.outside |= outside
        self._ids.add(task.task_id)
        if len(self.kinds) < _KINDS:
            texts = (task.query, task.system_prompt or "")
            answer = kind_of(task.answer)
            self.kinds.setdefault((task.scorer, task.answer_schema, answer, asked_schema(texts)), task)
        self.presets[preset] = self.presets.get(preset, 0) + 1
        if self.example is None and (says := self._rows.says(preset)):
            query, answer, task_id = (
                shortened(repr(value), _EXCERPT) for value in (task.query, task.answer, task.task_id)
            )
            self.example = (
                f"read as {preset}: {says}; first: {where}: query {query}, answer {answer}, id {task_id},"
                f" scorer {task.scorer}, answer_schema {task.answer_schema}"
            )
        for name, used in self.names.items():
            used.update(_names(task, name))
        if task.answer is None and not task.aug_answers and not task.meta.get("rubric"):
            for part in _JUDGES.intersection(_names(task, "scorer")):
                first, count = self._unanswered.get(part, (where, 0))
                self._unanswered[part] = (first, count + 1)

    def warn(self, where: str, item: dict[str, object]) -> None:
        """Record each field that looks misspelled."""
        for name in item:
            if nearest_field(name) is not None:
                first, count = self._misspelled.get(name, (where, 0))
                self._misspelled[name] = (first, count + 1)

    def warnings(self) -> tuple[str, ...]:
        """Return one line per misspelled field, and per judge whose tasks have neither answer nor rubric."""
        unanswered = tuple(
            f"{where}: no answer, so the scorer {name}{' (the default)' * (name == 'agentcpm')} lets the"
            f" judge decide by the question alone ({count} tasks), unless the agent scores itself"
            for name, (where, count) in self._unanswered.items()
        )
        return unanswered + tuple(
            f"{where}: the field {name!r} is unknown and kept in meta; did you mean {nearest_field(name)!r}?"
            + (f" ({count} tasks have it)" if count > 1 else "")
            for name, (where, count) in self._misspelled.items()
        )


def _bad_lines(path: str | Path, bad: Sequence[str], good: int) -> TaskFileError:
    more = f"\n  … and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return TaskFileError(
        f"{len(bad)} of {len(bad) + good} tasks of {path} cannot be read:\n  "
        + "\n  ".join(bad[:_SHOWN])
        + more,
        hint="correct these lines, or load the others with --skip_bad_lines",
    )


def names_in_fields(task: Task) -> frozenset[str]:
    """Return the code and the file that the fields of a task name, as ``permissions`` writes them."""
    names = names_outside(name for field in NAMING for name in _names(task, field))
    return names if task.agent_cfg_path is None else names | {file_name(task.agent_cfg_path)}


def _require_nothing(outside: Collection[str]) -> None:
    """Raise BadTaskError if data that others write names code, servers or files."""
    if outside:
        raise BadTaskError(
            f"it names {min(outside)[:_LONGEST_NAME]!r}, and others write this data: if you trust it, load it"
            " from a file of your own"
        )


def _require_images_inside(value: Any) -> None:
    """Raise BadTaskError for an image outside the folder of data that others write."""
    for source in image_sources(value) if isinstance(value, dict) else ():
        if not is_url(source) and (os.path.isabs(source) or ".." in Path(source).parts):
            raise BadTaskError(f"its image {source[:_LONGEST_NAME]!r} is outside the folder of the data")


def _names(task: Task, field: str) -> tuple[str, ...]:
    """Return what a field of the task names: every scorer of a weighted sum."""
    value = getattr(task, field)
    if value is None:
        return ()
    return tuple(scorer_weights(value)) if field == "scorer" else (value,)
