"""Read a server's lines: bounded, whole, and without a quadratic search."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agentrl.tools.config import StdioSpec
from agentrl.tools.mcp import connection
from agentrl.tools.mcp.connection import LineReader, private_folder


async def lines_of(*chunks: bytes) -> list[bytes]:
    stream = asyncio.StreamReader()
    for chunk in chunks:
        stream.feed_data(chunk)
    stream.feed_eof()
    reader, lines = LineReader(stream), []
    while (line := await reader.next()) is not None:
        lines.append(line)
    return lines


async def test_lines_are_whole_however_they_arrive() -> None:
    assert await lines_of(b"a\nb", b"c\n\nd", b"") == [b"a\n", b"bc\n", b"\n", b"d"]


@pytest.mark.parametrize("where", ["first", "last"])
async def test_a_line_that_is_too_long_becomes_the_error_of_its_request(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(connection, "MAX_MESSAGE_BYTES", 2**20)
    result = {"content": [{"type": "text", "text": "x" * 3 * 2**20}]}
    answer = {"id": 7, "result": result} if where == "first" else {"result": result, "id": 7}
    long, after = await lines_of(json.dumps(answer).encode() + b"\nnext\n")
    message = connection._parse(long)
    assert message is not None
    assert message.message.id == 7  # type: ignore[union-attr]
    assert "longer than 1 MiB" in message.message.error.message  # type: ignore[union-attr]
    assert after == b"next\n"
    assert connection._parse(after) is None


@pytest.mark.parametrize(
    ("line", "id"),
    [
        ('rows: 3 {"jsonrpc": "2.0", "id": 7, "result": {}}', 7),
        ('row {"id": 5, "name": "x"} ok {"jsonrpc": "2.0", "id": 7, "result": {}}', 7),
        ('row {"id": 5, "result": "x"} and more', None),
        ('said {"jsonrpc": "2.0", "id": 7, "method": "sampling/createMessage", "params": {}}', None),
        ('said {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}', None),
        ('{"id": ' * 5000, None),
    ],
)
def test_behind_printed_text_only_a_whole_answer_counts(line: str, id: int | None) -> None:
    message = connection._parse(line.encode())
    assert (None if message is None else message.message.id) == id  # type: ignore[union-attr]


def test_a_private_folder_is_new_for_each_process_and_deleted() -> None:
    spec = StdioSpec(name="s", command="c", args=("--db", "${workdir}/a"), env={"HOME": "${workdir}"})
    with private_folder(spec) as one, private_folder(spec) as two:
        folder = Path(one.env["HOME"])
        assert folder.is_dir()
        assert one.args == ("--db", f"{folder}/a")
        assert two.env["HOME"] != one.env["HOME"]
    assert not folder.exists()
    plain = StdioSpec(name="s", command="c")
    with private_folder(plain) as same:
        assert same is plain
