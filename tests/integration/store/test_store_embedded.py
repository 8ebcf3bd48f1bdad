"""The embedded server: up, down, concurrent, killed, in the way of others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentrl.commands.mongo import main
from agentrl.errors import ConfigError, StoreError
from agentrl.store import embedded
from agentrl.store.embedded import EmbeddedMongo

pytestmark = pytest.mark.integration


def mongods_of(directory: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"mongod\0" in words and os.fsencode(str(directory)) in words:
                found.append(int(entry.name))
    return found


def test_the_command_goes_up_and_down_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--dir", str(tmp_path / "m")]
    assert main(["status", *flags]) == 3
    assert main(["down", *flags]) == 0
    sockets = set(Path("/tmp").glob("mongodb-*.sock"))
    assert main(["up", *flags]) == 0
    first = capsys.readouterr().out
    assert main(["up", *flags]) == 0
    assert capsys.readouterr().out in first
    assert main(["status", *flags]) == 0
    assert len(mongods_of(tmp_path)) == 1
    assert set(Path("/tmp").glob("mongodb-*.sock")) == sockets
    assert main(["down", *flags]) == 0
    assert mongods_of(tmp_path) == []
    with pytest.raises(ConfigError, match="--drr"):
        main(["up", "--drr", "x"])


def test_eight_callers_start_one_server(tmp_path: Path) -> None:
    mongo = EmbeddedMongo(tmp_path / "m")
    try:
        with ThreadPoolExecutor(8) as pool:
            pids = {status.pid for status in pool.map(lambda _: mongo.up(), range(8))}
        assert len(pids) == 1
        assert mongods_of(tmp_path) == list(pids)
    finally:
        mongo.down()


def test_it_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    mongo = EmbeddedMongo(tmp_path / "m")
    command = [sys.executable, "-m", "agentrl.cli", "mongo", "up", "--dir", str(mongo.directory)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        assert mongo.status().running
    finally:
        assert mongo.down()


def test_a_killed_server_and_a_stale_state_are_cleaned_up(tmp_path: Path) -> None:
    mongo = EmbeddedMongo(tmp_path / "m")
    first = mongo.up()
    try:
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        second = mongo.up()
        assert second.port == first.port
        assert second.pid != first.pid
    finally:
        mongo.down()
    state = mongo.directory / "server.json"
    state.write_text(f'{{"pid": {os.getpid()}, "started": 1, "port": {first.port}}}', encoding="utf-8")
    assert not mongo.status().running
    assert not mongo.down()


def test_a_taken_port_is_named_and_another_can_be_given(tmp_path: Path) -> None:
    mongo = EmbeddedMongo(tmp_path / "m")
    mongo.up()
    mongo.down()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        state = mongo.directory / "server.json"
        state.write_text(f'{{"pid": null, "started": null, "port": {port}}}', encoding="utf-8")
        with pytest.raises(StoreError, match=f"port {port} .* is taken"):
            mongo.up()
        try:
            moved = mongo.up(port=0)
            assert moved.port != port
            with pytest.raises(StoreError, match="runs on port"):
                mongo.up(port=port)
        finally:
            mongo.down()


def test_a_second_server_on_the_data_is_refused_with_the_log(tmp_path: Path) -> None:
    mongo = EmbeddedMongo(tmp_path / "m")
    mongo.up()
    state = mongo.directory / "server.json"
    saved = state.read_text(encoding="utf-8")
    try:
        state.unlink()
        with pytest.raises(StoreError, match="exit code 100"):
            mongo.up()
        assert len(mongods_of(tmp_path)) == 1
    finally:
        state.write_text(saved, encoding="utf-8")
        assert mongo.down()


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_FREE_BYTES", 2**62)
    with pytest.raises(StoreError, match="MiB free"):
        EmbeddedMongo(tmp_path / "m").up()
