"""Runs the processes of ``scripts/grpo.sh`` and its like: database, tools, engine, samplers, trainer.

    python -m agentrl.cli.launch train --run_name NAME [--flag VALUE …]
    python -m agentrl.cli.launch eval --run_name NAME [--flag VALUE …]

``scripts/lib/run.sh`` describes the environment variables. A process that crashes is started again; one
that ends because of its configuration ends the others, and its reason is printed.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.cli.main import run as run_command
from agentrl.config.load import Configs, parse
from agentrl.config.schema import AgentConfig, ModelConfig, RunConfig, TaskConfig
from agentrl.documents.task_file import read_tasks
from agentrl.errors import ConfigError
from agentrl.quickstart.smollm import prepare_smollm
from agentrl.store.embedded.server import EmbeddedMongo
from agentrl.supervise import Member, StoppedBySignalError, Supervisor, stop_on_signals
from agentrl.tools.config import HttpSpec, ManagerSpec, ServerSpec, load_servers

SERVERS_FILE = Path("assets/mcp_servers.yml")
ROLES = ("serve", "sample", "train")
_DEMO_TOOLS = ("units", 8765)
"""The server of ``SERVERS_FILE`` that somebody has to start, and its port."""

_CONNECT_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What this machine runs. ``main`` is None where it has neither trainer nor evaluation."""

    run_name: str
    logs: Path
    flags: Sequence[str]
    engine: str
    engines: int
    samplers: int
    main: Sequence[str] | None
    tool_server: Sequence[str] | None


def main(argv: list[str]) -> int:
    """Prepare the model and the database, then run the processes until the main one ends."""
    try:
        with stop_on_signals():
            return _launch(argv)
    except StoppedBySignalError as stopped:
        return stopped.exit_code


def _launch(argv: list[str]) -> int:
    command, variables = argv[0], os.environ
    flags = [*_flags_of_variables(variables), *argv[1:]]
    configs = parse(flags, command=f"agentrl {command}", description="", shown=())
    run = configs[RunConfig]
    roles = _roles(variables) if command == "train" else {"serve", "eval"}
    is_demo = not variables.get("MODEL_PATH")
    servers = _default_servers(configs, is_demo=is_demo) if roles & {"sample", "eval"} else None
    if servers is not None:
        flags = ["--mcp_servers_file", str(SERVERS_FILE), *flags]
    if is_demo and configs[ModelConfig].model_name_or_path is None:
        model = prepare_smollm(lambda text: _say(run.run_name, text))
        flags = ["--model_name_or_path", str(model), *flags]
    if run.db_connection_string is None:
        _start_database(run)
    return _run(
        Plan(
            run_name=run.run_name,
            logs=Path(run.log_dir),
            flags=flags,
            engine=variables.get("ENGINE") or "local",
            engines=int("serve" in roles),
            samplers=int(variables.get("SAMPLERS") or "2") if "sample" in roles else 0,
            main=_main_command(command, flags, variables) if command in roles else None,
            tool_server=_demo_server(servers or ()),
        )
    )


def _run(plan: Plan) -> int:
    supervisor = Supervisor(lambda text: _say(plan.run_name, text))

    def start(name: str, command: Sequence[str], *, serves: bool = False) -> None:
        member = Member(name, command, plan.logs / f"{name}.out", _environment(), serves)
        supervisor.start(member)
        pid = member.process.pid if member.process else None
        _say(plan.run_name, f"{name} started (pid {pid}, {member.log})")

    try:
        if plan.tool_server is not None:
            start("units-server", plan.tool_server, serves=True)
        if plan.engines:
            start("engine", _agentrl("serve", [*plan.flags, "--engine", plan.engine]), serves=True)
        for index in range(plan.samplers):
            start(f"sampler-{index}", _agentrl("sample", plan.flags))
        if plan.main is not None:
            return supervisor.run_main(Member("main", plan.main, None, _environment()), deadline=float("inf"))
        supervisor.run_helpers()
        return 0
    except StoppedBySignalError:
        _say(plan.run_name, "stopping; the same command goes on from here")
        raise
    finally:
        supervisor.stop()


