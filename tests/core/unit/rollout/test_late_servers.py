"""Tool servers that are down when a sampler starts are probed until they answer, and checked before use."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from waiting import until

from agentrl.columns import outages
from agentrl.columns.outages import Outages
from agentrl.errors import ConfigError, ToolServerConfigError, ToolServerError, tool_server
from agentrl.rollout.sampler import LateServers
from agentrl.store.claims import NOTHING, Needs


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "FIRST_PROBE_SECONDS", 0.01)
    monkeypatch.setattr(outages, "LONGEST_PROBE_SECONDS", 0.02)


class Source:
    """A manager that is down, and one of its servers, which comes up later than the manager."""

    def __init__(self) -> None:
        self.errors = {"all": ToolServerError("manager down", outage=tool_server("all"))}
        self.is_up: set[str] = set()
        self.known: frozenset[str] | None = frozenset({"calc"})
        self.tried: list[str] = []
        self.raised: Exception | None = None

    @property
    def down(self) -> Mapping[str, ToolServerError]:
        return dict(self.errors)

    async def connect(self, name: str) -> None:
        self.tried.append(name)
        if self.raised is not None:
            raise self.raised
        if name not in self.is_up:
            raise self.errors[name]
        del self.errors[name]
        if name == "all":
            self.known = None
            self.errors["search"] = ToolServerError("search down", outage=tool_server("search"))


async def nothing() -> None:
    """Any task may use the new server."""


async def test_a_manager_and_then_its_server_are_outages_until_they_answer() -> None:
    source, outages = Source(), Outages()
    late = LateServers(source, outages, 60.0)
    late.begin()
    assert outages.needs_down() == Needs(frozenset({"all"}), known=frozenset({"calc"}))
    assert [item.why for item in outages.open] == ["manager down"]
    running = asyncio.create_task(late.run(nothing, lambda: False))
    await until(lambda: source.tried.count("all") >= 3)
    assert outages.needs_down() == Needs(frozenset({"all"}), known=frozenset({"calc"}))
    source.is_up.add("all")
    await until(lambda: source.tried.count("search") >= 2)
    assert outages.needs_down() == Needs(frozenset({"search"}))
    source.is_up.add("search")
    await asyncio.wait_for(running, 20)
    assert outages.needs_down() == NOTHING
    assert outages.open == []
    outages.close()


async def test_nothing_is_claimed_before_the_names_in_tasks_are_checked() -> None:
    source, outages = Source(), Outages()
    source.is_up.add("all")
    late = LateServers(source, outages, 60.0)
    late.begin()

    async def check() -> None:
        assert "all" in outages.needs_down().servers
        raise ConfigError("unknown tool server nowhere")

    with pytest.raises(ConfigError, match="nowhere"):
        await asyncio.wait_for(late.run(check, lambda: True), 20)
    outages.close()


@pytest.mark.parametrize("has_claimed", [False, True])
async def test_a_sampler_that_can_claim_nothing_gives_up_after_a_while(has_claimed: bool) -> None:
    source, outages = Source(), Outages()
    late = LateServers(source, outages, 0.05)
    late.begin()
    running = asyncio.create_task(late.run(nothing, lambda: has_claimed))
    await asyncio.wait([running], timeout=0.3 if has_claimed else 20)
    assert running.done() is not has_claimed
    if has_claimed:
        running.cancel()
    else:
        with pytest.raises(ToolServerError, match=r"nothing could be claimed for 0\.05 s: manager down"):
            running.result()
    await asyncio.gather(running, return_exceptions=True)
    outages.close()


async def test_a_wrong_configuration_that_shows_late_ends_the_sampler() -> None:
    source, outages = Source(), Outages()
    source.raised = ToolServerConfigError("two tool servers are named 'calc'")
    late = LateServers(source, outages, 60.0)
    late.begin()
    with pytest.raises(ToolServerConfigError, match="two tool servers"):
        await asyncio.wait_for(late.run(nothing, lambda: True), 20)
    outages.close()


async def test_without_servers_that_are_down_there_is_nothing_to_do() -> None:
    source, outages = Source(), Outages()
    source.errors.clear()
    source.known = None
    late = LateServers(source, outages, 0.01)
    late.begin()
    await asyncio.wait_for(late.run(nothing, lambda: False), 20)
    assert outages.needs_down() == NOTHING
