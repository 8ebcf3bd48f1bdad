"""Environment ``code``: programming tasks with tests; the model may run programs before it answers.

    agentrl tasks load 'env:code?file=problems.jsonl&n=500' --run_name …

Each line of the file is a task whose ``answer`` has the tests of the scorer ``code``, and whose ``sandbox``,
if given, the sandbox's limits and isolation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from agentrl.documents.task import Task
from agentrl.documents.task_messages import BadTaskError
from agentrl.documents.task_source import TaskSource
from agentrl.environments.base import Environment, TaskRequest, environment
from agentrl.errors import TaskEnvironmentError, TaskFileError
from agentrl.tools.sandbox.limits import sandbox_names
from agentrl.tools.sandbox.tool import Sandbox, open_sandbox, output_text

_SYSTEM = (
    "Write the Python program that is asked for. Try programs with run_python. Give the whole final program"
    " inside <answer></answer>."
)


@environment("code")
class Code(Environment):
    """Tasks of a file, a sandbox per trajectory, and the scorer ``code`` on the final program."""

    options = ("file",)
    tools = ("run_python",)
    task_defaults = {"scorer": "code", "agent_name": "react", "system_prompt": _SYSTEM}  # noqa: RUF012
    _sandbox: Sandbox | None = None

    @classmethod
    def tasks(cls, request: TaskRequest) -> Iterator[Mapping[str, Any]]:
        """Yield the first ``n`` tasks of the file. Raises TaskFileError for an invalid line."""
        path = request.options.get("file")
        if path is None:
            raise TaskFileError("env:code names no file", hint="env:code?file=problems.jsonl")
        for item in islice(TaskSource(Path(path)).items(), request.n):
            if isinstance(item.value, BadTaskError) or not isinstance(item.value, dict):
                raise TaskFileError(f"{path}:{item.line}: {item.value}", hint="write one JSON object a line")
            yield item.value

    @classmethod
    def names(cls, task: Task) -> list[str]:
        """Return the names that the task's sandbox needs permission for."""
        return sandbox_names(task.meta.get("sandbox"))

    async def setup(self) -> None:
        """Open the trajectory's sandbox."""
        self._sandbox = open_sandbox(self.task.meta.get("sandbox") or {})

    async def run_python(self, code: str) -> str:
        """Run a Python program and return what it prints. Files stay for the next program."""
        if self._sandbox is None:
            raise TaskEnvironmentError("the sandbox is not open")
        return output_text(await self._sandbox.run(code))

    async def teardown(self) -> None:
        """Delete the sandbox."""
        if self._sandbox is not None:
            await self._sandbox.close()
