"""Measure what a scored trajectory costs while its samplers are killed: generated tokens and tool seconds.

    python scripts/bench/durable.py [--quick] [--only NAME ...] [--seed 0] [--json FILE]

Four samplers run 64 trajectories against an engine and a tool of other processes. ``undisturbed``: 20 turns,
a tool of one second. ``killed``: the same, and a random sampler is killed by SIGKILL every 15 seconds.
``short_lived``: 40 turns, a tool of two seconds, and no sampler lives longer than 60 seconds, which is less
than a trajectory takes. ``program`` and ``program_killed``: 96 trajectories of 10 turns, each a program of
its own behind the gateway of its sampler, which runs the tool itself; a kill every 8 seconds. ``drained``: as
``killed``, by SIGTERM, and always the oldest sampler. A sampler that ends is replaced at once. Engine and
tool count what they did, for whomever; scoring is instant. Exits with 1 if a killed run costs more than 1.1 ×
the undisturbed one, of programs 1.2 ×, a drained one 1.01 ×, or if a trajectory of the short-lived samplers
gets no score in time.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from commands import command, database, environment
from harness import Row, bench_parser, finish
from rollout import make_model

from agentrl.base.processes import start_child, stop_children, tail
from agentrl.config.schema import RunConfig
from agentrl.documents.run import InferenceService
from agentrl.documents.status import ServiceStatus
from agentrl.documents.task import Slot, Task, task_key
from agentrl.store.client import Store, open_store

HERE = Path(__file__).parent
GENERATIONS = 4
_POLL_SECONDS = 0.25
_BEAT_SECONDS = 2.0
_READY_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run; times are in seconds."""

    turns: int
    tool: float
    """Length of one tool call."""
    generation: float = 0.3
    """Length of one model call."""
    trajectories: int = 64
    samplers: int = 4
    concurrency: int
    """Trajectories that one sampler runs at a time."""
    lease: float = 10.0
    limit: float = 600.0
    """When the run ends though trajectories have no score yet."""
    kill_every: float | None = None
    """Time between two kills of a random sampler; None: there are none."""
    drains: bool = False
    """Samplers get SIGTERM instead of SIGKILL."""
    lifetime: float | None = None
    """Age at which each sampler is killed; None: never."""
    is_program: bool = False
    """Each trajectory is a process of its own, ``durable_program.py``, behind the gateway of its sampler."""


