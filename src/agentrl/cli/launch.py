"""Run the processes of ``scripts/grpo.sh`` and the other run scripts: database, engine, samplers, trainer.

    python -m agentrl.cli.launch train --run_name NAME [--flag VALUE …]
    python -m agentrl.cli.launch eval --run_name NAME [--flag VALUE …]

``scripts/lib/run.sh`` describes the environment variables. A process that crashes is restarted. If one ends
because of its configuration, the reason is printed and the others are stopped.
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
from agentrl.config.run import without_uri
from agentrl.config.schema import EvaluationConfig, ModelConfig, RunConfig, TaskConfig, ToolConfig
from agentrl.documents.task_file import read_tasks
from agentrl.environments.tasks import is_address
from agentrl.errors import ConfigError
from agentrl.processes import thread_limits
from agentrl.quickstart.smollm import prepare_smollm
from agentrl.store.embedded.server import EmbeddedMongo
from agentrl.supervise import StoppedBySignalError, SupervisedProcess, Supervisor, stop_on_signals
from agentrl.tools.config import load_servers
from agentrl.tools.specs import HttpSpec, ManagerSpec, ServerSpec

SERVERS_FILE = Path("assets/mcp_servers.yml")
ROLES = ("serve", "sample", "train")
_DEMO_TOOLS = ("units", 8765)
"""The HTTP server of ``SERVERS_FILE``, which has to be started, and its port."""

_CONNECT_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The processes of this machine. ``main`` is None if it runs neither the trainer nor an evaluation."""

    run_name: str
    logs: Path
    flags: Sequence[str]
    engine: str
    engines: int
    samplers: int
    main: Sequence[str] | None
    follows: bool
    """Whether versions are evaluated while they are trained."""
    tool_server: Sequence[str] | None


_COMMANDS = ("train", "eval")


def main(argv: list[str]) -> int:
    """Prepare the model and the database, then run the processes until the main one ends."""
    try:
        with stop_on_signals():
            return _launch(argv)
    except StoppedBySignalError as stopped:
        return stopped.exit_code


def _launch(argv: list[str]) -> int:
    command, variables = (argv or [""])[0], os.environ
    if command not in _COMMANDS:
        raise ConfigError(
            f"unknown command {command!r}; choose one of {', '.join(_COMMANDS)}",
            hint="scripts/grpo.sh, minirl.sh and eval.sh start this module",
        )
    flags = [*_flags_of_variables(variables), *argv[1:]]
    configs = parse(flags, command=f"agentrl {command}", description="", shown=())
    run = configs[RunConfig]
    roles = _roles(variables) if command == "train" else {"serve", "eval"}
    if command == "eval" and configs.given & {"eval_engine", "eval_model"}:
        roles = {"eval"}
    elif command == "eval":
        flags = ["--eval_engine", "shared", *flags]
    is_demo = not variables.get("MODEL_PATH")
    servers = _default_servers(configs, is_demo=is_demo) if roles & {"sample", "eval"} else None
    if servers is not None:
        flags = ["--mcp_servers_file", str(SERVERS_FILE), *flags]
    if is_demo and configs[ModelConfig].model_name_or_path is None:
        model = prepare_smollm(lambda text: _report(run.run_name, text))
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
            follows=command == "train" and configs[EvaluationConfig].eval_steps is not None,
            tool_server=_demo_server(servers or ()),
        )
    )


def _run(plan: Plan) -> int:
    supervisor = Supervisor(lambda text: _report(plan.run_name, text))

    def start(name: str, command: Sequence[str], *, is_server: bool = False) -> None:
        log = plan.logs / f"{name}.out"
        environment = without_uri(_environment()) if name == "units-server" else _environment()
        member = SupervisedProcess(name, command, log, environment, is_server=is_server)
        supervisor.start(member)
        _report(plan.run_name, f"{name} started (pid {member.pid}, {log})")

    try:
        if plan.tool_server is not None:
            start("units-server", plan.tool_server, is_server=True)
        if plan.engines:
            start("engine", _agentrl("serve", [*plan.flags, "--engine", plan.engine]), is_server=True)
        for index in range(plan.samplers):
            start(f"sampler-{index}", _agentrl("sample", plan.flags))
        if plan.follows:
            start("evaluation", _agentrl("eval", plan.flags))
        if plan.main is not None:
            main = SupervisedProcess("main", plan.main, None, _environment())
            return supervisor.run_main(main, deadline=float("inf"))
        supervisor.run_helpers()
        return 0
    except StoppedBySignalError:
        _report(plan.run_name, "stopping; the same command resumes")
        raise
    finally:
        supervisor.stop()


def _flags_of_variables(variables: Mapping[str, str]) -> list[str]:
    """Return the flags that the environment variables set; later flags of the command line override them.

    MONGO_URI and MONGO_URI_FILE are left to the processes, so that no password is in a command line.
    """
    named = {
        "--model_name_or_path": "MODEL_PATH",
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
    """Return the tool servers of ``SERVERS_FILE`` if the run uses that file, else None.

    It is used by the demo, and if the tasks name tools and no other servers are configured. Raises
    ConfigError if the tasks name a server that the file does not configure, and TaskFileError.
    """
    tools, tasks = configs[ToolConfig], configs[TaskConfig]
    path = tasks.eval_file or tasks.train_file
    if (
        tools.mcp_servers_file
        or tools.mcp_manager_url
        or tools.tool_config_path
        or path is None
        or is_address(path)
    ):
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
    """Return the command of the demo's HTTP tool server; None if it is not used or already runs."""
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
        _report(run.run_name, f"MongoDB started (data in {run.mongo_dir}); stop it with: agentrl mongo down")


def _main_command(command: str, flags: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    config = variables.get("ACCELERATE_CONFIG")
    if command == "eval" or not config:
        return _agentrl(command, flags)
    accelerate = Path(sys.executable).with_name("accelerate")
    return [str(accelerate), "launch", "--config_file", config, "-m", "agentrl.train", *flags]


def _agentrl(command: str, flags: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "agentrl", command, *flags]


def _environment() -> dict[str, str]:
    return {**thread_limits(), **os.environ}


def _report(run_name: str, text: str) -> None:
    print(f"{run_name}: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:]), "agentrl launch"))
