"""What ``agentrl doctor`` checks of a run: database, model folder, agent configuration, tool servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.cli.doctor.machine import Check
from agentrl.config.schema import AgentConfig, ModelConfig, RunConfig, SamplingConfig
from agentrl.errors import AgentRLError
from agentrl.observe.redact import redact

_TOOLS_SECONDS = 60.0
_WEIGHTS_INDEX = "model.safetensors.index.json"


def check_mongod(run: RunConfig) -> Check:
    """The embedded server's binary, which only a run without --db_connection_string needs."""
    from agentrl.store.embedded.daemon import find_binary

    name = "mongod"
    try:
        return Check(name, "ok", str(find_binary()))
    except AgentRLError as error:
        if run.db_connection_string:
            return Check(name, "ok", "not installed; --db_connection_string is given")
        return Check(name, "fail", error.message, error.hint or "bash scripts/setup.sh")


async def check_database(run: RunConfig) -> Check:
    """Whether the database answers; with no URI, whether the embedded one is there to be started.

    Nothing is created.
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
    """The model folder's files: config, weights, tokenizer, chat template. Nothing is loaded."""
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


def check_agent_config(config: SamplingConfig) -> Check:
    """The endpoints of the judge, which only the scorer ``agentcpm`` needs."""
    from agentrl.scoring.agent_config import load_section

    name, path = "agent config", config.agent_config_path
    try:
        section = load_section(path, "scorer_agent")
    except AgentRLError as error:
        found = f"{error.message}; tasks with scorer agentcpm need it"
        return Check(name, "fail" if Path(path).exists() else "warn", found, error.hint or "")
    return Check(name, "ok", f"{path}: {', '.join(endpoint.model for endpoint in section.models)}")


async def check_tools(config: AgentConfig) -> Check:
    """Connects to the configured tool servers and asks for their tools."""
    from agentrl.tools.pool import ToolPool

    name = "tool servers"
    if not (config.mcp_servers_file or config.mcp_manager_url or config.tools):
        return Check(name, "ok", "not checked: give --mcp_servers_file, --mcp_manager_url or --tools")
    try:
        async with asyncio.timeout(_TOOLS_SECONDS), ToolPool(config) as pool:
            schemas = await pool.schemas(None)
            return Check(name, "ok", f"{', '.join(pool.servers)}: {len(schemas)} tools")
    except TimeoutError:
        hint = "see whether the servers' commands start by hand"
        return Check(name, "fail", f"no answer within {_TOOLS_SECONDS:.0f} s", hint)
    except AgentRLError as error:
        return Check(name, "fail", redact(error.message), error.hint or "start the server, or mend its entry")


def _json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
