"""Run what the outage drills need: samplers, an engine, a tool server, a judge and MongoDB, as processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx2
from waiting import comes_true

from agentrl.base.concurrency import background
from agentrl.base.processes import ChildProcess, free_port, stop_child, tail
from agentrl.config.schema import RunConfig
from agentrl.documents.run import InferenceService
from agentrl.documents.status import ServiceStatus
from agentrl.documents.task import Slot, Task
from agentrl.errors import AgentRLError
from agentrl.store.client import Store, open_store
from agentrl.store.mechanics.retry import retry_outages
from chaos.actors import environment
from chaos.database import SingleServer
from chaos.drill_services import HOST

RUN = "drills"
GENERATIONS = 2
READY_SECONDS = 120.0
_STOP_SECONDS = 30.0
_BUILD_SECONDS = 300.0
_CHECK_SECONDS = 300.0
_BEAT_SECONDS = 1.0


class Scene:
    """The services, the samplers and the database of the drills."""

    has_tools = True
    """Whether the samplers know of the tool server: their start waits for one that does not run."""

    def __init__(self, folder: Path, *, has_manager: bool = False) -> None:
        """``has_manager``: the tool server is an MCP manager."""
        self.folder = folder
        self._has_manager = has_manager
        self.mongo = SingleServer(folder / "mongo")
        self._ports = {name: free_port() for name in ("engine", "judge", "tools")}
        self._model = folder / "model"
        self.engine_is_up = True
        self.processes: dict[str, ChildProcess] = {}

    @contextlib.asynccontextmanager
    async def opened(self, wait_seconds: float) -> AsyncIterator[Store]:
        """Start MongoDB, write the files and yield the store, whose calls wait out outages; then stop it."""
        await self.mongo.start()
        try:
            await asyncio.to_thread(self.prepare)
            run = RunConfig(run_name=RUN, db_connection_string=self.mongo.uri, db_timeout_seconds=3.0)
            with retry_outages(wait_seconds):
                async with await open_store(run) as store:
                    yield store
        finally:
            await self.mongo.stop()

    def prepare(self) -> None:
        """Write the model and the configuration, and define the processes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "agentrl.base.installation", "demo/tiny.py", str(self._model), "0"]
        subprocess.run(command, check=True, timeout=_BUILD_SECONDS, env=environment())
        tools = {"servers": {"units": {"url": f"http://{HOST}:{self._ports['tools']}/mcp"}}}
        (self.folder / "mcp.yml").write_text(json.dumps(tools), encoding="utf-8")
        model = {"model": "judge", "base_url": f"http://{HOST}:{self._ports['judge']}/v1", "api_key": "none"}
        judge = {"scorer_agent": {"models": [model], "max_retries": 1, "retry_delay": 0.2, "timeout": 5}}
        (self.folder / "agent.yml").write_text(json.dumps(judge), encoding="utf-8")
        services = "chaos.drill_services"
        commands = {
            "engine": ("-m", services, "engine", str(self._ports["engine"]), str(self._model)),
            "judge": ("-m", services, "judge", str(self._ports["judge"])),
            "tools": (
                ("-m", services, "manager", str(self._ports["tools"]))
                if self._has_manager
                else ("-m", "agentrl.base.installation", "demo/units.py", "--port", str(self._ports["tools"]))
            ),
            **dict.fromkeys(("sampler-0", "sampler-1"), ("-m", "agentrl", "sample", *self._flags())),
        }
        self.processes = {
            name: ChildProcess(
                name=name, command=[sys.executable, *words], log=self.folder / f"{name}.out",
                env=environment(),
            )
            for name, words in commands.items()
        }  # fmt: skip

    async def check(self) -> list[str]:
        """Return what ``agentrl db check`` finds wrong in the database."""
        command = [sys.executable, "-m", "agentrl", "db", "check", "--run_name", RUN,
                   "--db_connection_string", self.mongo.uri, "--skip_files"]  # fmt: skip
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False
        )
        return [] if done.returncode == 0 else [f"agentrl db check: {(done.stdout or done.stderr)[-300:]}"]

    def kill(self, name: str) -> None:
        """Kill a service at once."""
        process, self.processes[name].process = self.processes[name].process, None
        if process is not None:
            process.kill()
            process.wait(_STOP_SECONDS)

    def ended(self) -> list[str]:
        """Say which processes ended by themselves, and their last words: nobody starts them again."""
        return [
            f"{name} ended by itself with exit code {each.process.returncode}:\n{self.last_words(name)}"
            for name, each in self.processes.items()
            if each.process is not None and each.process.poll() is not None
        ]

    def last_words(self, name: str) -> str:
        """Return the end of what a process has written."""
        return tail(self.folder / f"{name}.out")

    async def set_mode(self, name: str, mode: str) -> None:
        """Make the judge or the manager answer, refuse everybody, or answer with a page."""
        async with httpx2.AsyncClient(timeout=5) as client:
            await client.post(f"http://{HOST}:{self._ports[name]}/mode", content=mode)

    async def generated_tokens(self) -> int:
        """Return how many tokens the engine has generated, also those that nobody has received."""
        async with httpx2.AsyncClient(timeout=5) as client:
            found = await client.get(f"http://{HOST}:{self._ports['engine']}/generated")
        return int(found.json())

    async def start(self, name: str) -> None:
        """Start a service, and wait until it listens."""
        self.processes[name].start()
        await self.listens(name)

    async def listens(self, name: str) -> None:
        """Wait until a service listens."""
        if not await comes_true(lambda: _listens(self._ports[name]), READY_SECONDS, every=0.1):
            raise AgentRLError(f"{name} does not listen", hint=f"see {self.folder}/{name}.out")

    async def beat(self, store: Store) -> None:
        """Register the engine, and send its heartbeats while it is up."""
        service = InferenceService(
            id="engine", url=f"http://{HOST}:{self._ports['engine']}", engine="sglang", model="tiny",
            status=ServiceStatus.READY, policy_version=0, host=HOST, pid=1,
        )  # fmt: skip
        await store.services.register(service)
        while True:
            if self.engine_is_up:
                await store.services.beat(
                    "engine", status=ServiceStatus.READY, policy_version=0, running_requests=0
                )
            await asyncio.sleep(_BEAT_SECONDS)

    @contextlib.asynccontextmanager
    async def running(self, store: Store, *names: str) -> AsyncIterator[None]:
        """Run the processes ``names`` in the block, or all; end all at its end."""
        try:
            for name in names or self.processes:
                self.processes[name].start()
            async with background(self.beat(store)):
                yield
        finally:
            for name in reversed(self.processes):
                running = self.processes[name].process
                if running is not None:
                    await asyncio.to_thread(stop_child, running, _STOP_SECONDS if "sampler" in name else 2.0)

    def task(self, number: int) -> Task:
        """Return a task that needs the engine, the tool server and the judge."""
        return Task(
            id=f"train/0/{number:05d}", task_id=f"{number:05d}", split="train", epoch=0, order=number,
            query=f"Question {number}: how many m are 1 km?", answer="no such answer", scorer="agentcpm",
            agent_name="react", slots=tuple(Slot(traj_id=place) for place in range(GENERATIONS)),
        )  # fmt: skip

    def _flags(self) -> Sequence[str]:
        flags: dict[str, object] = {
            "run_name": RUN, "db_connection_string": self.mongo.uri, "model_name_or_path": self._model,
            "agent_config_path": self.folder / "agent.yml",
            "tool_call_parser": "hermes", "num_generations": GENERATIONS, "max_turns": 3,
            "max_new_tokens": 64, "max_prompt_tokens": 2000, "prompt_reserve_tokens": 32,
            "max_concurrent_samples_per_process": 8, "groups_per_step": 4000, "lease_seconds": 12,
            "db_timeout_seconds": 3, "db_wait_seconds": 600,
            "verbose": True, "log_dir": self.folder / "logs", "output_dir": self.folder / "output",
        }  # fmt: skip
        if self._has_manager:
            flags["mcp_manager_url"] = f"http://{HOST}:{self._ports['tools']}/mcpapi"
        elif self.has_tools:
            flags["mcp_servers_file"] = self.folder / "mcp.yml"
        return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0
