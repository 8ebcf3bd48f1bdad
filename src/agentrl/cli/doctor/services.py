"""Check the services of a run: mongod, engines, judge, browse agent, tool servers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.cli.doctor.check import Check
from agentrl.config.schema import RunConfig, SamplingConfig, ToolConfig
from agentrl.errors import AgentRLError, StoreUnavailableError
from agentrl.observe.redact import redact

if TYPE_CHECKING:
    from agentrl.documents.run import InferenceService

_TOOLS_SECONDS = 60.0
_REACH_SECONDS = 3.0


def check_mongod(run: RunConfig) -> Check:
    """Check for the binary of the embedded server, which a run without --db_connection_string needs."""
    from agentrl.store.embedded.mongod import choose_mongod

    name = "mongod"
    try:
        return Check(name, "ok", str(choose_mongod().mongod))
    except AgentRLError as error:
        if run.db_connection_string:
            return Check(name, "ok", "not installed; --db_connection_string is given")
        return Check(name, "fail", error.message, error.hint or "")


async def service_checks(run: RunConfig, alive_seconds: float) -> list[Check]:
    """Check the run and each of its live engines; empty if the database cannot be reached."""
    from agentrl.store.client import open_existing, run_exists

    name = f"run {run.run_name}"
    try:
        if not await run_exists(run):
            return [Check(name, "ok", "not created yet")]
        async with await open_existing(run) as store:
            engines = await store.services.live(alive_seconds)
    except StoreUnavailableError:
        return []
    except AgentRLError as error:
        return [Check(name, "fail", redact(error.message), error.hint or "")]
    if not engines:
        return [Check(name, "ok", "exists; no engine is alive (`agentrl serve` starts one)")]
    answers = await asyncio.gather(*(_answers(engine.url) for engine in engines))
    return [Check(name, "ok", f"exists, with {len(engines)} live engines")] + [
        _engine_check(engine, problem) for engine, problem in zip(engines, answers, strict=True)
    ]


def _engine_check(engine: InferenceService, problem: str | None) -> Check:
    name = f"engine {engine.url}"
    if problem is None:
        return Check(name, "ok", f"{engine.engine} answers, version {engine.policy_version}")
    hint = "open its port to this machine, or give `agentrl serve` a --host that samplers reach"
    return Check(name, "fail", f"sends heartbeats, and does not answer here: {problem}", hint)


async def _answers(url: str) -> str | None:
    """Return why ``url`` cannot be reached; None if it answers, with whatever status."""
    import httpx

    try:
        async with httpx.AsyncClient(timeout=_REACH_SECONDS) as client:
            await client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return type(error).__name__
    return None


async def check_agent_config(config: SamplingConfig) -> Check:
    """Check the judge, which some scorers need, and the browse agent, if it is on: that they answer."""
    from agentrl.llm.agent_config import load_judge
    from agentrl.tools.browse import open_browse_agent

    name, path = "agent config", config.agent_config_path
    try:
        section = load_judge(path)
        browse = open_browse_agent(path)
    except AgentRLError as error:
        found = f"{error.message}; tasks with scorer agentcpm or rubric need it"
        return Check(name, "fail" if _exists(path) else "warn", found, error.hint or "")
    found = f"{path}: judge {', '.join(endpoint.model for endpoint in section.models)}"
    endpoints = list(section.models)
    if browse is not None:
        found += f"; browse agent {', '.join(endpoint.model for endpoint in browse.section.models)}"
        endpoints += browse.section.models
    answers = await asyncio.gather(*(_answers(endpoint.base_url) for endpoint in endpoints))
    silent = [
        f"{endpoint.model} at {redact(endpoint.base_url)} ({problem})"
        for endpoint, problem in zip(endpoints, answers, strict=True)
        if problem is not None
    ]
    if silent:
        hint = f"start it, or correct its base_url in {path}"
        return Check(name, "fail", f"no answer from {', '.join(silent)}", hint)
    return Check(name, "ok", found)


def _exists(path: str) -> bool:
    return Path(path).exists()


async def check_tools(config: ToolConfig) -> Check:
    """Connect to the configured tool servers and list their tools."""
    from agentrl.tools.pool import ToolPool

    name = "tool servers"
    if not (config.mcp_servers_file or config.mcp_manager_url or config.tools):
        return Check(name, "ok", "not checked: give --mcp_servers_file, --mcp_manager_url or --tools")
    try:
        async with asyncio.timeout(_TOOLS_SECONDS), ToolPool(config) as pool:
            schemas = pool.list()
            return Check(name, "ok", f"{', '.join(pool.servers)}: {len(schemas)} tools")
    except TimeoutError:
        hint = "start the servers' commands by hand to see their errors"
        return Check(name, "fail", f"no answer within {_TOOLS_SECONDS:.0f} s", hint)
    except AgentRLError as error:
        return Check(
            name, "fail", redact(error.message), error.hint or "start the server, or correct its entry"
        )
