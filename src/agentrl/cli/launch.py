"""``agentrl launch``: run the processes of a run on this machine: database, engines, samplers, trainer.

    agentrl launch train --run_name NAME [--flag VALUE …]
    agentrl launch eval --run_name NAME [--flag VALUE …]

``scripts/lib/run.sh`` describes the environment variables. Engines and the trainer get GPUs of their own. A
process that crashes is restarted. If one ends because of its configuration, the reason is printed and the
others are stopped. Nothing is started if the run has a live trainer, or was begun with other settings.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.cli.context_limits import as_words, fitted_limits, machine_context
from agentrl.cli.gpus import MemoryCheck, StepTooLargeError, place_processes
from agentrl.cli.placement import Numbers, Placement
from agentrl.cli.start_check import require_joinable, require_usable
from agentrl.config.load import Configs, parse
from agentrl.config.run import without_uri
from agentrl.config.schema import (
    AgentConfig,
    EngineConfig,
    EvaluationConfig,
    ModelConfig,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    ToolConfig,
)
from agentrl.config.validate import require_trainable
from agentrl.documents.task_file import read_tasks
from agentrl.environments.tasks import is_address
from agentrl.errors import ConfigError
from agentrl.inference.engines.commands import SHARED_MEMORY
from agentrl.processes import half_of_cores, thread_limits
from agentrl.quickstart.smollm import prepare_smollm
from agentrl.settings_file import read_settings
from agentrl.shipped_files import shipped_files
from agentrl.store.embedded.server import EmbeddedMongo
from agentrl.supervise import StoppedBySignalError, SupervisedProcess, Supervisor, stop_on_signals
from agentrl.tools.config import load_servers
from agentrl.tools.specs import HttpSpec, McpSpec

SERVERS_FILE = shipped_files() / "mcp_servers.yml"
ROLES = ("serve", "sample", "train")
_DEMO_TOOLS = ("units", 8765)
"""The HTTP server of ``SERVERS_FILE``, which has to be started, and its port."""

_CONNECT_SECONDS = 1.0
_ACCELERATE_SIZES = ("dp_replicate_size", "tp_size", "cp_size")
_SHORTEST = 2048
"""Shortest context that ``--fit_context`` tries."""
_BESIDE_ENGINE = 0.45
"""Fraction of a GPU's memory for each of two engines on it, without ``--inf_mem_ratio``."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The processes of this machine. ``main`` is None if it runs neither the trainer nor an evaluation."""

    run_name: str
    logs: Path
    flags: Sequence[str]
    engines: int
    port: int
    """Port of the first engine; 0 for any free ones."""
    samplers: int
    main: Sequence[str] | None
    follows: bool
    """Whether versions are evaluated while they are trained."""
    tool_server: Sequence[str] | None
    inf_mem_ratio: float | None
    """``--inf_mem_ratio``, if it was given."""
    placement: Placement | None
    """None on a machine without GPUs: all processes then get this one's environment."""


_COMMANDS = ("train", "eval")


def main(argv: list[str]) -> int:
    """Prepare the model and the database, then run the processes until the main one ends."""
    try:
        with stop_on_signals():
            return _launch(argv)
    except StoppedBySignalError as stopped:
        return stopped.exit_code


