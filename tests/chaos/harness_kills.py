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
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml
from waiting import comes_true

from agentrl.base.processes import ChildProcess, free_port
from agentrl.documents.status import SlotStatus
from agentrl.documents.task import Slot, Task
from agentrl.store.client import Store
from chaos.actors import environment
from chaos.drill_services import HOST
from chaos.drills import Counts, count
from chaos.report import Findings, row
from chaos.scene import GENERATIONS, READY_SECONDS, Scene

logger = logging.getLogger(__name__)

_CLIENT = "harness_client.py"
_AT_ONCE = 16
_POLL_SECONDS = 0.2
_FINISH_SECONDS = 200.0
_GONE_SECONDS = 20.0
_STARTED_SECONDS = 20.0
"""Time for a sampler that was killed to run harnesses again."""

_ALIVE = ("engine", "gateway", "sampler-0", "sampler-1")


@dataclass(kw_only=True)
class Report(Findings):
    """What was killed, and what became of the slots."""

    slots: int
    kills: Counter[str] = field(default_factory=Counter)
    scored: int = 0
    attempts: int = 0
    generated: int = 0
    """Tokens that the engine generated."""
    kept: int = 0
    """Tokens of the scored trajectories."""

    def figures(self) -> list[str]:
        """Return the counts."""
        slots = {
            "trajectories": self.slots, "trajectories scored": self.scored, "attempts": self.attempts,
            "tokens generated": self.generated, "tokens of scored trajectories": self.kept,
        }  # fmt: skip
        kills = {f"kill {name}": number for name, number in sorted(self.kills.items())}
        return [row(name, number) for name, number in (kills | slots).items()]


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
            "--gateway_url", f"http://{HOST}:{port}", "--agent_cfg_path", str(path), "--max_attempts", "1000",
        ]  # fmt: skip
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
    scene, rng = HarnessScene(folder), random.Random(f"harness/{seed}")
    victims = ["gateway", "harness", "sampler-0", "sampler-1", "mongod"]
    rng.shuffle(victims)

    async def kill_harness() -> bool:
        await comes_true(lambda: len(scene.harnesses()) > 1, _STARTED_SECONDS, _POLL_SECONDS)
        with suppress(ProcessLookupError, IndexError):  # it has ended, or none runs
            os.kill(rng.choice(scene.harnesses()), signal.SIGKILL)
            return True
        return False

    async with scene.opened(120) as store:
        async with scene.running(store, *_ALIVE):
            await store.tasks.load([scene.task(number) for number in range(tasks)])
            wanted = min(_AT_ONCE, report.slots)
            await comes_true(lambda: len(scene.harnesses()) >= wanted, READY_SECONDS, _POLL_SECONDS)
            logger.info("%d harnesses run", len(scene.harnesses()))
            await scene.set_mode("engine", "up")
            await kill_in_turn(scene, report, victims, seconds, rng, kill_other=kill_harness)
            counts = await wait_for_end(store, scene, report)
            await count_tokens(store, scene, report)
        await _check_slots(store, scene, report, counts)
        report.violations += await scene.check()
    return report


async def kill_in_turn(
    scene: Scene, report: Report, victims: Sequence[str], seconds: float, rng: random.Random, *,
    away: tuple[float, float] = (0.5, 4.0), gap: tuple[float, float] = (1.0, 4.0),
    kill_other: Callable[[], Awaitable[bool]] | None = None,
) -> None:  # fmt: skip
    """Kill ``victims`` in turn for ``seconds``, and start again what was killed, after ``away`` seconds.

    ``kill_other`` kills what is no process of the scene; it returns whether it did.
    """
    deadline = time.monotonic() + seconds
    for name in itertools.cycle(victims):
        if time.monotonic() > deadline:
            return
        logger.info("kill %s", name)
        if name == "mongod":
            await scene.mongo.kill(rng.uniform(*away))
        elif name in scene.processes:
            await asyncio.to_thread(scene.kill, name)
            await asyncio.sleep(rng.uniform(*away))
            scene.processes[name].start()
        elif kill_other is None or not await kill_other():
            continue
        report.kills[name.partition("-")[0]] += 1
        await asyncio.sleep(rng.uniform(*gap))


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


async def count_tokens(store: Store, scene: Scene, report: Report) -> None:
    """Add what the engine generated, and what of it the scored trajectories have."""
    report.generated = await scene.generated_tokens()
    scored = store.database["Record"].find({"score": {"$ne": None}}, {"generated_tokens": 1})
    report.kept = sum([record["generated_tokens"] async for record in scored])


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
