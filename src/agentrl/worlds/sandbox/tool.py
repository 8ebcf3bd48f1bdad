"""Open a sandbox from its configuration, and let a model run Python in it: tool ``code_interpreter``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from agentrl.tools.python import StatefulTool, tool
from agentrl.tools.tool import Schema, function_schema
from agentrl.worlds.sandbox.container import ContainerSandbox
from agentrl.worlds.sandbox.limits import Execution, SandboxConfig
from agentrl.worlds.sandbox.local import LocalSandbox

_EXCEEDED = {
    "time": "the program was stopped: it took too long",
    "memory": "the program was stopped: it used too much memory",
    "output": "the program was stopped: it wrote too much output",
    "files": "the program was stopped: it wrote too many files",
}


class Sandbox(Protocol):
    """A private directory, and programs that run in it one after the other."""

    async def run(self, code: str, stdin: str = "") -> Execution:
        """Run a program. Raises ToolServerError if the sandbox itself fails."""
        ...

    async def close(self) -> None:
        """Delete the directory. Idempotent."""
        ...


def open_sandbox(config: Mapping[str, Any]) -> Sandbox:
    """Return the sandbox that ``config`` describes. Raises ConfigError."""
    chosen = SandboxConfig.of(config)
    if chosen.isolation == "docker":
        return ContainerSandbox(chosen, image=chosen.image)
    return LocalSandbox(chosen, isolation=chosen.isolation, python=chosen.python, visible=chosen.visible)


@tool("python_sandbox")
class PythonSandbox(StatefulTool):
    """Python in a sandbox. Programs of one trajectory share a private directory; ``config`` holds limits."""

    def __init__(self, config: Mapping[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self._sandboxes: dict[str, Sandbox] = {}
        open_sandbox(self.config)  # report an invalid configuration at the start

    def get_openai_tool_schema(self) -> Schema:
        """Return the schema of a tool with one parameter, the code."""
        code = {"type": "string", "description": "The program. It prints what you want to read."}
        return function_schema(
            "code_interpreter",
            "Runs a Python program and returns its output. Files stay for the next program.",
            {"type": "object", "properties": {"code": code}, "required": ["code"]},
        )

    async def create(self, instance_id: str, **kwargs: Any) -> str:
        """Open the trajectory's sandbox."""
        self._sandboxes[instance_id] = open_sandbox(self.config)
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        """Run ``parameters["code"]``; return its output and error output."""
        code = parameters.get("code")
        if not isinstance(code, str):
            raise ValueError("the parameter 'code' must be text")
        return output_text(await self._sandboxes[instance_id].run(code))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Delete the trajectory's sandbox."""
        sandbox = self._sandboxes.pop(instance_id, None)
        if sandbox is not None:
            await sandbox.close()


def output_text(done: Execution) -> str:
    """Return what the model reads of an execution."""
    parts = [done.stdout.rstrip("\n"), done.stderr.rstrip("\n")]
    if done.exceeded is not None:
        parts.append(f"[{_EXCEEDED[done.exceeded]}]")
    elif done.exit_code < 0:
        parts.append(f"[the program was ended by signal {-done.exit_code}]")
    elif done.exit_code > 0 and not done.stderr:
        parts.append(f"[the program ended with exit code {done.exit_code}]")
    return "\n".join(part for part in parts if part) or "[the program printed nothing]"
