"""Run MCP servers over stdio in containers or in the sandbox of this machine: ``sandbox`` of an entry."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from agentrl.errors import ConfigError
from agentrl.tools.sandbox.docker import container_limits
from agentrl.tools.sandbox.launcher_process import start_code
from agentrl.tools.sandbox.limits import SandboxLimits
from agentrl.tools.sandbox.local import namespace_problem
from agentrl.tools.specs import WORKDIR, StdioSpec
from agentrl.tools.values import require_map, require_text, require_texts

_ISOLATIONS: Final = ("auto", "namespaces", "limits", "docker")
_KEYS: Final = {"isolation", "image", "network", "visible"}
_DEFAULTS: Final = {"seconds": 86400, "cpu_seconds": 3600, "processes": 64, "open_files": 256}
"""Limits of a server, which lives as long as its trajectory; the others are those of programs."""
_PACKAGE: Final = Path(__file__).parents[2]
"""The folder of this package, which is not below the interpreter if it is installed from a clone."""
_HINT: Final = "docs/tools.md lists the keys of 'sandbox'"


def isolated(spec: StdioSpec, settings: Any, where: str) -> StdioSpec:
    """Return the server that runs ``spec`` as ``settings`` say. Raises ConfigError.

    It starts in an empty private folder, the only one that it may write to; there ``${workdir}`` is ".".
    """
    given = require_map(settings, where)
    limits = SandboxLimits.of({**_DEFAULTS, **given}, where)
    unknown = sorted(set(given) - _KEYS - {item.name for item in dataclasses.fields(SandboxLimits)})
    if unknown:
        raise ConfigError(f"{where} has unknown keys: {', '.join(unknown)}", hint=_HINT)
    isolation = given.get("isolation", "auto")
    if isolation not in _ISOLATIONS:
        raise ConfigError(f"{where}.isolation is {isolation!r}", hint=f"use one of {', '.join(_ISOLATIONS)}")
    if spec.cwd is not None:
        raise ConfigError(
            f"{where}: a server in a sandbox has no 'cwd' of the host",
            hint="remove it: it has one of its own",
        )
    inner = dataclasses.replace(
        spec,
        args=tuple(arg.replace(WORKDIR, ".") for arg in spec.args),
        env={name: value.replace(WORKDIR, ".") for name, value in spec.env.items()},
    )
    network = require_text(given.get("network", "none"), f"{where}.network")
    if isolation == "docker":
        return _in_container(inner, given, limits, network, where)
    if "image" in given or network not in ("none", "host"):
        raise ConfigError(
            f"{where}: 'image' and a named 'network' are Docker's", hint="write isolation: docker"
        )
    return _in_sandbox(inner, given, limits, network, where)


def _in_container(
    spec: StdioSpec, given: Mapping[str, Any], limits: SandboxLimits, network: str, where: str
) -> StdioSpec:
    image = require_text(given.get("image", ""), f"{where}.image")
    command = "python3" if spec.command == sys.executable else spec.command
    named = [word for name in spec.env for word in ("--env", name)]
    arguments = [
        "run", "--interactive", "--init", "--label", "agentrl=tool-server",
        *container_limits(limits, network=network), *named, "--entrypoint", command, image, *spec.args,
    ]  # fmt: skip
    return dataclasses.replace(spec, command="docker", args=tuple(arguments))


def _in_sandbox(
    spec: StdioSpec, given: Mapping[str, Any], limits: SandboxLimits, network: str, where: str
) -> StdioSpec:
    isolation = given.get("isolation", "auto")
    problem = None if isolation == "limits" else namespace_problem()
    if problem is not None and isolation == "namespaces":
        raise ConfigError(
            f"{where}: this machine allows no namespaces: {problem}",
            hint="allow user namespaces (sysctl user.max_user_namespaces), or use isolation: docker or auto",
        )
    visible = [os.path.realpath(path) for path in require_texts(given.get("visible", ()), f"{where}.visible")]
    if spec.command == sys.executable:
        own = (sys.prefix, sys.base_prefix, str(_PACKAGE))
        visible += dict.fromkeys(path for part in own for path in (part, os.path.realpath(part)))
        spec = dataclasses.replace(spec, env={"PYTHONPATH": str(_PACKAGE.parent), **spec.env})
    job = {
        "code": "", "stdin": "", "python": "", "visible": visible, "directory": WORKDIR,
        "namespaces": isolation != "limits" and problem is None, "keep_files": False,
        "limits": dataclasses.asdict(limits), "command": [spec.command, *spec.args],
        "network": network,
    }  # fmt: skip
    # Values of variables may be secrets, and every user of the machine can read arguments.
    words = ("-I", "-S", "-c", start_code("attached"), json.dumps(job), json.dumps([*spec.env]))
    return dataclasses.replace(spec, command=sys.executable, args=words)
