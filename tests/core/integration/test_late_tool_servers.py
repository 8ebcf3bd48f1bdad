"""Samplers that start while a tool server is down, with a real database and a real server."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from test_sampling import Setting, quick, task, until

from agentrl.columns import outages
from agentrl.config.schema import SamplingConfig, ToolConfig
from agentrl.documents.status import SlotStatus, TaskStatus
from agentrl.errors import ConfigError, ToolServerError
from agentrl.rollout.preflight import probe
from agentrl.store.client import Store
from agentrl.tools.mcp import server
from agentrl.tools.pool import ToolPool

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("starts_warm")]
__all__ = ["quick"]

SERVER = str(Path(__file__).parent / "servers" / "misbehaving_server.py")


@pytest.fixture(autouse=True)
def probe_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "RECONNECT_DELAYS", (0.0,))
    monkeypatch.setattr(server, "_MAX_BACKOFF_SECONDS", 0.1)
    monkeypatch.setattr(outages, "FIRST_PROBE_SECONDS", 0.1)
    monkeypatch.setattr(outages, "LONGEST_PROBE_SECONDS", 0.2)
    monkeypatch.setattr(outages, "REPORT_SECONDS", 0.1)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def pool(port: int, tmp_path: Path) -> ToolPool:
    """A pool with one server that is down, and one that is up."""
    url = f"http://127.0.0.1:{port}/mcp"
    local = {"command": "python", "args": [SERVER, "stdio"], "scope": "shared"}
    file = tmp_path / "servers.yml"
    file.write_text(yaml.safe_dump({"servers": {"late": {"url": url}, "local": local}}))
    return ToolPool(ToolConfig(mcp_servers_file=str(file)))


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait(10)


def setting_of(store: Store, pool: ToolPool, **sampling: float) -> Setting:
    config = SamplingConfig(**sampling)
    return Setting(store, "<answer>3</answer>", claims={"max_attempts": 1}, tools=pool, sampling=config)


def start(port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)


async def test_a_server_that_is_down_at_the_start_holds_only_what_needs_it(
    store: Store, pool: ToolPool, port: int, processes: list[subprocess.Popen[bytes]]
) -> None:
    named = {"late": ("late",), "all": None, "local": ("local",), "none": ()}
    await store.tasks.load([task(name, slots=1, tools=tools) for name, tools in named.items()])
    await pool.open_reachable()
    setting = setting_of(store, pool)
    running = asyncio.create_task(setting.run())

    async def others_are_done() -> bool:
        counts = await store.tasks.counts("train")
        return counts.get(TaskStatus.COMPLETED) == 2 and bool(await store.outages.ongoing())

    try:
        await until(others_are_done)
        (outage,) = await store.outages.ongoing()
        assert outage.dependency == "tool server late"
        assert "cannot be reached" in outage.why
        for name in ("late", "all"):
            held = await store.tasks.get(f"train/0/{name}")
            assert held is not None
            assert (held.status, held.slots[0].attempt) == (TaskStatus.CREATED, 0)
        processes.append(start(port))
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await pool.close()
    for name in named:
        (record,) = await setting.records(f"train/0/{name}")
        assert (record.attempt, record.failure) == (1, None)
    assert await store.outages.ongoing() == []
    (past,) = await store.outages.past(5)
    assert past.dependency == "tool server late"


async def test_a_sampler_that_can_do_nothing_without_the_server_gives_up_in_time(
    store: Store, pool: ToolPool
) -> None:
    await store.tasks.load([task("late", slots=1, tools=("late",))])
    await pool.open_reachable()
    setting = setting_of(store, pool, outage_wait_seconds=0.2)
    with pytest.raises(ToolServerError, match=r"nothing could be claimed for 0\.2 s: tool server late"):
        await setting.run()
    await pool.close()
    held = await store.tasks.get("train/0/late")
    assert held is not None
    assert (held.slots[0].status, held.slots[0].attempt) == (SlotStatus.OPEN, 0)


async def test_a_server_that_no_configuration_names_is_an_error_at_once(store: Store, pool: ToolPool) -> None:
    await store.tasks.load([task("late", tools=("late",)), task("nowhere", tools=("nowhere",))])
    await pool.open_reachable()
    sampling = setting_of(store, pool).worker.sampling
    with pytest.raises(ConfigError, match="unknown tool server nowhere"):
        await probe(store, pool, sampling, "train")
    await pool.close()
