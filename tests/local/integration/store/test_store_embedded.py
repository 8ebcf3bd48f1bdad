"""The embedded server: up, down, concurrent, killed, in the way of others."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from agentrl.errors import ConfigError, StoreError
from agentrl.local import local_cli
from agentrl.local import mongod as embedded
from agentrl.local.mongod import EmbeddedMongo, choose_mongod

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
    assert local_cli.mongo(["status", *flags]) == 3
    assert local_cli.mongo(["down", *flags]) == 0
    sockets = set(Path("/tmp").glob("mongodb-*.sock"))
    assert local_cli.mongo(["up", *flags]) == 0
    first = capsys.readouterr().out
    assert local_cli.mongo(["up", *flags]) == 0
    assert capsys.readouterr().out in first
    assert local_cli.mongo(["status", *flags]) == 0
    assert len(mongods_of(tmp_path)) == 1
    assert set(Path("/tmp").glob("mongodb-*.sock")) == sockets
    assert local_cli.mongo(["down", *flags]) == 0
    assert mongods_of(tmp_path) == []
    with pytest.raises(ConfigError, match="--drr"):
        local_cli.mongo(["up", "--drr", "x"])


def test_who_does_not_have_the_password_neither_reads_nor_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--dir", str(tmp_path / "m")]
    mongo = EmbeddedMongo(tmp_path / "m")
    try:
        assert local_cli.mongo(["up", *flags]) == 0
        assert local_cli.mongo(["status", *flags]) == 0
        status = mongo.status()
        shown = capsys.readouterr().out
        assert status.shown_uri in shown
        assert status.password not in shown + repr(status) + mongo.log.read_text()
        assert local_cli.mongo(["uri", *flags]) == 0
        assert capsys.readouterr().out == f"{status.uri}\n"
        for file in ("keyfile", "password"):
            assert (mongo.directory / file).stat().st_mode & 0o077 == 0
        with MongoClient[dict[str, object]](status.uri) as owner:
            owner["run"]["Task"].insert_one({"_id": 1})
        with MongoClient[dict[str, object]](f"127.0.0.1:{status.port}", directConnection=True) as other:
            for call in (
                lambda: other["run"]["Task"].find_one({}),
                lambda: other["run"]["Task"].insert_one({}),
                lambda: other.list_database_names(),
                lambda: other.admin.command("createUser", "me", pwd="x", roles=["root"]),
                lambda: other.admin.command("shutdown"),
            ):
                with pytest.raises(OperationFailure, match="requires authentication"):
                    call()
    finally:
        mongo.down()


def test_a_server_whose_password_was_deleted_gets_another(tmp_path: Path) -> None:
    mongo = EmbeddedMongo(tmp_path / "m")
    try:
        with MongoClient[dict[str, object]](mongo.up().uri) as client:
            client["run"]["Task"].insert_one({"_id": 1})
        mongo.down()
        (mongo.directory / "password").unlink()
        with pytest.raises(StoreError, match="password is missing"):
            assert mongo.status().uri
        with MongoClient[dict[str, object]](mongo.up().uri) as client:
            assert client["run"]["Task"].find_one({}) == {"_id": 1}
    finally:
        mongo.down()


def test_eight_callers_start_one_server(tmp_path: Path) -> None:
    mongo = EmbeddedMongo(tmp_path / "m")
    try:
        with ThreadPoolExecutor(8) as pool:
            pids = {status.pid for status in pool.map(lambda _: mongo.up(), range(8))}
        assert len(pids) == 1
        assert mongods_of(tmp_path) == list(pids)
    finally:
        mongo.down()


def test_it_outlives_the_process_that_started_it_and_may_open_more_files(tmp_path: Path) -> None:
    mongo = EmbeddedMongo(tmp_path / "m")
    command = [sys.executable, "-m", "agentrl", "mongo", "up", "--dir", str(mongo.directory)]
    try:
        shell = ["sh", "-c", 'ulimit -S -n 512; exec "$@"', "sh", *command]
        subprocess.run(shell, check=True, capture_output=True, timeout=60)
        pid = mongo.status().pid
        assert pid is not None
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        assert soft == hard
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


def test_the_mongod_is_named_and_data_of_a_newer_one_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--dir", str(tmp_path / "m")]
    mongo = EmbeddedMongo(tmp_path / "m")
    binary = choose_mongod().mongod
    version = ".".join(map(str, binary.version))
    try:
        assert local_cli.mongo(["up", *flags, "--mongod", str(binary.path)]) == 0
        shown = capsys.readouterr().out
        assert f"started mongod {version} ({binary.path}, from --mongod)" in shown
        assert ("past its end of life" in shown) == (binary.version < (7, 0, 0))
        with pytest.raises(StoreError, match=r"runs .*mongod, and --mongod is /bin/true"):
            mongo.up(mongod="/bin/true")
        mongo.down()
        (mongo.directory / "mongod-version").write_text("99.0.1", encoding="ascii")
        with pytest.raises(StoreError, match=r"can open the data that 99\.0\.1 wrote") as refused:
            mongo.up()
        assert "--mongod PATH" in str(refused.value.hint)
        assert mongods_of(tmp_path) == []
    finally:
        mongo.down()


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_FREE_BYTES", 2**62)
    with pytest.raises(StoreError, match="MiB free"):
        EmbeddedMongo(tmp_path / "m").up()
