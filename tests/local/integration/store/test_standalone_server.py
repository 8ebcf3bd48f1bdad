"""A standalone mongod is refused; the error gives the commands that make it a replica set."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pymongo import MongoClient

from agentrl.base.processes import stop_child
from agentrl.config.schema import RunConfig
from agentrl.inference.engines.commands import free_port
from agentrl.local.doctor import database_checks
from agentrl.local.mongod import choose_mongod

pytestmark = pytest.mark.integration


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[str]:
    """The URI of a server without ``--replSet``, as the original's compose file starts it."""
    port = free_port("127.0.0.1")
    server = subprocess.Popen(
        [
            str(choose_mongod().mongod.path), "--dbpath", str(tmp_path), "--port", str(port),
            "--bind_ip", "127.0.0.1", "--nounixsocket",
        ],
        stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    uri = f"mongodb://127.0.0.1:{port}/"
    try:
        with MongoClient[dict[str, object]](uri, serverSelectionTimeoutMS=60_000) as client:
            client.admin.command("ping")
        yield uri
    finally:
        stop_child(server)


async def test_a_standalone_server_is_told_how_to_become_a_replica_set(standalone: str) -> None:
    [check] = await database_checks(RunConfig(run_name="none", db_connection_string=standalone))
    assert (check.name, check.state) == ("database", "fail")
    assert "standalone server" in check.found
    for words in ("--replSet agentrl", "--keyFile", "rs.initiate()", "docs/coming_from.md"):
        assert words in str(check.hint)