def _flags_of_variables(variables: Mapping[str, str]) -> list[str]:
    """The flags that environment variables stand for; flags of the command line come after them and win."""
    named = {
        "--model_name_or_path": "MODEL_PATH",
        "--db_connection_string": "MONGO_URI",
        "--mcp_manager_url": "MCP_MANAGER_URL",
        "--agent_config_path": "AGENT_CONFIG",
    }
    if not variables.get("MCP_MANAGER_URL"):
        named["--mcp_servers_file"] = "MCP_SERVERS_FILE"
    return [
        word
        for flag, variable in named.items()
        if variables.get(variable)
        for word in (flag, variables[variable])
    ]


def _roles(variables: Mapping[str, str]) -> set[str]:
    roles = set((variables.get("ROLES") or " ".join(ROLES)).split())
    unknown = sorted(roles - set(ROLES))
    if unknown:
        raise ConfigError(f"ROLES names {', '.join(unknown)}", hint=f"choose among: {', '.join(ROLES)}")
    return roles


def _default_servers(configs: Configs, *, is_demo: bool) -> list[ServerSpec] | None:
    """The tool servers of ``SERVERS_FILE`` where the tasks name some of them; None: the file is not used.

    Raises ConfigError where the tasks name a server that is not configured, and TaskFileError.
    """
    agent, tasks = configs[AgentConfig], configs[TaskConfig]
    path = tasks.eval_file or tasks.train_file
    if agent.mcp_servers_file or agent.mcp_manager_url or path is None:
        return None
    read = read_tasks(path, shuffle=False, skip_bad_lines=tasks.skip_bad_lines)
    named = {tool for task in read.tasks for tool in task.tools or ()}
    if not named and not is_demo:
        return None
    servers = load_servers(SERVERS_FILE)
    missing = sorted(named - {server.name for server in servers if not isinstance(server, ManagerSpec)})
    if missing:
        raise ConfigError(
            f"tasks of {path} name the tool servers {', '.join(missing)}, and none is configured",
            hint="export MCP_SERVERS_FILE=FILE.yml or MCP_MANAGER_URL=URL",
        )
    return servers


def _demo_server(servers: Sequence[ServerSpec]) -> list[str] | None:
    """The command of the demo's HTTP tool server, where it is used and nothing listens on its port yet."""
    name, port = _DEMO_TOOLS
    url = f"http://127.0.0.1:{port}/mcp"
    if not any(isinstance(each, HttpSpec) and (each.name, each.url) == (name, url) for each in servers):
        return None
    with socket.socket() as probe:
        probe.settimeout(_CONNECT_SECONDS)
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            return None
    return [sys.executable, "-m", f"agentrl.quickstart.servers.{name}", "--port", str(port)]


def _start_database(run: RunConfig) -> None:
    mongo = EmbeddedMongo(run.mongo_dir)
    was_running = mongo.status().running
    mongo.up()
    if not was_running:
        _say(
            run.run_name, f"MongoDB started (data in {run.mongo_dir}); it stays up until: agentrl mongo down"
        )


def _main_command(command: str, flags: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    config = variables.get("ACCELERATE_CONFIG")
    if command == "eval" or not config:
        return _agentrl(command, flags)
    accelerate = Path(sys.executable).with_name("accelerate")
    return [str(accelerate), "launch", "--config_file", config, "-m", "agentrl.train", *flags]


def _agentrl(command: str, flags: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "agentrl", command, *flags]


def _environment() -> dict[str, str]:
    """Few threads a process: with more than there are cores, OpenMP's spinning starves everybody."""
    return {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "TOKENIZERS_PARALLELISM": "false", **os.environ}


def _say(run_name: str, text: str) -> None:
    print(f"{run_name}: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:]), "agentrl launch"))
