"""Outage drills: each service of two samplers is down for a while; no attempt is used, nothing sampled twice.

    bash scripts/chaos.sh --drills 60        engine, tool server, judge and database, 60 s each
    bash scripts/chaos.sh --drills 60 --only judge

The samplers, the engine, the tool server, the judge and MongoDB are processes of their own. A drill waits
until trajectories are scored, takes one service away, brings it back, and waits until they are scored again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from agentrl.config.schema import RunConfig
from agentrl.documents.serving import InferenceService
from agentrl.documents.status import RecordStatus, ServiceStatus, SlotStatus
from agentrl.documents.task import Slot, Task
from agentrl.errors import AgentRLError
from agentrl.processes import ChildProcess, stop_child
from agentrl.store.client import Store, open_store
from agentrl.store.retry import retry_outages
from chaos.actors import environment
from chaos.database import SingleServer
from chaos.drill_services import HOST

logger = logging.getLogger(__name__)

RUN = "drills"
DRILLS = ("engine", "tool server", "judge", "database")
_NEEDED = {"engine": "the engines", "tool server": "tool server units", "judge": "judge"}
"""Drill → the beginning of what the samplers must report as down."""
_TASKS = 4000
_GENERATIONS = 2
_READY_SECONDS = 120.0
_RESUME_SECONDS = 120.0
_STOP_SECONDS = 30.0
_BUILD_SECONDS = 300.0
_SCORED_BETWEEN = 8
_BEAT_SECONDS = 1.0


@dataclass(slots=True, kw_only=True)
class Counts:
    """What the database holds at one moment."""

    claimed: int
    sampled: int
    scored: int
    attempts_used: int
    resampled: int


@dataclass(slots=True, kw_only=True)
class Drill:
    """One drill and what came of it."""

    name: str
    seconds: float
    claimed: int = 0
    """Claims made in the second half of the outage."""
    scored: int = 0
    """Scores during the outage."""
    reported: bool = True
    """Whether the samplers reported what was down."""
    resumed: float = 0.0
    """Seconds until a trajectory was scored after the outage."""
    attempts_used: int = 0
    resampled: int = 0


@dataclass(kw_only=True)
class Report:
    """All drills and the violations of the run."""

    drills: list[Drill] = field(default_factory=list)
    scored: int = 0
    violations: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return a table, and ``N violations`` as the last line."""
        titles = (
            "outage of",
            "seconds",
            "claims",
            "scores",
            "reported",
            "resumed in",
            "attempts used",
            "resampled",
        )
        rows = [
            (drill.name, f"{drill.seconds:.0f}", str(drill.claimed), str(drill.scored),
             "yes" if drill.reported else "NO", f"{drill.resumed:.1f} s", str(drill.attempts_used),
             str(drill.resampled))
            for drill in self.drills
        ]  # fmt: skip
        widths = [max(len(row[place]) for row in (titles, *rows)) for place in range(len(titles))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in (titles, *rows)
        ]
        return [
            *table,
            f"{self.scored} trajectories scored",
            *(f"violation: {line}" for line in self.violations),
            f"{len(self.violations)} violations",
        ]


class Scene:
    """The services, the samplers and the database of the drills."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mongo = SingleServer(folder / "mongo")
        self._ports = {name: _free_port() for name in ("engine", "judge", "tools")}
        self._model = folder / "model"
        self.engine_is_up = True
        self.processes: dict[str, ChildProcess] = {}

    def prepare(self) -> None:
        """Write the model and the configuration, and define the processes. Call it after ``mongo.start``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "agentrl.quickstart.tiny", str(self._model), "0"]
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
            "tools": ("-m", "agentrl.quickstart.servers.units", "--port", str(self._ports["tools"])),
            **dict.fromkeys(("sampler-0", "sampler-1"), ("-m", "agentrl", "sample", *self._flags())),
        }
        self.processes = {
            name: ChildProcess(
                name=name, command=[sys.executable, *words], log=self.folder / f"{name}.out",
                env=environment(),
            )
            for name, words in commands.items()
        }  # fmt: skip

    def check_command(self) -> list[str]:
        """Return the command that checks the database."""
        return [sys.executable, "-m", "agentrl", "db", "check", "--run_name", RUN,
                "--db_connection_string", self.mongo.uri, "--skip_files"]  # fmt: skip

    def kill(self, name: str) -> None:
        """Kill a service at once."""
        process, self.processes[name].process = self.processes[name].process, None
        if process is not None:
            process.kill()
            process.wait(_STOP_SECONDS)

    async def set_judge(self, mode: str) -> None:
        """Make the judge answer, refuse everybody, or answer with a page."""
        async with httpx.AsyncClient(timeout=5) as client:
            await client.post(f"http://{HOST}:{self._ports['judge']}/mode", content=mode)

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

    def _flags(self) -> Sequence[str]:
        flags = {
            "run_name": RUN, "db_connection_string": self.mongo.uri, "model_name_or_path": self._model,
            "mcp_servers_file": self.folder / "mcp.yml", "agent_config_path": self.folder / "agent.yml",
            "tool_call_parser": "hermes", "num_generations": _GENERATIONS, "max_turns": 3,
            "max_new_tokens": 64, "max_prompt_tokens": 2000, "prompt_reserve_tokens": 32,
            "max_concurrent_samples_per_process": 8, "groups_per_step": _TASKS, "lease_seconds": 12,
            "db_timeout_seconds": 3, "db_wait_seconds": 600,
            "log_dir": self.folder / "logs", "output_dir": self.folder / "output",
        }  # fmt: skip
        return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


