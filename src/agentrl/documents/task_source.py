"""Read a task file in pieces, plain or gzip, and yield each task's JSON with its line and byte range."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import tempfile
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from agentrl.documents.task_json import DECODER, MAX_LINE_BYTES, parse
from agentrl.documents.task_messages import BadTaskError
from agentrl.errors import TaskFileError

_GZIP = b"\x1f\x8b"
_PACKED = {b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zX": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip"}
_CHUNK = 64 * 1024
_COPIED_BYTES = 2**20
_UNPACKED_RATIO = 100
_UNPACKED_BYTES = 256 * 2**20
"""A small file may unpack to this much; a larger one to its size times ``_UNPACKED_RATIO``."""
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
            yield replace(item, number=number, value=bad.get(item.line, item.value))

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
        while raw := self._file.readline(MAX_LINE_BYTES + 1):
            number += 1
            length = len(raw)
            if length > MAX_LINE_BYTES:
                length += self._rest_of_line(raw)
                too_long = f"the line is {length:,} bytes long, and the limit is {MAX_LINE_BYTES:,}"
                yield Item(number, offset, length, BadTaskError(too_long))
            elif raw.strip():
                yield Item(number, offset, length, _parsed(raw))
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
                hint=f"convert it: iconv -f {encoding.upper()} -t UTF-8 {self.path} > FILE.jsonl",
            )
        return len(codecs.BOM_UTF8) if encoding == "utf-8-sig" else 0


class _Window:
    """A sliding window over the text of a file, with the current line and byte offset."""

    def __init__(self, file: BinaryIO, start: int) -> None:
        file.seek(start)
        self._file = file
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
            if end < len(self._text) or not self._more():
                self.take(end - self._at)
                return value

    def _more(self) -> bool:
        """Read at least as much text as is pending; return False at the end of the file."""
        pending = len(self._text) - self._at
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