def _launch(argv: list[str]) -> int:
    variables = os.environ
    command = argv[0] if argv[:1] and not argv[0].startswith("-") else "train"
    if command not in _COMMANDS:
        raise ConfigError(
            f"unknown word {command!r}; choose one of {', '.join(_COMMANDS)}",
            hint="agentrl launch train, or agentrl launch eval",
        )
    flags = [*_flags_of_variables(variables), *argv[argv[:1] == [command] :]]
    configs = parse(
        flags,
        command="agentrl launch",
        description="Starts the processes of a run on this machine, on GPUs of their own: `agentrl launch"
        " train` (database, engines, samplers, trainer) or `agentrl launch eval` (engines and an evaluation)."
        " Restarts those that crash. The run scripts under scripts/ start it with the flags of a recipe.",
        shown=[PlacementConfig, RunConfig, ModelConfig, EngineConfig],
    )
    run = configs[RunConfig]
    roles = _roles(variables) if command == "train" else {"serve", "eval"}
    if command == "eval" and configs.given & {"eval_engine", "eval_model"}:
        roles = {"eval"}
    elif command == "eval":
        flags = ["--eval_engine", "shared", *flags]
    accelerate = _accelerate_config(variables) if "train" in roles else None
    machines = 1
    if accelerate is not None:
        machines, configs = accelerate.machines, configs.with_flags(accelerate.sizes)
    is_demo = not variables.get("MODEL_PATH")
    servers = _default_servers(configs, is_demo=is_demo) if roles & {"sample", "eval"} else None
    if servers is not None:
        flags = ["--mcp_servers_file", str(SERVERS_FILE), *flags]
    model = configs[ModelConfig].model_name_or_path
    if is_demo and model is None:
        model = str(prepare_smollm(lambda text: _report(run.run_name, text)))
        flags = ["--model_name_or_path", model, *flags]
        configs = configs.with_flags({"model_name_or_path": model})
    agreed = require_usable(configs, roles)
    has_database = run.db_connection_string is not None or EmbeddedMongo(run.mongo_dir).status().running
    if has_database:
        asyncio.run(require_joinable(configs, roles, agreed))
    placement = place_processes(
        configs, lambda text: _report(run.run_name, text), serves="serve" in roles, machines=machines,
        trains="train" in roles and not (accelerate is not None and accelerate.uses_cpu),
    )  # fmt: skip
    flags = _fit(configs, flags, model, placement, machines, is_training=command == "train")
    if not has_database:
        _start_database(run)
        asyncio.run(require_joinable(configs, roles, agreed))
    return _run(
        Plan(
            run_name=run.run_name,
            logs=Path(run.log_dir),
            flags=flags,
            engines=len(placement.engines) if placement is not None else int("serve" in roles),
            port=configs[EngineConfig].port,
            samplers=int(variables.get("SAMPLERS") or "2") if "sample" in roles else 0,
            main=_main_command(command, flags, accelerate, placement) if command in roles else None,
            follows=command == "train" and configs[EvaluationConfig].eval_steps is not None,
            tool_server=_demo_server(servers or ()),
            inf_mem_ratio=configs[EngineConfig].inf_mem_ratio,
            placement=placement,
        )
    )


def _fit(
    configs: Configs,
    flags: Sequence[str],
    model: str | None,
    placement: Placement | None,
    machines: int,
    *,
    is_training: bool,
) -> list[str]:
    """Return ``flags`` with the limits of ``--fit_context``, halved until a training step fits the GPUs.

    Raises ConfigError for limits that contradict one another, and for a model that does not fit.
    """
    longest = configs[PlacementConfig].fit_context if model is not None else None
    if longest is not None and placement is None:
        longest = min(longest, machine_context())
    name = configs[RunConfig].run_name
    while True:
        limits = fitted_limits(configs, model, longest) if model is not None and longest is not None else {}
        fitted, words = configs.with_flags(limits), [*as_words(limits), *flags]
        if is_training:
            require_trainable(fitted)
        try:
            if placement is not None and model is not None:
                MemoryCheck(
                    configs=fitted, flags=words, model=model, machines=machines,
                    report=lambda text: _report(name, text),
                ).check(placement, _environment())  # fmt: skip
        except StepTooLargeError as error:
            total = fitted[AgentConfig].max_prompt_tokens + fitted[SamplingConfig].max_new_tokens
            if len({"max_prompt_tokens", "max_new_tokens"} & limits.keys()) == 0 or total < 2 * _SHORTEST:
                raise
            longest = total // 2
            _report(name, f"{error.message}: trying a context of {longest} tokens")
            continue
        if limits:
            _report(name, f"limits: {' '.join(as_words(limits))}")
        return words


