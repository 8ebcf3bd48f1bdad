"""Kill gateway, harnesses, samplers and MongoDB with SIGKILL while 16 harness trajectories run.

    bash scripts/chaos.sh --harness 60

Every trajectory is a process of its own in a sandbox, whose model calls come through a gateway of its own
process. One after the other is killed for so many seconds; then all slots must end, each with one score.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import shutil
import signal
import sys
import time
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml
from waiting import comes_true

from agentrl.base.processes import ChildProcess, free_port
from agentrl.config.schema import RunConfig
from agentrl.documents.status import SlotStatus
from agentrl.documents.task import Slot, Task
from agentrl.store.client import Store, open_store
from agentrl.store.mechanics.retry import retry_outages
from chaos.actors import environment
from chaos.drill_services import HOST
from chaos.drills import Counts, count
from chaos.scene import GENERATIONS, READY_SECONDS, RUN, Scene

logger = logging.getLogger(__name__)

_CLIENT = "harness_client.py"
_AT_ONCE = 16
_AWAY_SECONDS = (0.5, 4.0)
_GAP_SECONDS = (1.0, 4.0)
_POLL_SECONDS = 0.2
_FINISH_SECONDS = 200.0
_GONE_SECONDS = 20.0
_STARTED_SECONDS = 20.0
"""Time for a sampler that was killed to run harnesses again."""

_ALIVE = ("engine", "gateway", "sampler-0", "sampler-1")


@dataclass(slots=True)
class Report:
    """What was killed, what became of the slots, and what is wrong."""

    slots: int
    kills: Counter[str] = field(default_factory=Counter)
    scored: int = 0
    attempts: int = 0
    violations: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return the counts, and ``N violations`` as the last line."""
        return [
            *(f"{f'kill {name}':<46} {number:>6}" for name, number in sorted(self.kills.items())),
            f"{'trajectories':<46} {self.slots:>6}",
            f"{'trajectories scored':<46} {self.scored:>6}",
            f"{'attempts':<46} {self.attempts:>6}",
            *(f"violation: {line}" for line in self.violations),
            f"{len(self.violations)} violations",
        ]


