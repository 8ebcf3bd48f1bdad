"""Fixtures of the whole tree: a real MongoDB for the session, a database of its own for each test."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agentrl.config.schema import RunConfig
from agentrl.store import availability
from agentrl.store.client import Store, open_store
from agentrl.store.embedded.server import EmbeddedMongo


def pytest_configure(config: pytest.Config) -> None:
    """PyMongo drops a socket unclosed when its client is closed while it still connects (no raddr yet)."""
    unclosed = r"ignore:Exception ignored in. <socket\.socket [^>]*laddr=\([^)]*\)>"
    config.addinivalue_line("filterwarnings", f"{unclosed}:pytest.PytestUnraisableExceptionWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run a failed test of real processes once more: a busy machine delays them. The summary names it."""
    for item in items:
        if item.get_closest_marker("integration") or item.get_closest_marker("acceptance"):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(autouse=True)
def leases_expire_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else needs time to renew leases on the server of a test, which has just started."""
    monkeypatch.setattr(availability, "RENEWAL_SECONDS", 0.0)


@pytest.fixture(scope="session")
def mongo_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URI of an embedded server that lives as long as the test session."""
    mongo = EmbeddedMongo(tmp_path_factory.mktemp("mongo"))
    try:
        yield mongo.up().uri
    finally:
        mongo.down()


@pytest.fixture
def run_config(mongo_uri: str, tmp_path: Path) -> RunConfig:
    """A run with a database name, an output folder and logs of its own."""
    return RunConfig(
        run_name=f"test_{uuid.uuid4().hex[:12]}",
        db_connection_string=mongo_uri,
        output_dir=str(tmp_path / "output"),
        log_dir=str(tmp_path / "logs"),
    )


@pytest.fixture
async def store(run_config: RunConfig) -> AsyncIterator[Store]:
    """The run's store; its database is dropped afterwards."""
    async with await open_store(run_config) as opened:
        yield opened
        await opened.database.client.drop_database(run_config.run_name)
