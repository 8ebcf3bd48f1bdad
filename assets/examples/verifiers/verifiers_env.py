"""Train on an unmodified environment of verifiers, which runs in a venv of its own (verifiers_server.py)."""

import asyncio
import itertools
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl import Environment, Outcome, Rollout, ScoreResult, StopReason, TaskRequest, agent, environment
from agentrl.errors import ConfigError, TaskEnvironmentError, TaskFileError

HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("AGENTRL_VERIFIERS_PYTHON", HERE.parents[2] / ".venv-verifiers/bin/python"))
GYM = "verifiers.envs.integrations.reasoninggym_env:ReasoningGymEnv"
LONGEST_LINE = 1 << 24


@environment("verifiers")
class Verifiers(Environment):
    """Tasks are the rows of the environment's dataset; the agent ``verifiers`` runs them."""

    options = ("id", "args")
    task_defaults = {"agent_name": "verifiers_env:verifiers"}  # noqa: RUF012

    @classmethod
    def check(cls) -> None:
        """Raise ConfigError without the venv."""
        if not PYTHON.is_file():
            raise ConfigError(f"there is no {PYTHON}", hint="bash scripts/setup_verifiers.sh")

    @classmethod
    def tasks(cls, request: TaskRequest) -> Iterator[Mapping[str, Any]]:
        """Yield a task for each row of the train or eval dataset."""
        name, arguments = request.options.get("id", GYM), request.options.get("args", "{}")
        split = "train" if request.split == "train" else "eval"
        done = subprocess.run(
            [*_command(name, arguments), split, str(request.n)],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise TaskFileError(
                f"verifiers cannot load {name} with {arguments}: {done.stderr.strip()[-500:]}"
            )
        for line in done.stdout.splitlines():
            row = json.loads(line)
            question = str(row["prompt"][-1]["content"])
            yield {"query": question, "meta": {"id": name, "args": arguments, "row": row}}


class Server:
    """One process of verifiers_server.py; it ends with this process."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ids = itertools.count()
        self._starting = asyncio.Lock()

    async def run(self, name: str, arguments: str, **request: Any) -> dict[str, Any]:
        """Run one rollout; raise TaskEnvironmentError if the environment fails or the process ends."""
        async with self._starting:
            if self._process is None:
                pipe = asyncio.subprocess.PIPE
                self._process = await asyncio.create_subprocess_exec(
                    *_command(name, arguments), stdin=pipe, stdout=pipe, limit=LONGEST_LINE
                )
                self._reading = asyncio.create_task(self._read(self._process))
        number, answer = next(self._ids), asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._process.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
            found: dict[str, Any] = await answer
        finally:
            self._waiting.pop(number, None)
        if found.get("error"):
            raise TaskEnvironmentError(f"environment {name}: {found['error']}")
        return found

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        while line := await process.stdout.readline():
            found = json.loads(line)
            if (waiting := self._waiting.get(found["id"])) is not None and not waiting.done():
                waiting.set_result(found)
        self._process = None
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result({"error": "verifiers_server.py has ended; its messages are on stderr"})


_servers: dict[tuple[str, str], Server] = {}


@agent("verifiers")
async def verifiers(rollout: Rollout) -> Outcome:
    """Give the environment a base URL of this trajectory; its reward is the score."""
    meta = rollout.task.meta
    server = _servers.setdefault((meta["id"], meta["args"]), Server())
    async with rollout.gateway() as end:
        done = await server.run(
            meta["id"],
            meta["args"],
            row=meta["row"],
            base_url=end.base_url,
            api_key=end.api_key,
            model=end.model,
        )
    score = ScoreResult(float(done["reward"]), {"metrics": done["metrics"]})
    return Outcome(StopReason.ANSWERED, score=score)


def _command(name: str, arguments: str) -> list[str]:
    return [str(PYTHON), str(HERE / "verifiers_server.py"), name, arguments]
