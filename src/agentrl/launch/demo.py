"""The demonstration: its model, which ``assets/demo`` makes, and its tool servers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.config.load import Configs
from agentrl.config.schema import TaskConfig, ToolConfig
from agentrl.documents.task_rows import TaskRows
from agentrl.environments.tasks import is_address, read_task_source
from agentrl.errors import ConfigError, ModelError
from agentrl.extras import require
from agentrl.processes import free_port, run_child
from agentrl.shipped_files import shipped_files
from agentrl.tools.config import load_servers
from agentrl.tools.specs import McpSpec

SERVERS_FILE = shipped_files() / "mcp_servers.yml"
_MODELS = Path(".agentrl/models")
_MODEL_SECONDS = 2100.0
_UNITS_PORT, _UNITS_PORT_VARIABLE = 8765, "AGENTRL_UNITS_PORT"
"""The HTTP server of ``SERVERS_FILE``: its port, and the variable that names another one."""


def demo_model(seed: int | None = None) -> Path:
    """Return the folder of SmolLM2-135M, or of a two-layer model with ``seed``; make it if it is missing.

    A child process makes it, so that the caller does not keep torch in memory. Raises ModelError.
    """
    require("torch", "the demonstration's model", extra="quickstart")
    folder = _MODELS / ("SmolLM2-135M-Instruct" if seed is None else f"tiny-seed{seed}")
    words = ["demo/smollm.py", str(folder)] if seed is None else ["demo/tiny.py", "--warmed", str(seed)]
    try:
        code = run_child(
            [sys.executable, "-m", "agentrl.shipped_files", *words],
            log=None,
            env={**os.environ, "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            seconds=_MODEL_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"{folder} was not made within {error.timeout:g} s", hint="try again") from error
    if code != 0:
        raise ModelError(
            f"{folder} was not made (exit code {code}); see the error above",
            hint="fix it and run this again; finished steps are not lost",
        )
    return folder


def default_servers(configs: Configs, *, is_demo: bool) -> Sequence[McpSpec] | None:
    """Return the tool servers of ``SERVERS_FILE`` if the run uses that file, else None.

    It is used by the demonstration, and if the tasks name tools that no path of ``--tools`` ends with, and no
    other servers are configured. Raises ConfigError if the tasks name a server that the file does not
    configure, and TaskFileError.
    """
    tools, tasks = configs[ToolConfig], configs[TaskConfig]
    path = tasks.eval_file or tasks.train_file
    configured = tools.mcp_servers_file or tools.mcp_manager_url or tools.tool_config_path
    if configured or path is None or is_address(path):
        return None
    rows = TaskRows.parse(tasks.task_preset, tasks.task_fields)
    read = read_task_source(path, shuffle=False, skip_bad_lines=tasks.skip_bad_lines, rows=rows)
    own = {name.strip().rpartition(":")[2] for name in tools.tools.split(",")}
    named = {tool for task in read.tasks for tool in task.tools or ()} - own
    if not named and not is_demo:
        return None
    servers = load_servers(SERVERS_FILE)
    missing = sorted(named - {server.name for server in servers})
    if missing:
        raise ConfigError(
            f"tasks of {path} name the tools {', '.join(missing)}, and none of --tools or of the tool servers"
            " is called so",
            hint="--tools module:name for a function of your own; for an MCP server export"
            " MCP_SERVERS_FILE=FILE.yml or MCP_MANAGER_URL=URL",
        )
    return servers


def units_server() -> tuple[list[str], dict[str, str]]:
    """Return the command of the demonstration's HTTP tool server, and the variable that tells its port."""
    chosen = str(free_port(_UNITS_PORT))
    command = [sys.executable, "-m", "agentrl.shipped_files", "demo/units.py", "--port", chosen]
    return command, {_UNITS_PORT_VARIABLE: chosen}
