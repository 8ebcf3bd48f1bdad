"""Check this machine and the services of a run, and say how to fix each fault (``agentrl doctor``)."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
from packaging.requirements import Requirement
from rich.console import RenderableType
from rich.text import Text

from agentrl import __version__
from agentrl.base.device_lease import has_gpu
from agentrl.base.installation import missing
from agentrl.config.load import Configs, parse
from agentrl.config.schema import (
    AgentConfig,
    EngineConfig,
    JsonFlags,
    ModelConfig,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    ToolConfig,
)
from agentrl.errors import AgentRLError, ModelError, StoreUnavailableError
from agentrl.inference.engines.commands import engine_venv, install_hint
from agentrl.local.mongod import END_OF_LIFE, support_ended_on
from agentrl.local.placement import place_processes
from agentrl.observe.logging import redact
from agentrl.observe.progress import progress
from agentrl.observe.terminal import print_json, stdout_console, table
from agentrl.weights.folder import read_config, tensor_files
from agentrl.worlds.sandbox.linux import landlock_version
from agentrl.worlds.sandbox.local import namespace_problem

if TYPE_CHECKING:
    from agentrl.documents.run import InferenceService
    from agentrl.lab.database_server import ServerInfo


State = Literal["ok", "warn", "fail"]
_OLDEST_PYTHON = (3, 11)
_GIB = 2**30
_DISK_FAIL, _DISK_WARN = 1 * _GIB, 10 * _GIB
_PROBE_SECONDS = 120.0
_TORCH_PROBE = (
    "import torch; found = torch.cuda.is_available();"
    "print(torch.__version__, torch.version.cuda or torch.version.hip or 'cpu',"
    " torch.cuda.get_device_name(0) if found else '-', sep='|')"
)
_OPEN_FILES_FAIL, _OPEN_FILES_WARN = 1024, 8192
_PROCESSES_WARN = 1024
_MEMORY_FAIL, _MEMORY_WARN = 2 * _GIB, 8 * _GIB
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True)
class Check:
    """One row of the table. ``hint`` says how to fix it and is empty if ``state`` is ok."""

    name: str
    state: State
    found: str
    hint: str = ""


def machine_checks(configs: Configs) -> Iterator[Check]:
    """Yield the checks of the machine itself."""
    run, engine = configs[RunConfig], configs[EngineConfig]
    yield Check("agentrl", "ok", f"{__version__} on {platform.platform()}")
    yield check_python()
    yield from check_packages()
    yield check_torch()
    yield check_gpus(configs)
    yield check_engine_venv("sglang", engine)
    yield check_engine_venv("vllm", engine)
    for folder in (run.output, run.log_dir, run.mongo_dir):
        yield check_disk(folder)
    yield check_port(engine)
    yield check_sandbox()


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Check:
    """Check the version of Python."""
    found = ".".join(map(str, version))
    if version[:2] < _OLDEST_PYTHON:
        return Check("python", "fail", found, "make the environment with Python 3.11 or newer")
    return Check("python", "ok", f"{found} ({sys.executable})")


def check_packages() -> Iterator[Check]:
    """Check each dependency against its tested range; one row if all are fine.

    The project that PyPI calls agentrl has files of the same names.
    """
    with suppress(metadata.PackageNotFoundError):
        found = f"{metadata.version('agentrl')} of PyPI is another project, whose files overwrite these"
        hint = "pip uninstall agentrl, and install agentrl-mongo again (docs/install.md)"
        yield Check("package agentrl", "fail", found, hint)
    requirements = [Requirement(line) for line in metadata.requires("agentrl-mongo") or ()]
    needed = [item for item in requirements if item.marker is None or item.marker.evaluate({"extra": ""})]
    good = 0
    for item in needed:
        try:
            version = metadata.version(item.name)
        except metadata.PackageNotFoundError:
            yield Check(f"package {item.name}", "fail", "not installed", f"pip install '{item}'")
            continue
        if item.specifier.contains(version, prereleases=True):
            good += 1
        else:
            found = f"{version}, tested with {item.specifier}"
            yield Check(f"package {item.name}", "warn", found, f"pip install '{item}'")
    if good:
        yield Check("packages", "ok", f"{good} of {len(needed)} are installed in the tested range")


def check_torch() -> Check:
    """Check that torch, if it is installed, can be imported and that its build sees the machine's GPU."""
    absent = missing("torch", "training or the local engine")
    if absent is not None and importlib.util.find_spec("torch") is None:
        return Check("torch", "warn", absent.message, absent.hint or "")
    done = _probe([sys.executable, "-c", _TORCH_PROBE])
    if done is None or done.returncode != 0:
        lines = ["no answer in time"] if done is None else done.stderr.strip().splitlines() or ["no output"]
        hint = "install torch again (pytorch.org/get-started)"
        return Check("torch", "fail", f"cannot be imported: {lines[-1]}", hint)
    version, build, device = done.stdout.strip().splitlines()[-1].split("|")
    if device != "-":
        return Check("torch", "ok", f"{version} on {device} ({build})")
    if has_gpu():
        hint = "pip install a torch build for this GPU's driver (pytorch.org/get-started)"
        return Check("torch", "warn", f"{version} ({build}) does not see this machine's GPU", hint)
    return Check("torch", "ok", f"{version} ({build}); this machine has no GPU")


