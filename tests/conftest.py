"""Fixtures of the whole tree: a real MongoDB for the session, a database of its own for each test."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import warm_python as warm_python_module
from hypothesis import HealthCheck, settings
from memory_folder import memory_folder
from pymongo import MongoClient

from agentrl.config.run import URI_VARIABLES
from agentrl.config.schema import RunConfig
from agentrl.observe.logging import LogWriter
from agentrl.store import claims
from agentrl.store.client import Store, open_store

MOST_RERUNS = 3
"""A session fails if more tests than this needed a second run."""

# A busy machine makes data slowly; tests that say so are not wrong.
settings.register_profile("shared", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("shared")


def pytest_configure(config: pytest.Config) -> None:
    """Use no database of the environment, and ignore a warning of PyMongo.

    PyMongo drops a socket unclosed when its client is closed while it still connects (no raddr yet).
    """
    for name in URI_VARIABLES:
        os.environ.pop(name, None)
    unclosed = r"ignore:Exception ignored in. <socket\.socket [^>]*laddr=\([^)]*\)>"
    config.addinivalue_line("filterwarnings", f"{unclosed}:pytest.PytestUnraisableExceptionWarning")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run a failed test of real processes once more: a busy machine delays them. The summary names it.

    With ``--no-loadscope-reorder``, where a process takes whole files, those whose tests may take longest
    come first, then those of most tests: no process waits at the end for one that has just begun a long file.
    """
    for item in items:
        if item.get_closest_marker("integration") or item.get_closest_marker("acceptance"):
            item.add_marker(pytest.mark.flaky(reruns=1))
    if config.getoption("loadscopereorder", True):
        return
    limits: dict[Path, list[float]] = {}
    for item in items:
        limits.setdefault(item.path, []).append(_limit(item))
    items.sort(key=lambda item: (-max(limits[item.path]), -len(limits[item.path])))


def _limit(item: pytest.Item) -> float:
    """The seconds of the test's own ``timeout``; 0 without."""
    marker = item.get_closest_marker("timeout")
    return 0.0 if marker is None else float(marker.args[0])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the first failure of each test that was run once more."""
    repeated = terminalreporter.stats.get("rerun", [])
    if repeated:
        terminalreporter.section(f"tests that were run once more: {len(repeated)}, at most {MOST_RERUNS}")
    for report in repeated:
        terminalreporter.line(f"{report.nodeid}, the first time:\n{report.longreprtext}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail if so many tests were run once more that a busy machine does not explain it."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    repeated = reporter.stats.get("rerun", []) if reporter is not None else []
    if exitstatus == pytest.ExitCode.OK and len(repeated) > MOST_RERUNS:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, object, object]:
    """Escape lone surrogates in what a test logged: a report with one cannot leave a process of ``-n 2``."""
    return _without_surrogates((yield))


def _without_surrogates(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_without_surrogates, value))
    return value


@pytest.fixture(autouse=True)
def leases_expire_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else needs time to renew leases on the server of a test, which has just started."""
    monkeypatch.setattr(claims, "RENEWAL_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def log_writers_end_with_their_test() -> Iterator[None]:
    """Undo what a command set up in this process: its stream is closed with the test."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
    for handler in [handler for handler in root.handlers if isinstance(handler, LogWriter)]:
        root.removeHandler(handler)
        handler.close()


@pytest.fixture(scope="session")
def mongo_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URI of an embedded server that lives as long as the test session; its data are in memory.

    ``AGENTRL_TEST_MONGODB`` names another one, for tests of the core where the wing ``local`` is not there.
    """
    if given := os.environ.get("AGENTRL_TEST_MONGODB"):
        _forget_dropped_data_soon(given)
        yield given
        return
    from agentrl.local.mongod import EmbeddedMongo

    with memory_folder(tmp_path_factory.mktemp("mongo")) as folder:
        mongo = EmbeddedMongo(folder / "mongo")
        try:
            uri = mongo.up().uri
            _forget_dropped_data_soon(uri)
            yield uri
        finally:
            mongo.down()


def _forget_dropped_data_soon(uri: str) -> None:
    """Close the files of dropped databases after 5 s instead of 5 min: hundreds of tests drop 40 each."""
    with MongoClient[dict[str, object]](uri) as client:
        client.admin.command("setParameter", 1, minSnapshotHistoryWindowInSeconds=5)


@pytest.fixture
def short_transactions(mongo_uri: str) -> Iterator[None]:
    """What a killed or paused process holds in a transaction is free after 2 s instead of 15."""
    limit = "transactionLifetimeLimitSeconds"
    with MongoClient[dict[str, object]](mongo_uri) as client:
        before = client.admin.command("getParameter", 1, **{limit: 1})[limit]
        client.admin.command("setParameter", 1, **{limit: 2})
        yield
        client.admin.command("setParameter", 1, **{limit: before})


@pytest.fixture(scope="session")
def drop_later(mongo_uri: str) -> Iterator[Callable[[str], object]]:
    """Drop a database while tests go on: the server takes 0.1 s for it and hardly works."""
    client: MongoClient[dict[str, object]]
    with MongoClient(mongo_uri) as client, ThreadPoolExecutor(1) as pool:
        dropped: list[Future[None]] = []
        yield lambda name: dropped.append(pool.submit(client.drop_database, name))
        for future in dropped:
            future.result(60)


@pytest.fixture(scope="session", autouse=True)
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the test run, the same in all processes of ``-n 2``."""
    base = tmp_path_factory.getbasetemp()
    warm_python_module.shared[:] = [base.parent if "PYTEST_XDIST_WORKER" in os.environ else base]
    return warm_python_module.shared[0]


@pytest.fixture(scope="session")
def warm_python(shared_folder: Path) -> Path:
    """A ``python`` that starts in 0.1 s, for tests of commands as a person enters them."""
    return warm_python_module.warm_python()


@pytest.fixture(scope="module")
def starts_warm(warm_python: Path) -> Iterator[None]:
    """Let the file's tests start engines and commands by ``warm_python``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(warm_python))
        yield


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
async def store(run_config: RunConfig, drop_later: Callable[[str], object]) -> AsyncIterator[Store]:
    """The run's store; its database is dropped afterwards."""
    async with await open_store(run_config) as opened:
        yield opened
    drop_later(run_config.run_name)