def _run(plan: Plan) -> int:
    supervisor = Supervisor(lambda text: _report(plan.run_name, text))
    placement = plan.placement
    others: Numbers = placement.others if placement is not None else ()
    engines: Sequence[Numbers] = placement.engines if placement is not None else [()] * plan.engines
    beside_last = plan.follows and placement is not None and not others and bool(engines)
    """Whether an evaluation that starts an engine of its own does so on the last engine's GPUs."""

    def environment(numbers: Numbers, *, computes: bool = False) -> dict[str, str]:
        """Return the environment of a process that sees the GPUs ``numbers`` of the placement.

        One that ``computes`` on the CPU shares its cores with another one.
        """
        if placement is None:
            return _environment(half_of_cores() if computes else 1)
        return _environment() | placement.environment(numbers)

    def start(name: str, command: Sequence[str], env: Mapping[str, str], *, is_server: bool = False) -> None:
        log = plan.logs / f"{name}.out"
        member = SupervisedProcess(name, command, log, env, is_server=is_server)
        supervisor.start(member)
        _report(plan.run_name, f"{name} started (pid {member.pid}, {log})")

    def share(fraction: float) -> list[str]:
        return ["--inf_mem_ratio", str(fraction)] if plan.inf_mem_ratio is None else []

    try:
        if plan.tool_server is not None:
            start("units-server", plan.tool_server, without_uri(environment(others)), is_server=True)
        for index, numbers in enumerate(engines):
            flags = [*plan.flags, *(["--port", str(plan.port + index)] if plan.port else [])]
            if placement is not None and placement.is_shared:
                flags += share(SHARED_MEMORY)
            elif beside_last and index == len(engines) - 1:
                flags += share(_BESIDE_ENGINE)
            name = f"engine-{index}" if len(engines) > 1 else "engine"
            start(name, _agentrl("serve", flags), environment(numbers, computes=True), is_server=True)
        for index in range(plan.samplers):
            start(f"sampler-{index}", _agentrl("sample", plan.flags), environment(others))
        if plan.follows:
            flags = [*plan.flags, *(share(_BESIDE_ENGINE) if beside_last else [])]
            seen = engines[-1] if beside_last else others
            start("evaluation", _agentrl("eval", flags), environment(seen))
        if plan.main is not None:
            trainer = placement.trainer if placement is not None else ()
            main = SupervisedProcess("main", plan.main, None, environment(trainer or others, computes=True))
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
        "--engine": "ENGINE",
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


def _default_servers(configs: Configs, *, is_demo: bool) -> Sequence[McpSpec] | None:
    """Return the tool servers of ``SERVERS_FILE`` if the run uses that file, else None.

    It is used by the demo, and if the tasks name tools that no path of ``--tools`` ends with, and no other
    servers are configured. Raises ConfigError if the tasks name a server that the file does not configure,
    and TaskFileError.
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


def _demo_server(servers: Sequence[McpSpec]) -> list[str] | None:
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
    EmbeddedMongo(run.mongo_dir).up()
    _report(run.run_name, f"MongoDB started (data in {run.mongo_dir}); stop it with: agentrl mongo down")


@dataclass(frozen=True)
class AccelerateConfig:
    """What ``ACCELERATE_CONFIG`` says about machines and devices."""

    path: str
    machines: int
    uses_cpu: bool
    sizes: Mapping[str, int]
    """Flags that its ``parallelism_config`` sets, such as ``tp_size``."""


def _accelerate_config(variables: Mapping[str, str]) -> AccelerateConfig | None:
    """Read the file that ``ACCELERATE_CONFIG`` names. Raises ConfigError if it chooses GPUs itself."""
    path = variables.get("ACCELERATE_CONFIG")
    if not path:
        return None
    file = read_settings(path, what="ACCELERATE_CONFIG", hint="accelerate config writes one")
    content = file.content
    if not isinstance(content, dict):
        raise file.error("the file holds no mapping")
    chosen = str(content.get("gpu_ids") or "all")
    if chosen != "all":
        raise file.error(
            f"gpu_ids is {chosen}, which would replace the GPUs of the placement", "gpu_ids",
            hint=f"remove gpu_ids, and give --train_gpus {chosen}",
        )  # fmt: skip
    uses_cpu = bool(content.get("use_cpu")) or content.get("distributed_type") == "MULTI_CPU"
    parallelism = content.get("parallelism_config") or {}
    found = {name: parallelism.get(f"parallelism_config_{name}") for name in _ACCELERATE_SIZES}
    sizes = {name: int(size) for name, size in found.items() if size}
    return AccelerateConfig(path, int(content.get("num_machines") or 1), uses_cpu, sizes)


def _main_command(
    command: str, flags: Sequence[str], accelerate: AccelerateConfig | None, placement: Placement | None
) -> list[str]:
    """Return the command of the evaluation, or of the trainer with a process for each of its GPUs."""
    processes = len(placement.trainer) if placement is not None else 0
    module = ["-m", "agentrl.train", *flags]
    if command == "train" and accelerate is not None:
        program = [str(Path(sys.executable).with_name("accelerate")), "launch"]
        count = ["--num_processes", str(processes * accelerate.machines)] if processes else []
        return [*program, "--config_file", accelerate.path, *count, *module]
    if command == "train" and processes > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*launcher, "--nproc_per_node", str(processes), *module]
    return _agentrl(command, flags)


def _agentrl(command: str, flags: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "agentrl", command, *flags]


def _environment(threads: int = 1) -> dict[str, str]:
    return {**thread_limits(threads), **os.environ}


def _report(run_name: str, text: str) -> None:
    print(f"{run_name}: {text}", flush=True)
