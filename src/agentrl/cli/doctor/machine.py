"""Check the machine: Python, packages, torch, engines, disks, ports, the sandbox, and the user's limits."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement

from agentrl import __version__
from agentrl.config.load import Configs
from agentrl.config.schema import EngineConfig, RunConfig
from agentrl.device_lease import has_gpu
from agentrl.errors import AgentRLError
from agentrl.extras import missing
from agentrl.inference.engines.commands import engine_venv, install_hint
from agentrl.launch.placement import place_processes
from agentrl.tools.sandbox.linux import landlock_version
from agentrl.tools.sandbox.local import namespace_problem

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
    """Check each dependency against its tested range; one row if all are fine."""
    requirements = [Requirement(line) for line in metadata.requires("agentrl") or ()]
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
        reason = "no answer in time" if done is None else _last_line(done.stderr)
        return Check(
            "torch", "fail", f"cannot be imported: {reason}", "install torch again (pytorch.org/get-started)"
        )
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


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"


def limit_checks() -> Iterator[Check]:
    """Yield the checks of the limits."""
    yield check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield check_processes(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    yield check_memory(available_memory())


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
