"""Read the options of a tool server's entry: scope, warm processes, hooks, offered tools, limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from agentrl.errors import ConfigError
from agentrl.tools.specs import Hook, Limits, Options, Scope
from agentrl.tools.values import (
    require_flag,
    require_map,
    require_number,
    require_text,
    require_texts,
    wrong,
)

OPTION_KEYS = frozenset(
    {
        "scope",
        "warm",
        "ordered",
        "setup",
        "teardown",
        "reset",
        "offer",
        "resources",
        "prompts",
        "limits",
        "tools",
    }
)
_HOOK = "a mapping {tool, arguments}"
_WHOLE = ("concurrency", "max_result_chars")


def read_options(entry: Mapping[str, Any], where: str, *, default_scope: Scope) -> Options:
    """Return the options of an entry. Raises ConfigError."""
    scope = entry.get("scope", default_scope.value)
    if scope not in list(Scope):
        raise ConfigError(f"{where}.scope is {scope!r}", hint=f"use one of {', '.join(Scope)}")
    options = Options(
        scope=Scope(scope),
        warm=int(require_number(entry.get("warm", 1), f"{where}.warm", least=0)),
        ordered=require_flag(entry.get("ordered", False), f"{where}.ordered"),
        setup=_hooks(entry.get("setup"), f"{where}.setup"),
        teardown=_hooks(entry.get("teardown"), f"{where}.teardown"),
        reset=None if entry.get("reset") is None else _hook(entry["reset"], f"{where}.reset"),
        offered=None if entry.get("offer") is None else require_texts(entry["offer"], f"{where}.offer"),
        resources=require_flag(entry.get("resources", False), f"{where}.resources"),
        prompts=require_flag(entry.get("prompts", False), f"{where}.prompts"),
        limits=_limits(entry.get("limits") or {}, f"{where}.limits"),
        tool_limits={
            name: _limits(limits, f"{where}.tools.{name}")
            for name, limits in require_map(entry.get("tools") or {}, f"{where}.tools").items()
        },
    )
    if options.reset is not None and options.scope is Scope.SHARED:
        raise ConfigError(
            f"{where}.reset clears a trajectory's own server, and the scope is shared",
            hint="write 'scope: trajectory', or leave 'reset' out",
        )
    return options


def _hooks(value: Any, where: str) -> tuple[Hook, ...]:
    items = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(_hook(item, f"{where}[{place}]") for place, item in enumerate(items))


def _hook(value: Any, where: str) -> Hook:
    if isinstance(value, str):
        return Hook(tool=require_text(value, where))
    if not isinstance(value, dict) or set(value) - {"tool", "arguments"} or "tool" not in value:
        raise wrong(value, where, f"a tool's name or {_HOOK}")
    return Hook(
        tool=require_text(value["tool"], f"{where}.tool"),
        arguments=require_map(value.get("arguments") or {}, f"{where}.arguments"),
    )


def _limits(value: Any, where: str) -> Limits:
    given = require_map(value, where)
    known = [item.name for item in dataclasses.fields(Limits)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(
            f"{where} has unknown keys: {', '.join(unknown)}", hint=f"use some of {', '.join(known)}"
        )
    numbers: dict[str, Any] = {}
    for name, number in given.items():
        least = 1 if name in _WHOLE else 0.001
        checked = require_number(number, f"{where}.{name}", least=least)
        numbers[name] = int(checked) if name in _WHOLE else checked
    return Limits(**numbers)
