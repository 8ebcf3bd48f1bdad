"""Start the processes of a run on this machine, and stop all of them; also those of the demonstration."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.base.installation import require, shipped_files
from agentrl.base.processes import (
    StoppedBySignalError,
    SupervisedProcess,
    Supervisor,
    free_port,
    half_of_cores,
    run_child,
    thread_limits,
)
from agentrl.config.load import Configs
from agentrl.config.run import without_uri
from agentrl.config.schema import TaskConfig, ToolConfig
from agentrl.documents.task_presets import TaskRows
from agentrl.errors import ConfigError, ModelError
from agentrl.inference.engines.commands import SHARED_MEMORY
from agentrl.local.placement import Numbers, Placement
from agentrl.rollout.load_tasks import is_address, read_task_source
from agentrl.tools.config import McpSpec, load_servers

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
            [sys.executable, "-m", "agentrl.base.installation", *words],
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
    command = [sys.executable, "-m", "agentrl.base.installation", "demo/units.py", "--port", chosen]
    return command, {_UNITS_PORT_VARIABLE: chosen}


_BESIDE_ENGINE = 0.45
"""Fraction of a GPU's memory for each of two engines on it, without ``--inf_mem_ratio``."""
_SERVING_SECONDS = 60.0
"""How long the trainer's start waits for an engine, at most."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The processes of this machine."""

    name: str
    """What the lines on the terminal begin with."""
    logs: Path
    flags: Sequence[str]
    """The run's flags, which every process gets."""
    engines: int
    port: int = 0
    """Port of the first engine; 0 for any free ones."""
    samplers: int
    teaches: bool = False
    """Whether a teacher is started (``--teacher``)."""
    main: Sequence[str] | None
    """The command of the trainer or of an evaluation; None if this machine runs neither."""
    follows: bool = False
    """Whether versions are evaluated while they are trained."""
    has_demo_tools: bool
    """Whether the demonstration's HTTP tool server is started."""
    inf_mem_ratio: float | None = None
    """``--inf_mem_ratio``, if it was given."""
    placement: Placement | None = None
    """None on a machine without GPUs: all processes then get this one's environment."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of every process."""

    def report(self, text: str) -> None:
        """Print a line about the run."""
        print(f"{self.name}: {text}", flush=True)


def run_processes(
    plan: RunPlan,
    deadline: Callable[[], float] = lambda: float("inf"),
    serving: threading.Event | None = None,
) -> int:
    """Run until the main process ends, and return its exit code; without one until all helpers have ended.

    ``deadline`` is the end of the main process, as ``time.monotonic`` counts. With ``serving``, which is set
    when an engine serves, the main process starts after it if the processes share very few cores: it loads
    while the first trajectories are sampled, and not before. Raises ConfigError for a process that cannot run
    as it is configured, and AgentRLError for one that has crashed too often.
    """
    supervisor = Supervisor(plan.report)
    helpers, main = processes_of(plan)
    try:
        for member in helpers:
            supervisor.start(member)
            plan.report(f"{member.name} started (pid {member.pid}, {member.log})")
        if main is None:
            supervisor.run_helpers()
            return 0
        if serving is not None and plan.placement is None and half_of_cores() == 1:
            supervisor.wait(serving, _SERVING_SECONDS)
        return supervisor.run_main(main, deadline=deadline)
    except StoppedBySignalError:
        plan.report("stopping: a trainer finishes its step and saves; the same command resumes")
        raise
    finally:
        supervisor.stop()


def processes_of(plan: RunPlan) -> tuple[list[SupervisedProcess], SupervisedProcess | None]:
    """Return the helpers of ``plan`` in the order of their start, and its main process. Starts nothing."""
    placement = plan.placement
    others: Numbers = placement.others if placement is not None else ()
    engines: Sequence[Numbers] = placement.engines if placement is not None else [()] * plan.engines
    # An evaluation that starts an engine of its own does so on the last engine's GPUs, if no GPU is free.
    beside_last = plan.follows and placement is not None and not others and bool(engines)
    tool_server, variables = units_server() if plan.has_demo_tools else ([], {})
    variables |= plan.variables
    helpers: list[SupervisedProcess] = []

    def environment(numbers: Numbers, *, computes: bool = False) -> dict[str, str]:
        """Return the environment of a process that sees the GPUs ``numbers`` of the placement.

        One that ``computes`` on the CPU shares its cores with another one.
        """
        threads = half_of_cores() if computes and placement is None else 1
        seen = placement.gpus.environment(numbers) if placement is not None else {}
        return {**environment_of_children(threads), **variables, **seen}

    def add(name: str, command: Sequence[str], env: Mapping[str, str], *, is_server: bool = False) -> None:
        log = plan.logs / f"{plan.name}_{name}.out"  # another run may have the same folder
        helpers.append(SupervisedProcess(name, command, log, env, is_server=is_server))

    def share(fraction: float) -> list[str]:
        return ["--inf_mem_ratio", str(fraction)] if plan.inf_mem_ratio is None else []

    if tool_server:
        add("units-server", tool_server, without_uri(environment(others)), is_server=True)
    for index, numbers in enumerate(engines):
        flags = [*plan.flags, *(["--port", str(plan.port + index)] if plan.port else [])]
        if placement is not None and set(numbers) & set(placement.shared):
            flags += ["--colocate", "true"] if placement.is_colocated else share(SHARED_MEMORY)
        elif beside_last and index == len(engines) - 1:
            flags += share(_BESIDE_ENGINE)
        name = f"engine-{index}" if len(engines) > 1 else "engine"
        add(name, agentrl_command("serve", flags), environment(numbers, computes=True), is_server=True)
    for index in range(plan.samplers):
        add(f"sampler-{index}", agentrl_command("sample", plan.flags), environment(others))
    if plan.teaches:
        add("teacher", agentrl_command("teach", plan.flags), environment(others, computes=True))
    if plan.follows:
        flags = [*plan.flags, *(share(_BESIDE_ENGINE) if beside_last else [])]
        add("evaluation", agentrl_command("eval", flags), environment(engines[-1] if beside_last else others))
    if plan.main is None:
        return helpers, None
    trainer = placement.trainer if placement is not None else ()
    return helpers, SupervisedProcess("main", plan.main, None, environment(trainer or others, computes=True))


def agentrl_command(command: str, flags: Sequence[str]) -> list[str]:
    """Return the words that start ``agentrl COMMAND`` with this interpreter."""
    return [sys.executable, "-m", "agentrl", command, *flags]


def environment_of_children(threads: int = 1) -> dict[str, str]:
    """Return this process's environment; variables that are set win over the limits of threads."""
    return {**thread_limits(threads), **os.environ}
