"""Run an environment of the package verifiers, unmodified, in a venv of its own; as environment or as agent.

    agentrl tasks load 'env:verifiers?id=my_environment&n=500' --run_name …

A sampler has one process for each environment (``verifiers_worker.py``). It runs all rollouts, each against
the gateway of its trajectory, and scores them; the agent ``verifiers`` waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from agentrl.base.installation import clone
from agentrl.base.user_code import call_name
from agentrl.base.validation import SettingsModel, Text
from agentrl.documents.status import StopReason
from agentrl.documents.task import Task
from agentrl.environments.environment import Environment, TaskRequest, environment
from agentrl.errors import (
    ENGINES,
    ConfigError,
    EngineError,
    TaskEnvironmentError,
    TaskFileError,
    TrajectoryError,
)
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.agents import agent
from agentrl.rollout.rollout import Rollout
from agentrl.scoring.scorers import ScorerContext, ScoreResult
from agentrl.worlds.address import Digits, JsonObject, read_options
from agentrl.worlds.harness.agent import STOPPED, is_up

_WORKER: Final = Path(__file__).with_name("verifiers_worker.py")
_VARIABLE: Final = "AGENTRL_VERIFIERS_PYTHON"
_LONGEST_LINE: Final = 1 << 24
_START_SECONDS: Final = 300.0
"""Longest time in which an environment loads: datasets and tool servers come up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options(SettingsModel):
    id: Text
    args: JsonObject = "{}"
    skip: Digits = 0