async def run_drills(folder: Path, seconds: float, names: Sequence[str] = DRILLS) -> Report:
    """Run the drills one after another on one run, and return the report; stop everything at the end."""
    scene = Scene(folder)
    report = Report()
    await scene.mongo.start()
    try:
        await asyncio.to_thread(scene.prepare)
        run = RunConfig(run_name=RUN, db_connection_string=scene.mongo.uri, db_timeout_seconds=3.0)
        with retry_outages(600):
            async with await open_store(run) as store, _running(scene, store):
                await store.tasks.load([_task(number) for number in range(_TASKS)])
                await _scores(store, _SCORED_BETWEEN, _READY_SECONDS)
                for name in names:
                    report.drills.append(await _drill(scene, store, name, seconds))
                report.scored = (await _count(store)).scored
        await _check(scene, report)
    finally:
        await scene.mongo.stop()
    return report


@contextlib.asynccontextmanager
async def _running(scene: Scene, store: Store) -> AsyncIterator[None]:
    """Run all processes in the block."""
    beats = asyncio.create_task(scene.beat(store))
    try:
        for process in scene.processes.values():
            process.start()
        yield
    finally:
        beats.cancel()
        await asyncio.gather(beats, return_exceptions=True)
        for name in reversed(scene.processes):
            running = scene.processes[name].process
            if running is not None:
                await asyncio.to_thread(stop_child, running, _STOP_SECONDS if "sampler" in name else 2.0)


async def _drill(scene: Scene, store: Store, name: str, seconds: float) -> Drill:
    logger.info("outage of %s for %g s", name, seconds)
    before = await _count(store)
    drill = Drill(name=name, seconds=seconds)
    if name == "database":
        await scene.mongo.kill(seconds)
    else:
        await _take_away(scene, name)
        await asyncio.sleep(seconds / 2)
        middle = await _count(store)
        drill.reported = await _is_reported(store, name)
        if name == "judge":
            await scene.set_judge("html")
        await asyncio.sleep(seconds / 2)
        during = await _count(store)
        drill.reported = drill.reported or await _is_reported(store, name)
        drill.claimed = during.claimed - middle.claimed
        drill.scored = during.scored - before.scored
        await _bring_back(scene, name)
    started = time.monotonic()
    await _scores(store, 1, _RESUME_SECONDS)
    drill.resumed = time.monotonic() - started
    await _scores(store, _SCORED_BETWEEN, _RESUME_SECONDS)
    after = await _count(store)
    drill.attempts_used = after.attempts_used - before.attempts_used
    drill.resampled = after.resampled - before.resampled
    return drill


async def _is_reported(store: Store, name: str) -> bool:
    """Return whether a sampler has stored that the service is down."""
    return any(item.dependency.startswith(_NEEDED[name]) for item in await store.outages.ongoing())


async def _take_away(scene: Scene, name: str) -> None:
    if name == "judge":
        await scene.set_judge("limited")
        return
    scene.engine_is_up = name != "engine"
    await asyncio.to_thread(scene.kill, "engine" if name == "engine" else "tools")


async def _bring_back(scene: Scene, name: str) -> None:
    if name == "judge":
        await scene.set_judge("up")
        return
    scene.processes["engine" if name == "engine" else "tools"].start()
    scene.engine_is_up = True


async def _scores(store: Store, more: int, seconds: float) -> None:
    """Wait until ``more`` trajectories have been scored. Raises AgentRLError after ``seconds``."""
    goal = (await _count(store)).scored + more
    deadline = time.monotonic() + seconds
    while (await _count(store)).scored < goal:
        if time.monotonic() > deadline:
            raise AgentRLError(
                f"{more} trajectories were not scored within {seconds:g} s", hint="see the logs"
            )
        await asyncio.sleep(0.25)


async def _count(store: Store) -> Counts:
    records = await store.records.counts("train")
    tasks = [
        Task.from_document(item) async for item in store.database["Task"].find({"slots.attempt": {"$gt": 0}})
    ]
    slots = [slot for task in tasks for slot in task.slots]
    completed = {"completed_at": {"$ne": None}}
    lost = {**completed, "status": {"$in": [RecordStatus.FAILED.value, RecordStatus.RELEASED.value]}}
    return Counts(
        claimed=sum(slot.attempt for slot in slots),
        sampled=await store.database["Record"].count_documents(completed),
        scored=sum(
            records[status] for status in (RecordStatus.SCORED, RecordStatus.READY, RecordStatus.ABANDONED)
        ),
        attempts_used=sum(_used(slot) for slot in slots),
        resampled=await store.database["Record"].count_documents(lost),
    )


def _used(slot: Slot) -> int:
    """Return the attempts at a slot that count and did not lead to its trajectory."""
    counted = slot.attempt - slot.released
    return max(
        0, counted if slot.status is SlotStatus.FAILED else counted - (slot.status is not SlotStatus.OPEN)
    )


async def _check(scene: Scene, report: Report) -> None:
    for drill in report.drills:
        if drill.attempts_used or drill.resampled or not drill.reported:
            report.violations.append(
                f"outage of {drill.name}: attempts used, trajectories resampled or not reported"
            )
    done = await asyncio.to_thread(
        subprocess.run, scene.check_command(), capture_output=True, text=True, timeout=300, check=False
    )
    last = (done.stdout.splitlines() or [done.stderr[-300:]])[-1]
    if done.returncode != 0:
        report.violations.append(f"agentrl db check: {last}")


def _task(number: int) -> Task:
    return Task(
        id=f"train/0/{number:05d}", task_id=f"{number:05d}", split="train", epoch=0, order=number,
        query=f"Question {number}: how many m are 1 km?", answer="no such answer", scorer="agentcpm",
        agent_name="react", slots=tuple(Slot(traj_id=place) for place in range(_GENERATIONS)),
    )  # fmt: skip


def _free_port() -> int:
    with socket.socket() as server:
        server.bind((HOST, 0))
        return int(server.getsockname()[1])
