"""Programs as answers: the scorer ``code`` runs one against a task's tests; the environment lets it be tried.

A task's ``answer`` holds the tests: a list, or an object ``{"tests": […], "sandbox": {…}}`` with limits of
the sandbox. A test is ``{"input": text, "output": text}``, which the program reads and prints, or text:
Python with assertions, run after the program. ``{"inputs": […], "outputs": […]}`` is read too, and JSON text.

    agentrl tasks load 'env:code?file=problems.jsonl&n=500' --run_name …

Each line of the file is a task whose ``answer`` has the tests of the scorer ``code``, and whose ``sandbox``,
if given, the sandbox's limits and isolation.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from agentrl.base.user_code import require_allowed
from agentrl.documents.task import Task
from agentrl.documents.task_file import TaskSource
from agentrl.documents.task_json import BadTaskError
from agentrl.environments.environment import Environment, TaskRequest, environment
from agentrl.errors import ConfigError, ScorerError, TaskEnvironmentError, TaskFileError
from agentrl.scoring.scorers import ScorerContext, ScoreResult, scorer
from agentrl.worlds.containers.container import Execution
from agentrl.worlds.sandbox.tool import Sandbox, open_sandbox, output_text, sandbox_names

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTest:
    """One test: assertions, or an input and the output that it must give."""

    assertions: str | None = None
    stdin: str = ""
    stdout: str = ""


def program_of(answer: str) -> str:
    """Return the last fenced block of an answer, or the whole answer without one."""
    blocks = _FENCE.findall(answer)
    return str(blocks[-1]) if blocks else answer


def names_in_answer(answer: Any) -> list[str]:
    """Return the names that the sandbox in a task's answer needs permission for; none without tests."""
    try:
        return sandbox_names(_given(answer)[1])
    except ScorerError:
        return []


def read_tests(answer: Any) -> tuple[list[CodeTest], Mapping[str, Any]]:
    """Return the tests of a task and the sandbox's configuration. Raises ScorerError."""
    value, config = _given(answer)
    tests = [value] if isinstance(value, str) else value
    if not isinstance(tests, (list, tuple)) or not tests or not isinstance(config, Mapping):
        raise ScorerError(
            "the task's answer holds no tests",
            hint='give "answer": [{"input": "…", "output": "…"}] or ["assert f(1) == 2"]',
        )
    try:
        open_sandbox(config)
    except ConfigError as error:
        raise ScorerError(error.message, hint=error.hint) from error
    return [_test(item) for item in tests], config


def _given(answer: Any) -> tuple[Any, Any]:
    """Return the tests and the sandbox's configuration as they are given. Raises ScorerError."""
    try:
        value = json.loads(answer) if isinstance(answer, str) and answer.lstrip()[:1] in "[{" else answer
    except (ValueError, RecursionError) as error:
        raise ScorerError(f"the task's answer is not JSON: {error}") from error
    if not isinstance(value, Mapping):
        return value, {}
    return value["tests"] if "tests" in value else _pairs(value), value.get("sandbox") or {}


def _pairs(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ScorerError("'inputs' and 'outputs' of the task's answer are not two lists of one length")
    return [{"input": given, "output": expected} for given, expected in zip(inputs, outputs, strict=True)]


def _test(item: Any) -> CodeTest:
    if isinstance(item, str):
        return CodeTest(assertions=item)
    if isinstance(item, Mapping) and "output" in item:
        return CodeTest(stdin=_lines(item.get("input", "")), stdout=_lines(item["output"]))
    raise ScorerError(f"a test is {str(item)[:_SHOWN]!r}; it must be text or {{input, output}}")


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


@scorer("code", check_answer=read_tests, names_in_answer=names_in_answer)
async def code(context: ScorerContext) -> ScoreResult:
    """Return the share of the tests that the program passes; 0 without a program.

    Each test runs in a directory of its own. Raises ScorerError for malformed tests, and ToolServerError if
    no sandbox can run.
    """
    try:
        for name in names_in_answer(context.answer):
            require_allowed(name, "sandbox of the task's answer")
    except ConfigError as error:
        raise ScorerError(error.message, hint=error.hint) from error
    tests, config = read_tests(context.answer)
    if context.final_answer is None:
        return ScoreResult(0.0, {"passed": 0, "tests": len(tests)})
    program = program_of(context.final_answer)
    problems = [await _problem(open_sandbox(config), program, test) for test in tests]
    passed = problems.count(None)
    first = next((problem for problem in problems if problem is not None), None)
    details = {"passed": passed, "tests": len(tests), **({"first_problem": first} if first else {})}
    return ScoreResult(passed / len(tests), details)


async def _problem(sandbox: Sandbox, program: str, test: CodeTest) -> str | None:
    """Run one test; return what is wrong, or None."""
    try:
        if test.assertions is None:
            return _difference(await sandbox.run(program, test.stdin), test.stdout)
        mark = secrets.token_hex(16)
        done = await sandbox.run(with_assertions(program, test.assertions), f"{mark}\n")
        if done.succeeded and done.stdout.rstrip("\n").endswith(mark):
            return None
        return _failure(done) or "the program ended before its tests"
    finally:
        await sandbox.close()


_HARNESS = """\
import os, sys

def _run(program, tests, run=exec, translate=compile, write=os.write):
    mark = sys.stdin.readline().encode()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.unlink(__file__)
    space = {"__name__": "__main__"}
    run(translate(program, "answer.py", "exec"), space)
    run(translate(tests, "tests.py", "exec"), space)
    sys.stdout.flush()
    write(1, mark)

_run(%r, %r)
"""


def with_assertions(program: str, assertions: str) -> str:
    """Return a program that runs ``program``, then ``assertions``, then prints the line that it reads first.

    Neither the line nor the tests are in a file or a stream when ``program`` runs.
    """
    return _HARNESS % (program, assertions)


def _difference(done: Execution, expected: str) -> str | None:
    """Compare line by line, without white space at ends of lines and of the output."""
    if not done.succeeded:
        return _failure(done)
    if _normal(done.stdout) == _normal(expected):
        return None
    return f"printed {done.stdout[:_SHOWN]!r} instead of {expected[:_SHOWN]!r}"


def _normal(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _failure(done: Execution) -> str | None:
    if done.exceeded is not None:
        return f"exceeded the limit of {done.exceeded}"
    if done.exit_code != 0:
        last = done.stderr.rstrip().rpartition("\n")[2]
        return f"exit code {done.exit_code}: {last[:_SHOWN]}"
    return None


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