@environment("verifiers")
class Verifiers(Environment):
    """Tasks are those of the environment's taskset or dataset; the agent ``verifiers`` runs them."""

    options = tuple(item.name for item in fields(_Options))
    task_defaults = {"agent_name": "verifiers"}  # noqa: RUF012

    @classmethod
    def check(cls) -> None:
        """Raise ConfigError without the venv."""
        if not (python := _python()).is_file():
            in_clone = "bash scripts/setup_verifiers.sh"
            by_hand = "python3 -m venv .venv-verifiers && .venv-verifiers/bin/pip install verifiers uv"
            raise ConfigError(
                f"there is no {python}, which runs environments of verifiers",
                hint=f"{in_clone if clone() else by_hand}; or name the Python of another venv in {_VARIABLE}",
            )

    @classmethod
    def tasks(cls, request: TaskRequest) -> Iterator[Mapping[str, Any]]:
        """Yield a task for each row behind the first ``skip``. Raises TaskFileError if it cannot load."""
        example = "env:verifiers?id=my_environment&skip=1000"
        given = {name: value for name, value in request.options.items() if value}
        options = read_options(_Options, given, "verifiers", example)
        meta = {"id": options.id, "args": options.args}
        done = subprocess.run(
            [*_command(meta), request.split, str(options.skip), str(request.n)],
            env=_variables(), capture_output=True, text=True, timeout=_START_SECONDS, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            why = done.stderr.strip()[-800:]
            raise TaskFileError(f"verifiers cannot load {options.id} with args={meta['args']}: {why}")
        for line in done.stdout.splitlines():
            task = json.loads(line)
            yield {"query": task["query"], "meta": {**meta, "row": task["row"]}}

    @classmethod
    def names(cls, task: Task) -> list[str]:
        """Return the package with its arguments, which may choose commands to run."""
        return [call_name(str(task.meta.get("id")), str(task.meta.get("args", "{}")))]

    async def play(self, *, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        """Run the rollout of the task; return its ``reward``, ``metrics``, ``answer`` and ``stop``.

        Raises TaskEnvironmentError if the environment fails, or its process ends.
        """
        meta = self.task.meta
        worker = _workers.setdefault((meta["id"], meta["args"]), _Worker(meta))
        return await worker.run(row=meta["row"], base_url=base_url, api_key=api_key, model=model)

    @classmethod
    async def score(cls, context: ScorerContext) -> float:
        """Return 0: the rollout ended at a limit of this run before verifiers could score it."""
        return 0.0


class _Worker:
    """The process of one environment; it starts with the first rollout, and ends with this process."""

    def __init__(self, meta: Mapping[str, Any]) -> None:
        self._meta = meta
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ids = itertools.count()
        self._starting = asyncio.Lock()

    async def run(self, **request: str) -> dict[str, Any]:
        """Run one rollout; one that is cancelled is cancelled there too."""
        async with self._starting:
            process = self._process = self._process or await self._start()
        number, answer = next(self._ids), asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            _send(process, {"id": number, **request})
            found: dict[str, Any] = await answer
        except asyncio.CancelledError:
            _send(process, {"cancel": number})
            raise
        finally:
            self._waiting.pop(number, None)
        if found.get("error"):
            raise TaskEnvironmentError(f"environment {self._meta['id']}: {found['error']}")
        return found

    async def _start(self) -> asyncio.subprocess.Process:
        name, pipe = self._meta["id"], asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *_command(self._meta), env=_variables(), stdin=pipe, stdout=pipe, limit=_LONGEST_LINE
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_SECONDS):
                first = await process.stdout.readline()
        except BaseException as error:
            process.kill()
            if isinstance(error, TimeoutError):
                raise TaskEnvironmentError(
                    f"environment {name} of verifiers did not load in {_START_SECONDS:g} s"
                ) from error
            raise
        if not first:
            code = await process.wait()
            raise TaskEnvironmentError(
                f"environment {name} of verifiers does not load: exit status {code}; its messages are above"
            )
        self._reading = asyncio.create_task(self._read(process, process.stdout))
        return process

    async def _read(self, process: asyncio.subprocess.Process, lines: asyncio.StreamReader) -> None:
        """Hand each answer to its rollout; when the process ends, fail those that wait."""
        try:
            while line := await lines.readline():
                found = json.loads(line)
                if (waiting := self._waiting.get(found["id"])) is not None and not waiting.done():
                    waiting.set_result(found)
            why = f"its process ended with exit status {await process.wait()}"
        except (ValueError, TypeError, KeyError) as error:  # a line longer than the limit, or not an answer
            process.kill()
            why = f"its process wrote a malformed answer: {error}"
        self._process = None
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result({"error": why})


_workers: dict[tuple[str, str], _Worker] = {}


def _send(process: asyncio.subprocess.Process, message: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")


def _python() -> Path:
    return Path(os.environ.get(_VARIABLE) or (clone() or Path.cwd()) / ".venv-verifiers/bin/python")


def _command(meta: Mapping[str, Any]) -> list[str]:
    return [str(_python()), "-P", str(_WORKER), meta["id"], meta["args"]]


def _variables() -> dict[str, str]:
    """Return this process's variables with the venv in PATH: verifiers calls uv."""
    return {**os.environ, "PATH": f"{_python().parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


@agent("verifiers")
async def verifiers(rollout: Rollout) -> Outcome:
    """Give the environment a base URL of this trajectory; its reward is the score."""
    environment = rollout.environment
    if not isinstance(environment, Verifiers):
        raise TrajectoryError("the task is not of an environment of verifiers", hint="env:verifiers?id=…")
    async with rollout.gateway() as endpoint:
        try:
            done = await environment.play(
                base_url=endpoint.base_url, api_key=endpoint.api_key, model=endpoint.model
            )
        except TaskEnvironmentError as error:
            if not await is_up(endpoint.base_url):
                raise EngineError(f"the gateway did not answer: {error.message}", outage=ENGINES) from error
            raise
    details = {"metrics": done["metrics"], "stop": done["stop"]}
    stopped = STOPPED.get(endpoint.result.stopped_by or "", StopReason.ANSWERED)
    return Outcome(stopped, done["answer"], ScoreResult(float(done["reward"]), details))
