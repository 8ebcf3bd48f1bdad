"""Environments for tests: a game that answers messages, tools with state, and one that fails as asked."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from typing import Any

from agentrl import Environment, Observation, ScorerContext, ScoreResult, TaskRequest, environment


@environment("number_game")
class NumberGame(Environment):
    """Find a number; the environment says whether a guess is too low."""

    options = ("largest",)
    task_defaults = {"max_turns": 3}  # noqa: RUF012

    @classmethod
    def tasks(cls, request: TaskRequest) -> Iterator[dict[str, Any]]:
        """Yield one number a task."""
        choice = random.Random(request.random_seed)
        largest = int(request.options.get("largest", "9"))
        for _ in range(request.n):
            yield {"query": f"Find a number up to {largest}.", "secret": choice.randint(1, largest)}

    def setup(self) -> None:
        """Begin without a guess."""
        self.found = False

    async def step(self, text: str) -> Observation:
        """Compare a guess."""
        guess, secret = int(text), self.task.meta["secret"]
        self.found = guess == secret
        return Observation("" if self.found else "higher" if guess < secret else "lower", done=self.found)

    async def reward(self) -> float:
        """1 for the number, else 0."""
        return float(self.found)


@environment("counter")
class Counter(Environment):
    """Count by a tool, and score from stored values only."""

    tools = ("add",)
    closed: list[str] = []  # noqa: RUF012

    async def setup(self) -> None:
        """Begin at the task's number."""
        self.value = int(self.task.meta["from"])

    async def add(self, a: int, b: int) -> str:
        """Add both numbers to the counter."""
        self.value += a + b
        return str(self.value)

    async def reward(self) -> float:
        """The counter's value."""
        return float(self.value)

    @classmethod
    def score(cls, context: ScorerContext) -> ScoreResult:
        """Compare the answer with the counter."""
        value = context.tool_rewards["environment"]["state"]
        return ScoreResult(float(context.final_answer == f"{value:g}"), {"value": value})

    async def teardown(self) -> None:
        """Note the end."""
        self.closed.append(self.task.task_id)


@environment("faulty")
class Faulty(Environment):
    """Fail in the method that the task names, in the way that it names."""

    torn_down: list[str] = []  # noqa: RUF012

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self._fail("init")

    def _fail(self, method: str) -> None:
        if self.task.meta["in"] != method:
            return
        match self.task.meta["does"]:
            case "raise":
                raise RuntimeError("no such game")
            case "exit":
                sys.exit(3)
            case "hang":
                time.sleep(2)

    def setup(self) -> None:
        """May fail."""
        self._fail("setup")

    def step(self, text: str) -> Any:
        """May fail."""
        self._fail("step")
        return "not an observation" if self.task.meta["in"] == "observation" else Observation("", done=True)

    def reward(self) -> Any:
        """May fail."""
        self._fail("reward")
        return "good" if self.task.meta["in"] == "number" else 1.0

    async def teardown(self) -> None:
        """May fail, which is only logged."""
        self.torn_down.append(self.task.task_id)
        self._fail("teardown")


@environment("corridor")
class Corridor(Environment):
    """Walk to the end of a corridor, whose places look alike."""

    def setup(self) -> None:
        """Begin at the left end."""
        self.place = 0

    def step(self, text: str) -> Observation:
        """Go right or left."""
        self.place = max(0, self.place + (1 if text == "right" else -1))
        return Observation("a wall", done=self.place == 3)

    def anchor_state(self) -> Any:
        """The place, or what the task asks for."""
        return self.task.meta.get("state", str(self.place))

    def reward(self) -> float:
        """1 at the right end."""
        return float(self.place == 3)
