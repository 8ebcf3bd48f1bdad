"""Configure the five public servers, and the misbehaving one over stdio and HTTP."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MISBEHAVING = str(Path(__file__).parents[1] / "core" / "integration" / "servers" / "misbehaving_server.py")
_START_SECONDS = 30.0


def public_servers() -> dict[str, Any]:
    """Return the entries of the five servers: three keep state, two are shared."""
    folder = Path(os.environ["AGENTRL_MCP_SERVERS"])
    npm, python = folder / "node_modules" / ".bin", folder / "venv" / "bin"
    return {
        "everything": {
            "command": str(npm / "mcp-server-everything"),
            "args": ["stdio"],
            "scope": "shared",
            "resources": True,
            "prompts": True,
        },
        "files": {"command": str(npm / "mcp-server-filesystem"), "args": ["${workdir}"]},
        "memory": {
            "command": str(npm / "mcp-server-memory"),
            "env": {"MEMORY_FILE_PATH": "${workdir}/memory.json"},
        },
        "sqlite": {"command": str(python / "mcp-server-sqlite"), "args": ["--db-path", "${workdir}/data.db"]},
        "time": {"command": str(python / "mcp-server-time"), "scope": "shared"},
    }


def misbehaving_servers(port: int) -> dict[str, Any]:
    """Return the entries of the misbehaving server: a process each, and shared over HTTP."""
    url = f"http://127.0.0.1:{port}"
    limits = {"timeout_seconds": 120, "max_seconds": 240}
    return {
        "misbehaving": {
            "command": sys.executable,
            "args": [MISBEHAVING, "stdio"],
            "limits": limits,
            "tools": {"hang": {"timeout_seconds": 1}},
        },
        "web": {"url": f"{url}/mcp", "limits": limits, "offer": ["meta", "huge"]},
        "busy": {"url": f"{url}/busy", "limits": limits, "offer": ["read"]},
        "garbled": {"url": f"{url}/garbage", "limits": limits, "offer": ["pid"]},
    }


@contextmanager
def misbehaving_web() -> Iterator[int]:
    """Run the misbehaving server over HTTP and yield its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = subprocess.Popen([sys.executable, MISBEHAVING, str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    yield port
                    return
            time.sleep(0.05)
        raise TimeoutError(f"the HTTP server did not start within {_START_SECONDS:g} s")
    finally:
        process.kill()
        process.wait()
