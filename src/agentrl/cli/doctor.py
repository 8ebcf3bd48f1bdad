"""``agentrl doctor``: checks this machine and the services of a run, and says how to fix each fault."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from rich.console import RenderableType
from rich.text import Text

from agentrl.config.load import Configs, parse
from agentrl.config.schema import (
    AgentConfig,
    EngineConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    ToolConfig,
)
from agentrl.errors import AgentRLError
from agentrl.inference.engines.commands import engine_venv, has_gpu, install_hint
from agentrl.observe.redact import redact
from agentrl.observe.terminal import stdout_console, table
from agentrl.tools.sandbox import landlock
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
_TOOLS_SECONDS = 60.0
_WEIGHTS_INDEX = "model.safetensors.index.json"
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Check:
    """One row of the table. ``hint`` says how to fix it and is empty if ``state`` is ok."""

    name: str
    state: State
    found: str
    hint: str = ""


def main(argv: list[str]) -> int:
    """Print the table; return 1 if a check failed, else 0."""
    configs = parse(
        argv,
        command="agentrl doctor",
        description="Checks this machine, and names the command that fixes each fault. With the flags of your"
        " run it also checks the database, the model, the tool servers and the engine.",
        shown=[RunConfig, ModelConfig, EngineConfig, ToolConfig],
    )
    checks = [*machine_checks(configs[RunConfig], configs[EngineConfig]), *asyncio.run(_run_checks(configs))]
    stdout_console().print(render(checks))
    return 1 if any(check.state == "fail" for check in checks) else 0


async def _run_checks(configs: Configs) -> list[Check]:
    return [
        check_mongod(configs[RunConfig]),
        await check_database(configs[RunConfig]),
        *model_checks(configs[ModelConfig]),
        check_context(configs),
        check_agent_config(configs[SamplingConfig]),
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


def machine_checks(run: RunConfig, engine: EngineConfig) -> Iterator[Check]:
    """Yield the checks of the machine itself."""
    yield check_python()
    yield from check_packages()
    yield check_torch()
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
        return Check(
            "python", "fail", found, "use Python 3.11 or newer: PYTHON=python3.11 bash scripts/setup.sh"
        )
    return Check("python", "ok", f"{found} ({sys.executable})")


def check_packages(distribution: str = "agentrl") -> Iterator[Check]:
    """Check each dependency against its tested range; one row if all are fine."""
    requirements = [Requirement(line) for line in metadata.requires(distribution) or ()]
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
    """Check that torch can be imported and that its build sees the machine's GPU."""
    done = _probe([sys.executable, "-c", _TORCH_PROBE])
    if done is None or done.returncode != 0:
        reason = "no answer in time" if done is None else _last_line(done.stderr)
        return Check("torch", "fail", f"cannot be imported: {reason}", "bash scripts/setup.sh")
    version, build, device = done.stdout.strip().splitlines()[-1].split("|")
    if device != "-":
        return Check("torch", "ok", f"{version} on {device} ({build})")
    if has_gpu():
        hint = "pip install a torch build for this GPU's driver (pytorch.org/get-started)"
        return Check("torch", "warn", f"{version} ({build}) does not see this machine's GPU", hint)
    return Check("torch", "ok", f"{version} ({build}); this machine has no GPU")


def check_sandbox() -> Check:
    """Check how the programs of a model are confined on this machine."""
    name, problem = "sandbox", namespace_problem()
    if problem is None:
        return Check(name, "ok", "namespaces: own network, processes and files")
    hint = f"{problem}; allow user namespaces (sysctl user.max_user_namespaces), or use isolation: docker"
    if landlock.version():
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
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    name = f"disk {folder}"
    if not os.access(place, os.W_OK):
        return Check(name, "fail", f"{place} is not writable", "choose another folder, or change its owner")
    free = shutil.disk_usage(place).free
    found = f"{free / _GIB:.1f} GiB free"
    if free < _DISK_WARN:
        hint = "free space there; weights and checkpoints take several times the model's size"
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
        return subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return None


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"


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


