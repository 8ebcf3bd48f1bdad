"""A gateway whose HTTP server does not start says so, instead of an anonymous timeout."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette

from agentrl.config.sampling import GatewayConfig
from agentrl.errors import AgentRLError
from agentrl.gateway import app
from agentrl.gateway.app import GatewayServer


def server() -> GatewayServer:
    app: Any = SimpleNamespace(app=Starlette)
    return GatewayServer(app, GatewayConfig(gateway_port=0))


async def test_the_error_of_a_server_that_ends_at_once_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def startup(self: Any, sockets: Any = None) -> None:
        raise OSError("no descriptors")

    monkeypatch.setattr(app._Server, "startup", startup)
    with pytest.raises(OSError, match="no descriptors"):
        await asyncio.wait_for(server().start(), 10)


async def test_a_server_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def startup(self: Any, sockets: Any = None) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(app._Server, "startup", startup)
    monkeypatch.setattr(app, "_START_SECONDS", 0.01)
    monkeypatch.setattr(app, "_STOP_SECONDS", 0.01)
    with pytest.raises(AgentRLError, match="has not started within"):
        await server().start()


async def test_a_server_starts_and_ends() -> None:
    gateway = server()
    await gateway.start()
    assert gateway.url.startswith("http://")
    await gateway.close()
