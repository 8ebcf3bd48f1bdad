"""Check the services of a run: database, judge, browse agent, tool servers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentrl.cli.doctor.check import Check
from agentrl.config.schema import RunConfig, SamplingConfig, ToolConfig
from agentrl.errors import AgentRLError
from agentrl.observe.redact import redact

_TOOLS_SECONDS = 60.0


def check_mongod(run: RunConfig) -> Check:
    """Check for the binary of the embedded server, which a run without --db_connection_string needs."""
    from agentrl.store.embedded.daemon import find_binary

    name = "mongod"
    try:
        return Check(name, "ok", str(find_binary()))
    except AgentRLError as error:
        if run.db_connection_string:
            return Check(name, "ok", "not installed; --db_connection_string is given")
        return Check(name, "fail", error.message, error.hint or "bash scripts/setup.sh")


async def check_database(run: RunConfig) -> Check:
    """Check that the database answers, or, without a URI, that the embedded one can be started.

    Creates nothing.
    """
    from agentrl.store.client import run_exists

    name = "database"
    try:
        state = "has the run" if await run_exists(run) else "has no run of that name yet"
        where = redact(run.db_connection_string or f"embedded, in {run.mongo_dir}")
        return Check(name, "ok", f"{where}: {state} {run.run_name}")
    except AgentRLError as error:
        return Check(
            name,
            "fail" if run.db_connection_string else "warn",
            redact(error.message),
            error.hint or "agentrl mongo up",
        )


def check_agent_config(config: SamplingConfig) -> Check:
    """Check the endpoints of the judge, which some scorers need, and of the browse agent, if it is on."""
    from agentrl.llm.agent_config import load_section
    from agentrl.tools.browse import open_browse_agent

    name, path = "agent config", config.agent_config_path
    try:
        section = load_section(path, "scorer_agent")
        browse = open_browse_agent(path)
    except AgentRLError as error:
        found = f"{error.message}; tasks with scorer agentcpm or rubric need it"
        return Check(name, "fail" if Path(path).exists() else "warn", found, error.hint or "")
    found = f"{path}: judge {', '.join(endpoint.model for endpoint in section.models)}"
    if browse is not None:
        found += f"; browse agent {', '.join(endpoint.model for endpoint in browse.section.models)}"
    return Check(name, "ok", found)


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
