"""Read the MCP servers of a run from ``--mcp_servers_file`` and ``--mcp_manager_url``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agentrl.config.schema import ToolConfig
from agentrl.errors import ConfigError

_STDIO_KEYS = frozenset({"command", "args", "env", "cwd"})
_HTTP_KEYS = frozenset({"url", "headers", "headers_env"})
_HINT = (
    "write 'servers:' with entries 'NAME: {command, args, env, cwd}' or 'NAME: {url, headers, headers_env}'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioSpec:
    """A server that runs as a child process."""

    name: str
    command: str
    args: tuple[str, ...] = field(default=(), repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSpec:
    """A server behind streamable HTTP."""

    name: str
    url: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerSpec:
    """An MCP manager: many servers behind one HTTP interface; ``server`` is one of them, or ``all``."""

    url: str = field(repr=False)
    server: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


ServerSpec = StdioSpec | HttpSpec | ManagerSpec


def configured_servers(config: ToolConfig) -> list[ServerSpec]:
    """Return every server that the flags name; there may be none."""
    specs: list[ServerSpec] = []
    if config.mcp_servers_file is not None:
        specs.extend(load_servers(config.mcp_servers_file))
    if config.mcp_manager_url is not None:
        specs.append(_manager(config, config.mcp_manager_url))
    return specs


def load_servers(path: str | Path) -> list[ServerSpec]:
    """Read the servers of a YAML file, in order. ``command: python`` is the current interpreter."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--mcp_servers_file {path} cannot be read: {error.strerror}", hint="give an existing file"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}", hint="correct that line") from error
    servers = content.get("servers") if isinstance(content, dict) else None
    if not isinstance(servers, dict):
        raise ConfigError(f"{path} has no mapping 'servers'", hint=_HINT)
    return [_spec(str(name), entry, f"{path}: servers.{name}") for name, entry in servers.items()]


def _spec(name: str, entry: Any, where: str) -> ServerSpec:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is not a mapping", hint=_HINT)
    if ("command" in entry) == ("url" in entry):
        raise ConfigError(f"{where} needs either 'command' or 'url'", hint=_HINT)
    known = _STDIO_KEYS if "command" in entry else _HTTP_KEYS
    unknown = sorted(set(entry) - known)
    if unknown:
        raise ConfigError(f"{where} has unknown keys: {', '.join(map(str, unknown))}", hint=_HINT)
    if "command" in entry:
        command = _text(entry["command"], f"{where}.command")
        return StdioSpec(
            name=name,
            command=sys.executable if command == "python" else command,
            args=_texts(entry.get("args", ()), f"{where}.args"),
            env=_text_map(entry.get("env", {}), f"{where}.env"),
            cwd=None if entry.get("cwd") is None else _text(entry["cwd"], f"{where}.cwd"),
        )
    headers = _text_map(entry.get("headers", {}), f"{where}.headers")
    for header, variable in _text_map(entry.get("headers_env", {}), f"{where}.headers_env").items():
        value = os.environ.get(variable)
        if value is None:
            raise ConfigError(
                f"{where}.headers_env names {variable}, which is not set", hint=f"export {variable}=…"
            )
        headers[header] = value
    return HttpSpec(name=name, url=_text(entry["url"], f"{where}.url"), headers=headers)


def _manager(config: ToolConfig, url: str) -> ServerSpec:
    token = os.environ.get(config.mcp_auth_token_env)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = url.rstrip("/")
    if url.endswith("/mcpapi"):
        return ManagerSpec(url=url, server=config.mcp_server_name, headers=headers)
    name = "mcp" if config.mcp_server_name == "all" else config.mcp_server_name
    return HttpSpec(name=name, url=url, headers=headers)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where} is {value!r}; it must be text", hint=_HINT)
    return value


def _texts(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{where} is {value!r}; it must be a list", hint=_HINT)
    return tuple(str(item) for item in value)


def _text_map(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {value!r}; it must be a mapping", hint=_HINT)
    return {str(key): str(item) for key, item in value.items()}
