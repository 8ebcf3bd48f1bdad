"""A simulated engine and its load: a knee, a full KV cache, evicted prefixes, and tools with a heavy tail.

A step of the engine takes ``base + per_request × requests + per_token × tokens in the KV cache`` seconds, so
that tokens/s grow with the requests, less and less. Prompts that no cached prefix has are computed first.
Prefixes of trajectories that wait for a tool stay while there is room; the oldest is dropped first. A request
that finds no room waits, and one that outgrows it is preempted and computed again.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from agentrl.documents.run import EngineFigures, InferenceService
from agentrl.documents.status import ServiceStatus
from agentrl.rollout.target_concurrency import TargetConcurrency

TICK, HEARTBEAT = 0.5, 2.0
"""Seconds."""


@dataclass(slots=True, eq=False)
class Trajectory:
    sampler: int
    turns: int
    context: float
    """Tokens."""
    left: float
    """Tokens of this turn that are to be generated."""


@dataclass(kw_only=True)
class Load:
    """What trajectories are like; lengths in tokens, times in seconds."""

    seed: int = 0
    turns: float = 8.0
    prompt: float = 800.0
    generated: float = 250.0
    result: float = 300.0
    """Tokens of a tool's result."""
    tool_seconds: float = 6.0
    """Mean; times have a Pareto distribution with the exponent 1.6, cut at 300 s."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def trajectory(self, sampler: int) -> Trajectory:
        """Return a new one, at its first turn."""
        turns = int(self._random.expovariate(1 / self.turns)) + 1
        return Trajectory(sampler, turns, self.prompt * (0.5 + self._random.random()), self.turn())

    def turn(self) -> float:
        """Return the tokens that a turn generates."""
        return max(8.0, self._random.lognormvariate(math.log(self.generated), 0.8))

    def wait(self) -> float:
        """Return the seconds that a tool takes."""
        return min(300.0, self.tool_seconds * 0.6 / 1.6 * self._random.paretovariate(1.6))


@dataclass(kw_only=True)
class Engine:
    """One engine."""

    capacity: int = 600_000
    """Tokens of its KV cache."""
    base: float = 0.02
    per_request: float = 1e-4
    per_token: float = 5e-8
    prefill: float = 20_000.0
    """Prompt tokens a second."""
    most: int = 10**9
    """Requests that run at a time."""
    running: list[Trajectory] = field(default_factory=list)
    waiting: list[Trajectory] = field(default_factory=list)
    cached: OrderedDict[Trajectory, float] = field(default_factory=OrderedDict)
    used: float = 0.0
    backlog: float = 0.0
    generated: float = 0.0
    computed: float = 0.0
    preempted: int = 0

    def figures(self, now: float) -> EngineFigures:
        """Return what it reports."""
        return EngineFigures(
            at=now, running=len(self.running), waiting=len(self.waiting), kv_usage=self.used / self.capacity,
            capacity=self.capacity, generated=int(self.generated), computed=int(self.computed),
            preempted=self.preempted,
        )  # fmt: skip

    def drop_cache(self) -> None:
        """Drop every prefix and compute running requests again, as an update of the weights does."""
        self.cached.clear()
        self.backlog += self.used
        self.computed += self.used

    def step(self) -> list[Trajectory]:
        """Work for one tick; return the trajectories whose turn is over."""
        idle = self._admit()
        busy = min(TICK, self.backlog / self.prefill)
        self.backlog -= busy * self.prefill
        step_seconds = self.base + self.per_request * len(self.running) + self.per_token * self.used
        tokens = (TICK - busy) / step_seconds
        ended: list[Trajectory] = []
        going: list[Trajectory] = []
        for each in self.running:
            made = min(tokens, each.left)
            each.left -= made
            each.context += made
            self.used += made
            self.generated += made
            (going if each.left > 1e-9 else ended).append(each)
        self.running = going
        for each in ended:
            self.used -= each.context
            self.cached[each] = each.context
            idle += each.context
        self._evict(idle, 0.0)
        while self.used > self.capacity:
            victim = self.running.pop()
            self.used -= victim.context
            self.waiting.insert(0, victim)
            self.preempted += 1
        return ended

    def _admit(self) -> float:
        idle = sum(self.cached.values())
        while self.waiting and len(self.running) < self.most:
            need = self.waiting[0].context * 1.02 + 32
            if self.used + need > self.capacity:
                break
            each = self.waiting.pop(0)
            found = self.cached.pop(each, 0.0)
            idle = self._evict(idle - found, need)
            self.backlog += each.context - found
            self.computed += each.context - found
            self.running.append(each)
            self.used += each.context
        return idle

    def _evict(self, idle: float, need: float) -> float:
        while self.cached and self.used + need + idle > self.capacity:
            idle -= self.cached.popitem(last=False)[1]
        return idle


def run(
    engine: Engine,
    load: Load,
    samplers: Sequence[TargetConcurrency | int],
    seconds: float,
    *,
    after: float = 0.0,
    event: Callable[[float], int | None] = lambda now: None,
) -> float:
    """Return the tokens/s of the simulated time from ``after`` to ``seconds``; a number is a fixed one.

    ``event`` is called each heartbeat, may change the load and the engine, and returns the policy version.
    """
    held, ended, told = [0] * len(samplers), [0] * len(samplers), [0] * len(samplers)
    tools: list[tuple[float, int, Trajectory]] = []
    now, count, before, version = 0.0, 0, 0.0, 0
    service = InferenceService(
        id="e", url="http://e", engine="sglang", model="m", host="h", pid=1, status=ServiceStatus.READY
    )
    while now < seconds:
        for index, sampler in enumerate(samplers):
            number = sampler if isinstance(sampler, int) else sampler.number
            for _ in range(min(40, number - held[index])):
                engine.waiting.append(load.trajectory(index))
                held[index] += 1
        while tools and tools[0][0] <= now:
            each = heapq.heappop(tools)[2]
            each.context += load.result
            each.left = load.turn()
            engine.waiting.append(each)
        for each in engine.step():
            each.turns -= 1
            if each.turns:
                count += 1
                heapq.heappush(tools, (now + load.wait(), count, each))
            else:
                engine.cached.pop(each, None)
                held[each.sampler] -= 1
                ended[each.sampler] += 1
        now += TICK
        if now <= after:
            before = engine.generated
        if now % HEARTBEAT == 0:
            version = event(now) or version
            beat = replace(service, figures=engine.figures(now), policy_version=version)
            tokens = [0.0] * len(samplers)
            for each in (*engine.running, *engine.waiting, *(item[2] for item in tools)):
                tokens[each.sampler] += each.context
            for index, sampler in enumerate(samplers):
                if not isinstance(sampler, int):
                    sampler.observe(
                        [beat], held={beat.url: held[index]}, tokens={beat.url: int(tokens[index])},
                        running=held[index], ended=ended[index] - told[index],
                        share=held[index] / max(1, sum(held)) or 1.0, samplers=len(samplers),
                    )  # fmt: skip
                    told[index] = ended[index]
    return (engine.generated - before) / (seconds - after)