def check_gpus(configs: Configs) -> Check:
    """Check that `agentrl launch` can divide the GPUs among the ROLES of this machine, and say how."""
    lines: list[str] = []
    roles = (os.environ.get("ROLES") or "serve train").split()
    try:
        placement = place_processes(configs, lines.append, trains="train" in roles, serves="serve" in roles)
    except AgentRLError as error:
        return Check("GPUs", "fail", error.message, error.hint or "")
    if placement is None and lines:
        return Check("GPUs", "warn", lines[0], "see the check of torch")
    return Check("GPUs", "ok", lines[0] if lines else "none: all processes run on the CPU")


def check_sandbox() -> Check:
    """Check how the programs of a model are confined on this machine."""
    name, problem = "sandbox", namespace_problem()
    if problem is None:
        return Check(name, "ok", "namespaces: own network, processes and files")
    hint = f"{problem}; allow user namespaces (sysctl user.max_user_namespaces), or use isolation: docker"
    if landlock_version():
        return Check(name, "ok", f"limits and Landlock; no namespaces: {problem}")
    return Check(
        name, "warn", f"only limits: programs read this user's files; no namespaces: {problem}", hint
    )


def check_engine_venv(name: str, engine: EngineConfig) -> Check:
    """Check the venv of SGLang or vLLM, which only ``--engine`` of that name needs."""
    venv = engine_venv(name)
    python = venv / "bin" / "python"
    probe = f"import importlib.metadata as m; print(m.version(m.packages_distributions()[{name!r}][0]))"
    done = _probe([str(python), "-c", probe]) if python.is_file() else None
    if done is not None and done.returncode == 0:
        return Check(name, "ok", f"{done.stdout.strip()} in {venv}")
    found = f"not installed in {venv}"
    if engine.engine == name:
        return Check(name, "fail", found, install_hint(name))
    return Check(name, "ok", f"{found}; --engine {engine.engine} does not need it")


def check_disk(folder: str) -> Check:
    """Check the free space and the write permission where ``folder`` is or will be."""
    parent = Path(folder).absolute()
    while not parent.exists():
        parent = parent.parent
    name = f"disk {folder}"
    if not os.access(parent, os.W_OK):
        return Check(name, "fail", f"{parent} is not writable", "choose another folder, or change its owner")
    hint = "free space there; weights and checkpoints take several times the model's size"
    return check_free(name, shutil.disk_usage(parent).free, hint)


def check_free(name: str, free: int, hint: str) -> Check:
    """Check the free bytes of a disk."""
    found = f"{free / _GIB:.1f} GiB free"
    if free < _DISK_WARN:
        return Check(name, "fail" if free < _DISK_FAIL else "warn", found, hint)
    return Check(name, "ok", found)


