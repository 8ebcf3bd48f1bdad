"""An OpenEnv server with a robot on a grid, written with the server classes of the package ``openenv``.

    .venv-openenv/bin/python assets/examples/openenv/server.py --port 8000

The observation says where the robot is and how far its goal; the action is one of four words. It has as many
moves as the goal is away, and each move that brings it nearer earns its share of 1.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field

SIZE = 9
FARTHEST = 3
MOVES = {"up": (0, 1), "down": (0, -1), "left": (-1, 0), "right": (1, 0)}


class Move(Action):
    """Move the robot by one field."""

    move: str = Field(description="up, down, left or right")


class Grid(Observation):
    """Where the robot is, and how far its goal."""

    text: str = ""


class Robot(Environment):
    """A robot that shall walk to its goal."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Grid:
        """Put the robot somewhere, and the goal above it or on its right, as the seed decides."""
        choice = random.Random(seed)
        self._state = State(episode_id=episode_id)
        self._robot = [choice.randint(1, SIZE), choice.randint(1, SIZE)]
        self._farthest = self._left = choice.randint(1, FARTHEST)
        across = choice.randint(0, self._farthest)
        self._goal = [self._robot[0] + across, self._robot[1] + self._farthest - across]
        return self._shown(None)

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Grid:
        """Move the robot. Any other word leaves it in its place."""
        self._state.step_count += 1
        before = self._distance()
        across, up = MOVES.get(action.move.strip().lower(), (0, 0))
        self._robot = [self._robot[0] + across, self._robot[1] + up]
        self._left -= 1
        return self._shown(float(self._distance() < before) / self._farthest)

    @property
    def state(self) -> State:
        """The number of moves so far."""
        return self._state

    def _distance(self) -> int:
        return sum(abs(a - b) for a, b in zip(self._robot, self._goal, strict=True))

    def _shown(self, reward: float | None) -> Grid:
        across, up = (goal - own for goal, own in zip(self._goal, self._robot, strict=True))
        ways = [(across, "right" if across > 0 else "left"), (up, "up" if up > 0 else "down")]
        far = ", ".join(f"{abs(steps)} {way}" for steps, way in ways if steps)
        text = f"robot at {self._robot[0]} {self._robot[1]}, goal {far or 'here'}"
        return Grid(text=text, reward=reward, done=self._left == 0)


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--sessions", type=int, default=256, help="sessions at a time (default: 256)")
    given = parser.parse_args()
    app = create_app(Robot, Move, Grid, env_name="robot", max_concurrent_envs=given.sessions)
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
