"""Read verl's tool configuration, ``--tool_config_path``: tool classes with settings, and MCP servers."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentrl.errors import ConfigError
from agentrl.settings_file import read_settings
from agentrl.tools.config import load_servers
from agentrl.tools.specs import ManagerSpec, ServerSpec
from agentrl.tools.stateful import StatefulTools
from agentrl.validation import PlainText, Text, broken, wrong

_HINT = "write 'tools:' with a list of {class_name, config, tool_schema}, as in verl's examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredTools:
    """The tools of one file."""

    tools: tuple[StatefulTools, ...] = ()
    servers: tuple[ServerSpec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mcp:
    """The servers of an entry; keys that only verl reads are ignored, as in the whole file."""

    mcp_servers_config_path: Text
    tool_selected_list: tuple[PlainText, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A tool class with its settings, or MCP servers."""

    class_name: Text | None = None
    config: Mapping[str, Any] | None = None
    tool_schema: Any = None
    mcp: _Mcp | None = None

    def __post_init__(self) -> None:
        kind = (self.config or {}).get("type", "native")
        if kind not in ("native", "mcp") and self.mcp is None:
            raise wrong("native or mcp", "config", "type")
        if kind == "mcp" and self.mcp is None:
            raise broken("has no mcp_servers_config_path", "mcp", hint="give the path of a JSON file")
        if kind == "native" and self.class_name is None:
            raise broken("has no class_name")


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    tools: tuple[_Entry, ...]


def load_tools(path: str | None, *, call_timeout: float) -> ConfiguredTools:
    """Return the tools of the file; none without a path. Raises ConfigError."""
    if path is None:
        return ConfiguredTools()
    file = read_settings(path, what="--tool_config_path", hint=_HINT)
    tools: list[StatefulTools] = []
    servers: list[ServerSpec] = []
    for place, entry in enumerate(file.check(_File, file.content).tools):
        settings = dict(entry.config or {})
        if settings.pop("type", "native") == "native":
            where = f"{path}: tools[{place}]"
            name = str(entry.class_name)
            tools.append(
                StatefulTools.load(
                    _class(name, where), settings, entry.tool_schema, where=f"{where} ({name})",
                    call_timeout=call_timeout,
                )
            )  # fmt: skip
        elif entry.mcp is not None:
            servers += _offered(entry.mcp)
    return ConfiguredTools(tools=tuple(tools), servers=tuple(servers))


def _offered(mcp: _Mcp) -> list[ServerSpec]:
    """Return the servers, which offer only the tools that the entry selects."""
    return [
        spec
        if mcp.tool_selected_list is None or isinstance(spec, ManagerSpec)
        else replace(spec, options=replace(spec.options, offer=mcp.tool_selected_list))
        for spec in load_servers(mcp.mcp_servers_config_path)
    ]


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