def check_port(engine: EngineConfig) -> Check:
    """Check that the engine's address can be bound."""
    name = f"port {engine.host}:{engine.port or 'any'}"
    try:
        with socket.socket(socket.AF_INET6 if ":" in engine.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((engine.host, engine.port))
    except OSError as error:
        return Check(
            name, "fail", f"cannot be bound: {error.strerror or error}", "give another --host or --port 0"
        )
    return Check(name, "ok", "free")


def _probe(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PROBE_SECONDS, check=False
        )
    except (subprocess.TimeoutExpired, OSError):
        return None


def check_open_files(soft: int, hard: int) -> Check:
    """Check how many files a process may open: samplers have many connections, mongod many files."""
    name = "open files"
    if soft == resource.RLIM_INFINITY or soft >= _OPEN_FILES_WARN:
        return Check(name, "ok", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}")
    raised = hard == resource.RLIM_INFINITY or hard >= _OPEN_FILES_WARN
    hint = "ulimit -n 65536" if raised else "let an administrator raise the hard limit in limits.conf"
    return Check(name, "fail" if soft < _OPEN_FILES_FAIL else "warn", f"{soft:,} (hard limit {hard:,})", hint)


def check_processes(soft: int) -> Check:
    """Check how many processes this user may start: sandboxes and tool servers are processes."""
    name = "processes"
    if soft == resource.RLIM_INFINITY or soft >= _PROCESSES_WARN:
        return Check(name, "ok", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}")
    return Check(name, "warn", f"{soft:,}", f"ulimit -u {8 * _PROCESSES_WARN}")


def check_memory(available: int) -> Check:
    """Check the available memory, in bytes."""
    name, found = "memory", f"{available / _GIB:.1f} GiB available"
    if available >= _MEMORY_WARN:
        return Check(name, "ok", found)
    hint = "end other programs, or choose a smaller model; the quickstart needs 16 GiB in all"
    return Check(name, "fail" if available < _MEMORY_FAIL else "warn", found, hint)


def available_memory() -> int:
    """Return the bytes that this process may still use, within the limit of its container."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = _CGROUP_LIMIT.read_text().strip(), int(_CGROUP_USED.read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))


_TOOLS_SECONDS = 60.0
_REACH_SECONDS = 3.0
_SLOW_SECONDS = 0.05
_CLOCK_WARN = 1.0


def check_mongod(run: RunConfig) -> Check:
    """Check for the binary of the embedded server, which a run without --db_connection_string needs."""
    from agentrl.local.mongod import choose_mongod

    name = "mongod"
    try:
        return Check(name, "ok", str(choose_mongod().mongod))
    except AgentRLError as error:
        if run.db_connection_string:
            return Check(name, "ok", "not installed; --db_connection_string is given")
        return Check(name, "fail", error.message, error.hint or "")


async def run_checks(run: RunConfig, alive_seconds: float) -> list[Check]:
    """Check the database server and, if it answers, the run: a stopped server is one row."""
    checks = await database_checks(run)
    is_reached = len(checks) > 1
    return checks + (await service_checks(run, alive_seconds) if is_reached else [])


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
    import httpx2

    from agentrl.base.proxies import ProxiedTransport

    try:
        async with httpx2.AsyncClient(timeout=_REACH_SECONDS, transport=ProxiedTransport()) as client:
            await client.get(url)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
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
        return Check(name, "fail" if os.access(path, os.F_OK) else "warn", found, error.hint or "")
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


async def database_checks(run: RunConfig) -> list[Check]:
    """Return the checks of the server; one row if it cannot be reached. Creates nothing."""
    from agentrl.lab.database_server import ServerInfos
    from agentrl.store.client import open_connection

    try:
        connection = await open_connection(run)
        try:
            info = await ServerInfos(connection).read()
        finally:
            await connection.close()
    except AgentRLError as error:
        state: State = "fail" if run.db_connection_string else "warn"
        return [Check("database", state, redact(error.message), error.hint or "agentrl mongo up")]
    return list(server_checks(info, date.today()))


def server_checks(info: ServerInfo, today: date) -> Iterator[Check]:
    """Yield a check per property of the server."""
    yield _check_version(info, today)
    yield _check_latency(info)
    yield _check_clock(info)
    yield _check_rights(info)
    if info.free_bytes is not None:
        hint = "free space there, or prune finished runs: agentrl db prune"
        yield check_free("database disk", info.free_bytes, hint)


def _check_version(info: ServerInfo, today: date) -> Check:
    name, version = "database", ".".join(map(str, info.version))
    shape = f"replica set {info.replica_set} of {info.members}" if info.replica_set else "sharded cluster"
    found = f"MongoDB {version} at {info.host}, {shape}"
    end = END_OF_LIFE.get(info.version[0])
    if end is None:
        return Check(name, "warn", f"{found}; AgentRL knows 6, 7 and 8", "use MongoDB 7 or 8")
    if support_ended_on(info.version[0], today):
        return Check(
            name, "warn", f"{found}; support of {info.version[0]}.0 ended on {end}",
            "keep it on 127.0.0.1, or name a server of version 7 or 8 with --db_connection_string",
        )  # fmt: skip
    return Check(name, "ok", f"{found}, supported until {end}")


def _check_latency(info: ServerInfo) -> Check:
    found = f"{1000 * info.latency_seconds:.1f} ms per ping"
    if info.latency_seconds <= _SLOW_SECONDS:
        return Check("database latency", "ok", found)
    hint = "run the server nearer to the samplers, or on a machine with less load"
    return Check("database latency", "warn", found, hint)


def _check_clock(info: ServerInfo) -> Check:
    offset = info.clock_offset_seconds
    side = "behind" if offset > 0 else "ahead of"
    found = f"this machine's clock is {abs(offset):.2f} s {side} the server's"
    if abs(offset) <= _CLOCK_WARN:
        return Check("clock", "ok", found)
    hint = "a run follows the server's clock, but times in logs differ: timedatectl set-ntp true"
    return Check("clock", "warn", found, hint)


def _check_rights(info: ServerInfo) -> Check:
    name = "database rights"
    if info.user is None:
        return Check(
            name, "warn", "the server asks for no login", "start mongod with --auth, and bind it to 127.0.0.1"
        )
    who = f"{info.user} ({', '.join(info.roles) or 'no roles'})"
    if not info.may_read:
        hint = "grant it a role on the run: `agentrl db users --create`"
        return Check(name, "fail", f"{who} may not read this run", hint)
    if not info.may_write:
        return Check(name, "ok", f"{who} may read, not write: enough for audit, status and dashboard")
    return Check(name, "ok", f"{who} may read and write")


def model_checks(config: ModelConfig, parser: str | None = None) -> Iterator[Check]:
    """Check a model folder: config, weights, tokenizer, chat format. Loads no weights.

    ``parser`` is ``--tool_call_parser``.
    """
    if config.model_name_or_path is None:
        yield Check("model", "ok", "not checked: give --model_name_or_path FOLDER")
        return
    folder = Path(config.model_name_or_path)
    try:
        settings = read_config(folder)
    except ModelError:
        yield Check(
            "model config", "fail", f"{folder} has no readable config.json",
            "give a local Hugging Face folder; `hf download NAME --local-dir FOLDER` fetches one",
        )  # fmt: skip
        return
    yield Check("model config", "ok", f"{settings.get('model_type', 'unknown type')} in {folder}")
    yield _check_weights(folder)
    yield _check_tokenizer(folder, settings)
    yield _check_chat_format(folder, config, parser)


def _check_weights(folder: Path) -> Check:
    name = "model weights"
    try:
        files = tensor_files(folder)
    except ModelError as error:
        return Check(name, "fail", error.message, error.hint or "")
    lacking = [file.name for file in files if not file.is_file()] if files else ["model.safetensors"]
    if lacking:
        return Check(name, "fail", f"missing: {', '.join(lacking)}", "download the folder again")
    size = sum(file.stat().st_size for file in files)
    return Check(name, "ok", f"{size / _GIB:.2f} GiB in {len(files)} safetensors")


def _check_tokenizer(folder: Path, settings: dict[str, Any]) -> Check:
    from agentrl.chat.model_folder import read_tokenizer_file

    name, path = "tokenizer", folder / "tokenizer.json"
    hint = "copy the tokenizer's files into the folder"
    if not path.is_file():
        return Check(name, "fail", f"{path} is missing", hint)
    try:
        size = read_tokenizer_file(path).get_vocab_size(with_added_tokens=True)
    except AgentRLError as error:
        return Check(name, "fail", error.message, hint)
    embedded = settings.get("vocab_size", settings.get("text_config", {}).get("vocab_size"))
    if isinstance(embedded, int) and size > embedded:
        found = f"{size} ids, and the model embeds {embedded}"
        return Check(name, "fail", found, "use the tokenizer that belongs to the model")
    return Check(name, "ok", f"{size} ids")


def _check_chat_format(folder: Path, config: ModelConfig, parser: str | None) -> Check:
    """Validate the chat format, as every sampler does before its first task."""
    from agentrl.chat.chat_format import UNSEEN_HINT, unseen_tools
    from agentrl.chat.open_format import open_chat_format
    from agentrl.chat.validate_format import CONVERSATION, TOOLS

    name = "chat format"
    try:
        opened = open_chat_format(folder, config, parser)
    except AgentRLError as error:
        return Check(name, "fail", error.message, error.hint or "")
    if opened.tool_problems:
        hint = "for tools, give another --chat_format, or a template for tools by --chat_template FILE"
        return Check(name, "warn", f"{opened.description}: it {opened.tool_problems[0]}", hint)
    if unseen_tools(opened, opened.render(CONVERSATION[:2], TOOLS), TOOLS):
        return Check(name, "warn", f"{opened.description}: a prompt does not name the tools", UNSEEN_HINT)
    return Check(name, "ok", opened.description)


def check_context(configs: Configs) -> Check:
    """Check that the longest prompt and its continuation fit the context of the model."""
    from agentrl.calls.prompts import CONTEXT_LIMITS, context_problem
    from agentrl.chat.model_folder import context_length
    from agentrl.errors import ConfigError

    name, model = "context", configs[ModelConfig]
    try:
        length = context_length(model, model.model_name_or_path)
    except ConfigError as error:
        return Check(name, "fail", error.message, error.hint or "")
    if length is None:
        return Check(name, "ok", "not checked: the model's configuration names no length")
    problem = context_problem(configs[AgentConfig], configs[SamplingConfig], length)
    if problem is None:
        return Check(name, "ok", f"{length} tokens hold --max_prompt_tokens + --max_new_tokens")
    if not CONTEXT_LIMITS & configs.given:
        return Check(name, "ok", f"its {length} tokens limit prompts and outputs")
    return Check(name, "warn", problem, "lower --max_prompt_tokens or --max_new_tokens")


_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def main(argv: list[str]) -> int:
    """Print the table; return 1 if a check failed, else 0."""
    configs = parse(
        argv,
        command="agentrl doctor",
        description="Checks this machine, and names the command that fixes each fault. With the flags of your"
        " run it also checks the database, the model, the tool servers and the engine.",
        shown=[RunConfig, ModelConfig, EngineConfig, PlacementConfig, SamplingConfig, ToolConfig],
        extra=[JsonFlags],
    )
    checks: list[Check] = []
    with progress("checking this machine and the services of the run") as work:
        for check in machine_checks(configs):
            checks.append(check)
            work.advance()
        checks += asyncio.run(_run_checks(configs))
    failed = sum(check.state == "fail" for check in checks)
    if configs[JsonFlags].json:
        print_json({"failed": failed, "checks": checks})
    else:
        stdout_console().print(render(checks))
    return 1 if failed else 0


async def _run_checks(configs: Configs) -> list[Check]:
    run = configs[RunConfig]
    return [
        check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        check_processes(resource.getrlimit(resource.RLIMIT_NPROC)[0]),
        check_memory(available_memory()),
        check_mongod(run),
        *await run_checks(run, configs[EngineConfig].alive_seconds),
        *model_checks(configs[ModelConfig], configs[AgentConfig].tool_call_parser),
        check_context(configs),
        await check_agent_config(configs[SamplingConfig]),
        await check_tools(configs[ToolConfig]),
    ]


def render(checks: Sequence[Check]) -> RenderableType:
    """Return a table with a row per check: its state, what was found, and how to fix it."""
    rows = [
        [Text(check.state, _STYLES[check.state]), check.name, check.found, check.hint] for check in checks
    ]
    failed = sum(check.state == "fail" for check in checks)
    title = f"{failed} of {len(checks)} checks failed" if failed else "no check failed"
    return table(title, ["", "check", "found", "how to fix it"], rows, text=4)