class HarnessScene(Scene):
    """The drills' engine and samplers, whose agent is a harness, and a gateway."""

    has_tools = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._mark = uuid.uuid4().hex
        """The last word of its harnesses' command lines: other scenes may run."""

    def prepare(self) -> None:
        """Write the harness too."""
        super().prepare()
        template = self.folder / "template"
        template.mkdir()
        shutil.copy(Path(__file__).with_name(_CLIENT), template / _CLIENT)
        system = Path("/usr/bin/python3")
        python = str(system) if system.exists() else sys.executable
        harness = {
            "command": [python, _CLIENT, self._mark], "workspace": {"template": "template"},
            "score": {"file": "score.txt"}, "limits": {"seconds": 200},
        }  # fmt: skip
        path = self.folder / "harness.yml"
        path.write_text(yaml.safe_dump(harness), encoding="utf-8")
        port = str(free_port())
        own = [
            "--gateway_url",
            f"http://{HOST}:{port}",
            "--agent_cfg_path",
            str(path),
            "--max_attempts",
            "1000",
        ]
        for name, words in self.processes.items():
            if name.startswith("sampler"):
                words.command = [*words.command, *own]
        self.processes["engine"].command = [*self.processes["engine"].command, "held"]
        flags = self.processes["sampler-0"].command[4:]
        self.processes["gateway"] = ChildProcess(
            name="gateway",
            command=[sys.executable, "-m", "agentrl", "gateway", *flags, "--gateway_port", port],
            log=self.folder / "gateway.out",
            env=environment(),
        )

    def task(self, number: int) -> Task:
        """Return a task that needs the engine and the gateway."""
        return Task(
            id=f"train/0/{number:05d}", task_id=f"{number:05d}", split="train", epoch=0, order=number,
            query=f"Question {number}: how many m are 1 km?", scorer="exact", agent_name="command", tools=(),
            slots=tuple(Slot(traj_id=place) for place in range(GENERATIONS)),
        )  # fmt: skip

    def harnesses(self) -> list[int]:
        """Return the processes of harnesses that run."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or ()
            if words[-1:] == [self._mark] and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        return found


async def run_harness_kills(folder: Path, seconds: float, *, tasks: int, seed: int) -> Report:
    """Kill for ``seconds`` while the slots of ``tasks`` are sampled; then wait for the end of all."""
    report = Report(slots=tasks * GENERATIONS)
    scene = HarnessScene(folder)
    await scene.mongo.start()
    try:
        await asyncio.to_thread(scene.prepare)
        run = RunConfig(run_name=RUN, db_connection_string=scene.mongo.uri, db_timeout_seconds=3.0)
        with retry_outages(120):
            async with await open_store(run) as store:
                async with scene.running(store, *_ALIVE):
                    await store.tasks.load([scene.task(number) for number in range(tasks)])
                    await _reach_trajectories(scene, min(_AT_ONCE, report.slots))
                    await _kill_for(scene, report, seconds, random.Random(f"harness/{seed}"))
                    counts = await wait_for_end(store, scene, report)
                await _check_slots(store, scene, report, counts)
        report.violations += await scene.check()
    finally:
        await scene.mongo.stop()
    return report


async def _reach_trajectories(scene: HarnessScene, number: int) -> None:
    """Wait until ``number`` harnesses run, or as many as come in time; only then let the engine answer."""
    await comes_true(lambda: len(scene.harnesses()) >= number, READY_SECONDS, _POLL_SECONDS)
    logger.info("%d harnesses run", len(scene.harnesses()))
    await scene.set_mode("engine", "up")


async def _kill_for(scene: HarnessScene, report: Report, seconds: float, rng: random.Random) -> None:
    """Kill in turn, in an order that changes, and start again what was killed."""
    deadline = time.monotonic() + seconds
    victims = ["gateway", "harness", "sampler-0", "sampler-1", "mongod"]
    rng.shuffle(victims)
    for name in itertools.cycle(victims):
        if time.monotonic() > deadline:
            return
        logger.info("kill %s", name)
        away = rng.uniform(*_AWAY_SECONDS)
        if name == "mongod":
            await scene.mongo.kill(away)
        elif name == "harness":
            await comes_true(lambda: len(scene.harnesses()) > 1, _STARTED_SECONDS, _POLL_SECONDS)
            if not _kill_harness(scene.harnesses(), rng):
                continue
        else:
            await asyncio.to_thread(scene.kill, name)
            await asyncio.sleep(away)
            scene.processes[name].start()
        report.kills[name.partition("-")[0]] += 1
        await asyncio.sleep(rng.uniform(*_GAP_SECONDS))


def _kill_harness(running: list[int], rng: random.Random) -> bool:
    with suppress(ProcessLookupError):
        if running:
            os.kill(rng.choice(running), signal.SIGKILL)
            return True
    return False


async def wait_for_end(store: Store, scene: Scene, report: Report) -> Counts:
    """Return the counts when all slots have ended; after a while, report what they wait for."""
    deadline = time.monotonic() + _FINISH_SECONDS
    while True:
        gone = scene.ended()  # before the counts: samplers end when all slots have
        counts = await count(store)
        if counts.scored + counts.closed >= report.slots:
            return counts
        if gone or time.monotonic() > deadline:
            report.violations += [*gone, *await _unfinished(store)]
            report.violations += [f"{name} says:\n{scene.last_words(name)}" for name in scene.processes]
            return counts
        await asyncio.sleep(0.5)


async def _unfinished(store: Store) -> list[str]:
    """Say of each slot that has not ended who holds it and until when, and what the samplers find down."""
    ended = (SlotStatus.SCORED, SlotStatus.FAILED)
    tasks = [Task.from_document(item) async for item in store.database["Task"].find({})]
    now = await store.connection.server_time()
    return [
        f"at {now:%X} {slot.record_id} is {slot.status}, owner {slot.owner}, lease until"
        f" {slot.lease_expires_at}, not before {slot.not_before}"
        for task in tasks
        for slot in task.slots
        if slot.status not in ended
    ] + [f"{each.dependency} is down for {each.by}: {each.why}" for each in await store.outages.ongoing()]


async def _check_slots(store: Store, scene: HarnessScene, report: Report, counts: Counts) -> None:
    """Every slot has ended with one score, and no harness is left."""
    report.scored, report.attempts = counts.scored, counts.claimed
    if (counts.scored, counts.closed) != (report.slots, 0):
        report.violations.append(
            f"of {report.slots} slots {counts.scored} are scored, {counts.closed} failed"
        )
    wrong = await store.database["Record"].count_documents(
        {"harness.run.ended": "exited", "status": "failed"}
    )
    if wrong:
        report.violations.append(f"{wrong} attempts failed although their harness succeeded")
    await comes_true(lambda: not scene.harnesses(), _GONE_SECONDS, _POLL_SECONDS)
    if left := scene.harnesses():
        report.violations.append(f"{len(left)} harnesses run on without a sampler")
