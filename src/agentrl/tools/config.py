"""Read the MCP servers of a run from ``--mcp_servers_file`` and ``--mcp_manager_url``."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from agentrl.config.schema import ToolConfig
from agentrl.errors import ConfigError
from agentrl.tools.mcp.isolate import isolated
from agentrl.tools.options import OPTION_KEYS, read_options
from agentrl.tools.specs import WORKDIR, HttpSpec, ManagerSpec, McpSpec, Scope, ServerSpec, StdioSpec
from agentrl.tools.values import require_text, require_text_map, require_texts

_STDIO_KEYS = frozenset({"command", "args", "env", "cwd", "sandbox"})
_HTTP_KEYS = frozenset({"url", "headers", "headers_env", "transport"})
_HINT = (
    "write 'servers:' with entries 'NAME: {command, args, env, cwd, sandbox}' or 'NAME: {url, headers,"
    " headers_env}'; docs/tools.md lists every key"
)
_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_TRANSPORTS = {
    "stdio": None,
    "http": False,
    "streamable-http": False,
    "streamableHttp": False,
    "streamable_http": False,
    "sse": True,
}
"""What clients write as ``type`` or ``transport``: for HTTP, whether it is the older HTTP+SSE transport."""


def configured_servers(config: ToolConfig) -> list[ServerSpec]:
    """Return every server that the flags name; there may be none."""
    specs: list[ServerSpec] = []
    if config.mcp_servers_file is not None:
        specs.extend(load_servers(config.mcp_servers_file))
    if config.mcp_manager_url is not None:
        specs.append(_manager(config, config.mcp_manager_url))
    return specs


def load_servers(path: str | Path) -> list[McpSpec]:
    """Read the servers of a file, in order: ours in YAML, or the ``mcpServers`` JSON of other MCP clients.

    ``${VARIABLE}`` and ``${VARIABLE:-default}`` are replaced by environment variables; ``command: python``
    is the current interpreter. Raises ConfigError.
    """
    content = _content(Path(path))
    if isinstance(content, dict) and isinstance(content.get("mcpServers"), dict):
        return _foreign_servers(content["mcpServers"], f"{path}: mcpServers")
    servers = content.get("servers") if isinstance(content, dict) else None
    if not isinstance(servers, dict):
        raise ConfigError(f"{path} has neither a mapping 'servers' nor 'mcpServers'", hint=_HINT)
    return [_spec(str(name), entry, f"{path}: servers.{name}") for name, entry in servers.items()]


def _content(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--mcp_servers_file {path} cannot be read: {error.strerror}", hint="give an existing file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--mcp_servers_file {path} is not UTF-8", hint="save it as UTF-8") from error
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}", hint="correct that line") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}", hint="correct that line") from error


def _foreign_servers(servers: Mapping[str, Any], where: str) -> list[McpSpec]:
    """Read another client's servers: keys that only that client knows are ignored, disabled servers too."""
    known = _STDIO_KEYS | _HTTP_KEYS | OPTION_KEYS
    specs = []
    for name, entry in servers.items():
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}.{name} is not a mapping", hint=_HINT)
        if entry.get("disabled") is True or entry.get("enabled") is False:
            continue
        url = next((entry[key] for key in ("url", "httpUrl", "serverUrl") if key in entry), None)
        own = {key: value for key, value in entry.items() if key in known and key != "tools"}
        if url is not None:
            own["url"] = url
        if "type" in entry:
            own["transport"] = entry["type"]
        if "command" in own:
            own.pop("transport", None)
        specs.append(_spec(str(name), own, f"{where}.{name}"))
    return specs


def _spec(name: str, entry: Any, where: str) -> McpSpec:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is not a mapping", hint=_HINT)
    if ("command" in entry) == ("url" in entry):
        raise ConfigError(f"{where} needs either 'command' or 'url'", hint=_HINT)
    own_keys = _STDIO_KEYS if "command" in entry else _HTTP_KEYS
    unknown = sorted(set(entry) - own_keys - OPTION_KEYS)
    if unknown:
        raise ConfigError(f"{where} has unknown keys: {', '.join(map(str, unknown))}", hint=_HINT)
    entry = {**entry, **{key: _expand(entry[key], f"{where}.{key}") for key in own_keys & set(entry)}}
    return _stdio(name, entry, where) if "command" in entry else _http(name, entry, where)


def _stdio(name: str, entry: Mapping[str, Any], where: str) -> StdioSpec:
    command = require_text(entry["command"], f"{where}.command")
    spec = StdioSpec(
        name=name,
        command=sys.executable if command == "python" else command,
        args=require_texts(entry.get("args", ()), f"{where}.args"),
        env=require_text_map(entry.get("env") or {}, f"{where}.env"),
        cwd=None if entry.get("cwd") is None else require_text(entry["cwd"], f"{where}.cwd"),
        options=read_options(entry, where, default_scope=Scope.TRAJECTORY),
    )
    return isolated(spec, entry["sandbox"], f"{where}.sandbox") if "sandbox" in entry else spec


def _http(name: str, entry: Mapping[str, Any], where: str) -> HttpSpec:
    headers = require_text_map(entry.get("headers") or {}, f"{where}.headers")
    for header, variable in require_text_map(entry.get("headers_env", {}), f"{where}.headers_env").items():
        value = os.environ.get(variable)
        if value is None:
            raise ConfigError(
                f"{where}.headers_env names {variable}, which is not set", hint=f"export {variable}=…"
            )
        headers[header] = value
    transport = entry.get("transport", "http")
    if _TRANSPORTS.get(transport) is None:
        raise ConfigError(
            f"{where}.transport is {transport!r}, which no URL has", hint="use http (streamable HTTP) or sse"
        )
    return HttpSpec(
        name=name,
        url=_require_url(require_text(entry["url"], f"{where}.url"), f"{where}.url"),
        headers=headers,
        sse=bool(_TRANSPORTS[transport]),
        options=read_options(entry, where, default_scope=Scope.SHARED),
    )


def _manager(config: ToolConfig, url: str) -> ServerSpec:
    token = os.environ.get(config.mcp_auth_token_env)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = _require_url(url.rstrip("/"), "--mcp_manager_url")
    if url.endswith("/mcpapi"):
        return ManagerSpec(url=url, server=config.mcp_server_name, headers=headers)
    name = "mcp" if config.mcp_server_name == "all" else config.mcp_server_name
    return HttpSpec(name=name, url=url, headers=headers)


def _require_url(url: str, where: str) -> str:
    """Return ``url``. Raises ConfigError, without the URL's secrets, unless it is one of HTTP."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ConfigError(f"{where} is not a URL of HTTP", hint="write http://HOST:PORT/PATH or https://…")
    return url


def _expand(value: Any, where: str) -> Any:
    """Replace ``${VARIABLE}`` in texts, also inside lists and mappings. Raises ConfigError."""
    if isinstance(value, dict):
        return {key: _expand(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, where) for item in value]
    if not isinstance(value, str):
        return value

    def replace(found: re.Match[str]) -> str:
        name, default = found[1], found[2]
        if found[0] == WORKDIR:
            return WORKDIR
        if name not in os.environ and default is None:
            raise ConfigError(
                f"{where} names ${{{name}}}, which is not set",
                hint=f"export {name}=…, or write ${{{name}:-default}}",
            )
        return os.environ.get(name) or default or ""

    return _VARIABLE.sub(replace, value)
