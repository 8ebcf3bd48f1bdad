"""Passwords in connection strings show up nowhere: not in errors, not in logs."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.config.schema import RunConfig
from agentrl.errors import StoreError
from agentrl.store.mechanics.connection import Connection

pytestmark = pytest.mark.integration

PASSWORD = "hunter2-s3cret"
MALFORMED = [
    f"mongodb://user:{PASSWORD}/more@host:1", f"mongodb://user:{PASSWORD}", f"mongodb://user:{PASSWORD}@",
    f"mongodb://user:{PASSWORD}:x@host", f"user:{PASSWORD}@host", f"mongodb://user:{PASSWORD}@host:99999999",
    f"mongodb://user:{PASSWORD}%@host", f"mongodb://user@{PASSWORD}@host",
    f"mongodb+srv://user:{PASSWORD}@host:27017/", f"mongodb://{PASSWORD}:x:y/",
]  # fmt: skip


@pytest.fixture
def dead_uri() -> Iterator[str]:
    """A port at which something listens that never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        yield f"mongodb://user:{PASSWORD}@127.0.0.1:{port}/?authSource=admin"


@pytest.mark.parametrize("uri", MALFORMED)
async def test_a_malformed_uri_is_refused_without_its_password(uri: str) -> None:
    with pytest.raises(StoreError) as raised:
        await Connection(uri, "run", 0.5).check()
    assert PASSWORD not in str(raised.value)


def test_a_configuration_does_not_show_it() -> None:
    assert PASSWORD not in repr(RunConfig(db_connection_string=f"mongodb://user:{PASSWORD}@host"))


@pytest.mark.parametrize(
    "words",
    [
        ("db", "check"),
        ("db", "export", "copy"),
        ("audit", "run"),
        ("tasks", "list"),
        ("sample", "--log_level", "DEBUG", "--db_wait_seconds", "1"),
    ],
)
def test_a_server_that_does_not_answer_is_named_without_the_password(
    words: tuple[str, ...], dead_uri: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "agentrl", *words, "--run_name", "r"]
    command += ["--db_connection_string", dead_uri, "--db_timeout_seconds", "0.5"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "MongoDB at 127.0.0.1:" in said
    assert "Traceback" not in said
    logs = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    for text in (said, *logs):
        assert PASSWORD not in text
        assert "user:" not in text
