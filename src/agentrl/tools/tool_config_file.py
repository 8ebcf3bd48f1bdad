"""Read verl's tool configuration, ``--tool_config_path``: tool classes with settings, and MCP servers."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from agentrl.errors import ConfigError
from agentrl.tools.config import load_servers
from agentrl.tools.specs import ManagerSpec, ServerSpec
from agentrl.tools.stateful import StatefulTools

_HINT = "write 'tools:' with a list of {class_name, config, tool_schema}, as in verl's examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredTools:
    """The tools of one file."""

    tools: tuple[StatefulTools, ...] = ()
    servers: tuple[ServerSpec, ...] = ()


def load_tools(path: str | None, *, call_timeout: float) -> ConfiguredTools:
    """Return the tools of the file; none without a path. Raises ConfigError."""
    if path is None:
        return ConfiguredTools()
    tools: list[StatefulTools] = []
    servers: list[ServerSpec] = []
    for place, entry in enumerate(_entries(path)):
        where = f"{path}: tools[{place}]"
        config = _mapping(entry.get("config"), f"{where}.config")
        kind = str(config.get("type", "native"))
        if kind == "native":
            tools.append(_native(entry, config, where, call_timeout))
        elif kind == "mcp" or "mcp" in entry:
            servers += _mcp(entry, where)
        else:
            raise ConfigError(f"{where}.config.type is {kind!r}", hint="choose native or mcp")
    return ConfiguredTools(tools=tuple(tools), servers=tuple(servers))


def _native(
    entry: Mapping[str, Any], config: Mapping[str, Any], where: str, call_timeout: float
) -> StatefulTools:
    name = entry.get("class_name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where} has no class_name", hint=_HINT)
    schema = entry.get("tool_schema")
    settings = {key: value for key, value in config.items() if key != "type"}
    return StatefulTools.load(
        _class(name, where), settings, schema, where=f"{where} ({name})", call_timeout=call_timeout
    )


def _class(name: str, where: str) -> Any:
    """Import ``module.Class`` or ``module:Class``."""
    module, _, attribute = name.rpartition(":" if ":" in name else ".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        hint = "the path is module.Class; its file must lie in the working folder or on PYTHONPATH"
        if module.partition(".")[0] == "verl":
            hint = "install verl, or name another class: agentrl.tools.sandbox.tool.PythonSandbox"
        raise ConfigError(f"{where}: class_name {name!r} cannot be imported: {error}", hint=hint) from error


def _mcp(entry: Mapping[str, Any], where: str) -> list[ServerSpec]:
    mcp = _mapping(entry.get("mcp"), f"{where}.mcp")
    path = mcp.get("mcp_servers_config_path")
    if not isinstance(path, str):
        raise ConfigError(f"{where}.mcp has no mcp_servers_config_path", hint="give the path of a JSON file")
    names = mcp.get("tool_selected_list")
    if names is not None and not isinstance(names, list):
        raise ConfigError(f"{where}.mcp.tool_selected_list is {names!r}", hint="give a list of tool names")
    specs = load_servers(path)
    return list(specs) if names is None else [_offering(spec, tuple(map(str, names))) for spec in specs]


def _offering(spec: ServerSpec, names: tuple[str, ...]) -> ServerSpec:
    """Return a server that offers only the tools ``names``."""
    if isinstance(spec, ManagerSpec):
        return spec
    return replace(spec, options=replace(spec.options, offered=names))


def _entries(path: str) -> list[Mapping[str, Any]]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--tool_config_path {path} cannot be read: {error.strerror}", hint="give an existing file"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}", hint="correct that line") from error
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ConfigError(f"{path} has no list 'tools'", hint=_HINT)
    return [_mapping(entry, f"{path}: tools[{place}]") for place, entry in enumerate(entries)]


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {value!r}; it must be a mapping", hint=_HINT)
    return value