def model_checks(config: ModelConfig) -> Iterator[Check]:
    """Check the files of the model folder: config, weights, tokenizer, chat template. Loads nothing."""
    if config.model_name_or_path is None:
        yield Check("model", "ok", "not checked: give --model_name_or_path FOLDER")
        return
    folder = Path(config.model_name_or_path)
    settings = _json(folder / "config.json")
    if settings is None:
        yield Check(
            "model config", "fail", f"{folder} has no readable config.json",
            "give a local Hugging Face folder; `hf download NAME --local-dir FOLDER` fetches one",
        )  # fmt: skip
        return
    yield Check("model config", "ok", f"{settings.get('model_type', 'unknown type')} in {folder}")
    yield _check_weights(folder)
    yield _check_tokenizer(folder, settings)
    yield _check_chat_template(folder, config)


def _check_weights(folder: Path) -> Check:
    index = _json(folder / _WEIGHTS_INDEX)
    names = sorted(set(index.get("weight_map", {}).values())) if index else ["model.safetensors"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        return Check("model weights", "fail", f"missing: {', '.join(missing)}", "download the folder again")
    size = sum((folder / name).stat().st_size for name in names)
    return Check("model weights", "ok", f"{size / 2**30:.2f} GiB in {len(names)} safetensors")


def _check_tokenizer(folder: Path, settings: dict[str, Any]) -> Check:
    from tokenizers import Tokenizer

    name, path = "tokenizer", folder / "tokenizer.json"
    hint = "copy the tokenizer's files into the folder"
    if not path.is_file():
        return Check(name, "fail", f"{path} is missing", hint)
    try:
        size = Tokenizer.from_file(str(path)).get_vocab_size(with_added_tokens=True)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception on a broken file
        return Check(name, "fail", f"{path} cannot be read: {error}", hint)
    embedded = settings.get("vocab_size", settings.get("text_config", {}).get("vocab_size"))
    if isinstance(embedded, int) and size > embedded:
        found = f"{size} ids, and the model embeds {embedded}"
        return Check(name, "fail", found, "use the tokenizer that belongs to the model")
    return Check(name, "ok", f"{size} ids")


def _check_chat_template(folder: Path, config: ModelConfig) -> Check:
    name = "chat template"
    hint = "give --chat_template FILE.jinja; assets/chat_templates has examples"
    if config.chat_template is not None:
        if Path(config.chat_template).is_file():
            return Check(name, "ok", config.chat_template)
        return Check(name, "fail", f"{config.chat_template} is missing", hint)
    if (folder / "chat_template.jinja").is_file():
        return Check(name, "ok", "chat_template.jinja")
    if (_json(folder / "tokenizer_config.json") or {}).get("chat_template"):
        return Check(name, "ok", "in tokenizer_config.json")
    return Check(name, "fail", "the folder has none", hint)


def check_context(configs: Configs) -> Check:
    """Check that the longest prompt and its continuation fit the context of the model."""
    from agentrl.chat.context_length import model_context_length
    from agentrl.rollout.budget import context_problem

    name, model = "context", configs[ModelConfig]
    own = None if model.model_name_or_path is None else model_context_length(model.model_name_or_path)
    length = model.max_model_len or own
    if length is None:
        return Check(name, "ok", "not checked: the model's configuration names no length")
    if own is not None and length > own:
        found = f"--max_model_len {length} is more than the {own} tokens of the model's configuration"
        return Check(name, "fail", found, f"set --max_model_len {own} or less, or extend the rotary scaling")
    problem = context_problem(configs[AgentConfig], configs[SamplingConfig], length)
    if problem is None:
        return Check(name, "ok", f"{length} tokens hold --max_prompt_tokens + --max_new_tokens")
    return Check(name, "warn", problem, "lower --max_prompt_tokens or --max_new_tokens")


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


def _json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
