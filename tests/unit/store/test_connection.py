"""Errors of the driver become errors for people, without credentials."""

from __future__ import annotations

from pathlib import Path

import pytest
from pymongo.errors import OperationFailure, ServerSelectionTimeoutError

from agentrl.config.schema import RunConfig
from agentrl.errors import StoreError
from agentrl.store.client import open_store
from agentrl.store.connection import Connection


async def test_messages_name_the_host_and_never_the_password() -> None:
    connection = Connection("mongodb://user:hunter2@127.0.0.1:1/?authSource=admin", "run", 0.2)
    timeout = connection.error("claiming", ServerSelectionTimeoutError("no server"))
    refused = connection.error("claiming", OperationFailure("auth failed", 18, {"errmsg": "auth failed"}))
    await connection.close()
    assert "127.0.0.1:1 did not answer within 0.2 s" in timeout.message
    assert "refused the user" in refused.message
    assert "hunter2" not in str(timeout) + str(refused)


async def test_an_unreachable_server_is_an_error_within_the_timeout() -> None:
    run = RunConfig(db_connection_string="mongodb://127.0.0.1:1/", db_timeout_seconds=0.3)
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1 did not answer"):
        await open_store(run)


async def test_a_bad_uri_is_an_error() -> None:
    with pytest.raises(StoreError, match="no MongoDB URI"):
        await open_store(RunConfig(db_connection_string="postgres://x"))


async def test_without_a_server_the_cure_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        await open_store(RunConfig(mongo_dir=str(tmp_path / "none")))
    assert "agentrl mongo up" in str(caught.value.cure)
