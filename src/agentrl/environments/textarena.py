"""Environment ``textarena``: single-player games of textarena, played by messages.

    agentrl tasks load 'env:textarena?game=GuessTheNumber-v0&n=1000&seed=1' --run_name …

The games draw from Python's global random generator, so each call to one runs under a lock, with a random
state of its own. The first prompt is the task's query; what the game says next is a user message.
"""

from __future__ import annotations

import difflib
import hashlib
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from agentrl.documents.task import Task
from agentrl.environments.base import Environment, Observation, TaskRequest, environment
from agentrl.environments.packages import import_package, require_package
from agentrl.errors import TaskEnvironmentError, TaskFileError

T = TypeVar("T")

NAME = "textarena"
_RAW = "-raw"
_GAME = -1
"""Sender of the game's own messages."""

_lock = threading.Lock()


class Game:
    """One game with a random state of its own. Methods block; they raise what the game raises."""

    def __init__(self, name: str, seed: int) -> None:
        """Make and begin the game. Raises ConfigError without the package."""
        textarena = import_package(NAME, NAME)
        self._random: Any = None
        self._env: Any = self._run(lambda: textarena.make(name + _RAW))
        self._run(lambda: self._env.reset(num_players=1, seed=seed))
        self.prompt = self._said()
        self.is_over = False

    @property
    def longest(self) -> int | None:
        """Return the largest number of messages: each of the game's turns may be lost to an invalid move."""
        turns = getattr(self._env.state, "max_turns", None)
        return 2 * int(turns) if turns else None

    def step(self, action: str) -> str:
        """Do one action; return what the game says."""
        self.is_over, _ = self._run(lambda: self._env.step(action))
        return "" if self.is_over else self._said()

    def reward(self) -> float:
        """Return the game's reward; 0 for a game that is not over."""
        rewards, _ = self._env.close()
        return float((rewards or {}).get(0, 0.0))

    def _said(self) -> str:
        _, messages = self._run(self._env.get_observation)
        return "\n".join(str(message[1]) for message in messages if message[0] == _GAME)

    def _run(self, call: Callable[[], T]) -> T:
        """Call the game with its own state of the global random generator."""
        with _lock:
            outer = random.getstate()
            if self._random is not None:
                random.setstate(self._random)
            try:
                return call()
            finally:
                self._random = random.getstate()
                random.setstate(outer)


@environment(NAME)
class TextArena(Environment):
    """A single-player game: the model's message is the action, the game's answer the next user message."""

    options = ("game",)

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._game: Game | None = None

    @classmethod
    def check(cls) -> None:
        """Raise ConfigError unless textarena is installed."""
        require_package(NAME, NAME)

    @classmethod
    def tasks(cls, request: TaskRequest) -> Iterable[Mapping[str, Any]]:
        """Yield one task for each seed of the game. Raises TaskFileError for a game that cannot be played."""
        name = _known_game(request.options.get("game", ""))
        for index in range(request.n):
            digest = hashlib.sha256(f"{request.random_seed}/{name}/{index}".encode()).digest()
            seed = int.from_bytes(digest[:4], "big") >> 1
            game = _first(name, seed)
            limit = {} if game.longest is None else {"max_turns": game.longest}
            yield {"query": game.prompt, "meta": {NAME: {"game": name, "seed": seed}}, **limit}

    def setup(self) -> None:
        """Begin the game of the task. Raises TaskEnvironmentError if it begins otherwise than when loaded."""
        named = self.task.meta[NAME]
        self._game = Game(str(named["game"]), int(named["seed"]))
        if self._game.prompt != self.task.query:
            raise TaskEnvironmentError(
                f"game {named['game']} with seed {named['seed']} begins otherwise than when it was loaded",
                hint="all processes need the same version of textarena; a few games differ by process",
            )

    def step(self, text: str) -> Observation:
        """Do the action that the message names."""
        game = self._opened
        said = game.step(text)
        return Observation(said, done=game.is_over)

    def reward(self) -> float:
        """Return the game's reward; 0 for a game that is not over."""
        return self._opened.reward() if self._opened.is_over else 0.0

    @property
    def _opened(self) -> Game:
        if self._game is None:
            raise TaskEnvironmentError("the game has not begun")
        return self._game


def _known_game(name: str) -> str:
    """Return ``name`` if textarena has this game. Raises TaskFileError with the nearest one."""
    games = _games()
    if name in games:
        return name
    by_lower = {game.lower(): game for game in games}
    nearest = difflib.get_close_matches(name.lower(), by_lower, n=1)
    raise TaskFileError(
        f"textarena has no game {name!r}" if name else f"env:{NAME} names no game",
        hint=f"did you mean {by_lower[nearest[0]]!r}?" if nearest else f"env:{NAME}?game=GuessTheNumber-v0",
    )


def _games() -> Sequence[str]:
    import_package(NAME, NAME)
    registry = import_package("textarena.envs.registration", NAME).ENV_REGISTRY
    return [name.removesuffix(_RAW) for name in registry if name.endswith(_RAW)]


def _first(name: str, seed: int) -> Game:
    """Begin a game once. Raises TaskFileError if it needs more players or data that are not installed."""
    try:
        return Game(name, seed)
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise TaskFileError(
            f"game {name} cannot be begun for one player: {type(error).__name__}: {reason}",
            hint="choose a single-player game; word games need corpora: python -m nltk.downloader words",
        ) from error