_PROGRAM = Case(turns=10, tool=1.0, trajectories=96, concurrency=6, is_program=True)
_TWENTY = Case(turns=20, tool=1.0, concurrency=4)
CASES = {
    "undisturbed": _TWENTY,
    "killed": replace(_TWENTY, kill_every=15.0),
    "drained": replace(_TWENTY, kill_every=15.0, drains=True),
    "short_lived": Case(turns=40, tool=2.0, concurrency=16, lifetime=60.0, limit=360.0),
    "program": _PROGRAM,
    "program_killed": replace(_PROGRAM, kill_every=8.0),
}
_SHORT = Case(turns=6, tool=0.5, trajectories=4, samplers=2, concurrency=2, lease=3.0, limit=60.0)
QUICK = {
    "undisturbed": _SHORT,
    "killed": replace(_SHORT, kill_every=4.0),
    "drained": replace(_SHORT, kill_every=4.0, drains=True),
    "short_lived": replace(_SHORT, turns=16, concurrency=4, lifetime=12.0, limit=45.0),
    "program": replace(_SHORT, is_program=True),
    "program_killed": replace(_SHORT, is_program=True, kill_every=4.0),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a case took. ``seconds`` count from the first model call."""

    scored: int
    seconds: float
    kills: int
    counts: Mapping[str, float]

    def each(self, what: str) -> float:
        """Return a count per scored trajectory; infinite if none has a score."""
        return self.counts[what] / self.scored if self.scored else float("inf")


class Samplers:
    """The sampler processes of a case; one that is killed is replaced at once."""

    def __init__(self, case: Case, words: list[str], log: Path, rng: random.Random) -> None:
        self._case = case
        self._words = words
        self._log = log
        self._rng = rng
        self._running: list[tuple[float, subprocess.Popen[bytes]]] = []
        self._draining: list[subprocess.Popen[bytes]] = []
        self._next_kill = float("inf")
        self.kills = 0

    def start(self) -> None:
        """Start as many as are missing."""
        while len(self._running) < self._case.samplers:
            child = start_child(self._words, log=self._log, env=environment())
            self._running.append((time.monotonic(), child))

    def begin_kills(self) -> None:
        """Begin to count the time until the first kill of a random sampler."""
        self._next_kill = time.monotonic() + (self._case.kill_every or float("inf"))

    def kill_due(self) -> None:
        """Kill and replace the samplers whose time has come. Exits if one has failed by itself."""
        now = time.monotonic()
        due = [each for each in self._running if now - each[0] > (self._case.lifetime or float("inf"))]
        if now > self._next_kill:
            # Drain the oldest, as a rolling restart does; a death takes anyone.
            due.append(self._running[0] if self._case.drains else self._rng.choice(self._running))
            self._next_kill = now + (self._case.kill_every or float("inf"))
        for each in due:
            if self._case.drains:
                each[1].terminate()
                self._draining.append(each[1])
            else:
                each[1].kill()
                each[1].wait()
            self._running.remove(each)
            self.kills += 1
        if due:
            self.start()
        children = [*self._draining, *(child for _, child in self._running)]
        if any(child.poll() not in (None, 0) for child in children):
            raise SystemExit(f"a sampler failed:\n{tail(self._log)}")

    def stop(self) -> None:
        """Stop all."""
        stop_children([*self._draining, *(child for _, child in self._running)])


@contextmanager
def services(model: str, case: Case) -> Iterator[str]:
    """Run the engine and the tool of a case; yield their address."""
    numbers = (case.turns, case.generation, case.tool)
    words = [sys.executable, str(HERE / "durable_services.py"), model, *map(str, numbers)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def make_tasks(case: Case) -> list[Task]:
    """Return tasks with a slot for each trajectory."""
    return [
        Task(
            id=task_key("train", 0, f"{number:03d}"), task_id=f"{number:03d}", split="train", epoch=0,
            order=number, query=f"Question {number}: who wrote the book?", answer="1", scorer="exact",
            agent_name="command" if case.is_program else "react",
            slots=tuple(Slot(traj_id=each) for each in range(GENERATIONS)),
        )
        for number in range(case.trajectories // GENERATIONS)
    ]  # fmt: skip


async def measure(uri: str, model: str, folder: Path, name: str, case: Case, seed: int) -> Outcome:
    """Run a case in a database of its own, until all trajectories are scored or its time is over."""
    run = RunConfig(run_name=f"bench_durable_{name}", db_connection_string=uri)
    async with await open_store(run) as store:
        with services(model, case) as url:
            await store.tasks.load(make_tasks(case))
            beats = asyncio.create_task(_beat(store, url, model))
            words = command("sample", _flags(run, url, model, folder, case))
            samplers = Samplers(case, words, folder / f"{name}.out", random.Random(seed))
            samplers.start()
            try:
                await _until_called(url)
                began = time.monotonic()
                samplers.begin_kills()
                scored, seconds = 0, 0.0
                while scored < case.trajectories and seconds < case.limit:
                    samplers.kill_due()
                    await asyncio.sleep(_POLL_SECONDS)
                    scored = await store.database["Record"].count_documents({"score": {"$ne": None}})
                    seconds = time.monotonic() - began
            finally:
                samplers.stop()
                beats.cancel()
            counts = await _counts(url)
        whole = await store.database["Record"].count_documents({"score": 1.0, "turns": case.turns})
        if whole < scored:
            raise SystemExit(
                f"{scored - whole} of {scored} trajectories are not {case.turns} turns long and right"
            )
        await store.database.client.drop_database(store.database.name)
    return Outcome(scored=scored, seconds=seconds, kills=samplers.kills, counts=counts)


async def _beat(store: Store, url: str, model: str) -> None:
    """Register the engine and send its heartbeats."""
    await store.services.register(
        InferenceService(
            id="engine", url=url, engine="sglang", model=model, host="127.0.0.1", pid=1,
            status=ServiceStatus.READY, policy_version=0,
        )
    )  # fmt: skip
    while True:
        await asyncio.sleep(_BEAT_SECONDS)
        await store.services.beat("engine", status=ServiceStatus.READY, policy_version=0, running_requests=0)


async def _counts(url: str) -> dict[str, float]:
    def get() -> dict[str, float]:
        with urllib.request.urlopen(f"{url}/counts", timeout=30) as answer:
            counts: dict[str, float] = json.load(answer)
            return counts

    return await asyncio.to_thread(get)


async def _until_called(url: str) -> None:
    """Wait until the samplers have made a model call. Exits if they do not."""
    deadline = time.monotonic() + _READY_SECONDS
    while not (await _counts(url))["model_calls"]:
        if time.monotonic() > deadline:
            raise SystemExit(f"no sampler has made a model call in {_READY_SECONDS:g} s")
        await asyncio.sleep(_POLL_SECONDS)


def _flags(run: RunConfig, url: str, model: str, folder: Path, case: Case) -> list[str]:
    flags = {
        "run_name": run.run_name, "db_connection_string": run.db_connection_string,
        "model_name_or_path": model, "mcp_manager_url": f"{url}/mcpapi", "tool_call_parser": "hermes",
        "num_generations": GENERATIONS, "max_turns": case.turns, "max_prompt_tokens": 60_000,
        "max_model_len": 64_000, "max_new_tokens": 256, "groups_per_step": case.trajectories,
        "max_concurrent_samples_per_process": case.concurrency, "lease_seconds": case.lease,
        # Deaths alone must never end a slot: the number of attempts is not what is measured.
        "max_attempts": 1000,
        "log_dir": folder / "logs", "output_dir": folder / "output",
    }  # fmt: skip
    if case.is_program:
        words = [sys.executable, str(HERE / "durable_program.py"), str(case.tool)]
        path = folder / "program.yml"
        path.write_text(json.dumps({"command": words, "visible": [str(HERE)]}), encoding="utf-8")
        flags["agent_cfg_path"] = path
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def rows(found: Mapping[str, Outcome], cases: Mapping[str, Case]) -> list[Row]:
    """Return the lines of the table."""
    lines: list[Row] = []
    counted = (("tokens", "generated tokens"), ("tool_seconds", "tool seconds"))
    # The tools of programs are their own: nobody counts them.
    for calmly, disturbed, names, target in (
        ("undisturbed", "killed", counted, 1.1), ("undisturbed", "drained", counted, 1.01),
        ("program", "program_killed", counted[:1], 1.2),
    ):  # fmt: skip
        if calmly not in found or disturbed not in found:
            continue
        calm, killed = found[calmly], found[disturbed]
        whose = " of a program" if cases[calmly].is_program else ""
        how = "drains" if cases[disturbed].drains else "kills"
        for name, what in names:
            ours, baseline = killed.each(name), calm.each(name)
            lines.append(
                Row(
                    what=f"{what} a scored trajectory{whose}, {killed.kills} {how}", ours=f"{ours:.1f}",
                    baseline=f"{baseline:.1f}", ratio=ours / baseline, target=target, more=False,
                )
            )  # fmt: skip
        lines.append(
            Row(
                what=f"seconds until all are scored{whose}, {killed.kills} {how}",
                ours=f"{killed.seconds:.0f}", baseline=f"{calm.seconds:.0f}",
                ratio=killed.seconds / calm.seconds,
            )
        )  # fmt: skip
    if "short_lived" in found:
        short, case = found["short_lived"], cases["short_lived"]
        lines.append(
            Row(
                what=f"{case.turns} turns of {case.tool:g} s, samplers that live {case.lifetime:g} s",
                ours=f"{short.scored} of {case.trajectories} scored in {short.seconds:.0f} s",
                baseline=f"{case.trajectories}", ratio=short.scored / case.trajectories, target=1.0,
            )
        )  # fmt: skip
    return lines


def main(argv: list[str]) -> int:
    """Run the cases, print a table, and return 1 if a target is missed."""
    parser = bench_parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=[*CASES], help="cases; --quick: the first two by default"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of samplers that are killed")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    options = parser.parse_args(argv)
    cases = QUICK if options.quick else CASES
    found: dict[str, Outcome] = {}
    with database() as (folder, uri):
        model = make_model(folder)
        for name in options.only or list(cases)[: 2 if options.quick else None]:
            outcome = asyncio.run(measure(uri, model, folder, name, cases[name], options.seed))
            print(
                f"{name}: {outcome.scored} of {cases[name].trajectories} scored in {outcome.seconds:.0f} s,"
                f" {outcome.kills} kills; {json.dumps(outcome.counts)}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            found[name] = outcome
    return finish("killed samplers", rows(found, cases), quick=options.quick, file=options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
