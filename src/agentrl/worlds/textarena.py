"""Environment ``textarena``: games of textarena for one or two players, played by messages.

    agentrl tasks load 'env:textarena?game=GuessTheNumber-v0&n=1000&seed=1' --run_name …
    agentrl tasks load 'env:textarena?game=TicTacToe-v0&players=2&n=1000&seed=1' --run_name …

The games draw from Python's global random generator, so each call to one runs under a lock, with a random
state of its own. The first prompt is the task's query; what the game says next is a user message.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from agentrl.documents.task import Task
from agentrl.environments.environment import (
    Environment,
    Observation,
    TaskRequest,
    environment,
    import_package,
    require_package,
)
from agentrl.errors import TaskEnvironmentError, TaskFileError

T = TypeVar("T")

NAME = "textarena"
_RAW = "-raw"
_GAME = -1
"""Sender of the game's own messages."""
ROLES = ("player", "opponent")
"""The roles of a game for two. The player moves first in every other task."""

_lock = threading.Lock()


class Game:
    """One game with a random state of its own. Methods block; they raise what the game raises."""

    def __init__(self, name: str, seed: int, players: int = 1) -> None:
        """Make and begin the game. Raises ConfigError without the package."""
        textarena = import_package(NAME, NAME)
        self._random: Any = None
        self._env: Any = self._run(lambda: textarena.make(name + _RAW))
        self._run(lambda: self._env.reset(num_players=players, seed=seed))
        self.mover = _GAME
        """The number of the player who moves next."""
        self.prompt = self._said()
        self.is_over = False

    @property
    def longest(self) -> int | None:
        """Return the largest number of messages: each of the game's turns may be lost to an invalid move."""
        turns = getattr(self._env.state, "max_turns", None)
        return 2 * int(turns) if turns else None

    def step(self, action: str) -> str:
        """Do one action; return what the next mover is told."""
        self.is_over, _ = self._run(lambda: self._env.step(action))
        return "" if self.is_over else self._said()

    def reward(self, player: int = 0) -> float:
        """Return a player's reward; 0 for a game that is not over."""
        rewards, _ = self._env.close() if self.is_over else (None, None)
        return float((rewards or {}).get(player, 0.0))

    def state(self) -> str | None:
        """Return the position, without the way to it; None for a game whose state is not plain data."""
        position = getattr(self._env.state, "game_state", None)
        try:
            return None if position is None else json.dumps(position, sort_keys=True)
        except (TypeError, ValueError):
            return None

    def _said(self) -> str:
        """Return what the next mover has not read yet: words of the game, and of the other player."""
        self.mover, messages = self._run(self._env.get_observation)
        return "\n".join(
            str(message[1]) if message[0] == _GAME else f"[Player {message[0]}] {message[1]}"
            for message in messages
            if message[0] != self.mover
        )

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
    """A game: the model's message is the action, what the game says is the next user message.

    In a game for two, each side is a role with a conversation and a reward of its own.
    """

    options = ("game", "players")

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._game: Game | None = None
        self._roles: tuple[str, ...] = tuple(task.meta[NAME].get("roles", ()))
        """Who plays the game's first player, and who the second; empty in a game for one."""

    @classmethod
    def check(cls) -> None:
        """Raise ConfigError unless textarena is installed."""
        require_package(NAME, NAME)

    @classmethod
    def tasks(cls, request: TaskRequest) -> Iterable[Mapping[str, Any]]:
        """Yield one task for each seed of the game. Raises TaskFileError for a game that cannot be played."""
        name = _known_game(request.options.get("game", ""))
        given = request.options.get("players", "1")
        if given not in ("1", "2"):
            raise TaskFileError(
                f"env:{NAME} is asked for games of {given!r} players", hint="give players=1 or players=2"
            )
        players = int(given)
        for index in range(request.n):
            digest = hashlib.sha256(f"{request.random_seed}/{name}/{index}".encode()).digest()
            seed = int.from_bytes(digest[:4], "big") >> 1
            game = _first(name, seed, players)
            limit = {} if game.longest is None else {"max_turns": game.longest}
            sides = {} if players == 1 else {"roles": ROLES if index % 2 == 0 else ROLES[::-1]}
            yield {"query": game.prompt, "meta": {NAME: {"game": name, "seed": seed, **sides}}, **limit}

    def setup(self) -> None:
        """Begin the game of the task. Raises TaskEnvironmentError if it begins otherwise than when loaded."""
        named = self.task.meta[NAME]
        self._game = Game(str(named["game"]), int(named["seed"]), max(1, len(self._roles)))
        if self._game.prompt != self.task.query:
            raise TaskEnvironmentError(
                f"game {named['game']} with seed {named['seed']} begins otherwise than when it was loaded",
                hint="all processes need the same version of textarena; a few games differ by process",
            )
        self.first_role = self._mover(self._game)

    def step(self, text: str) -> Observation:
        """Do the action that the message names."""
        game = self._opened
        said = game.step(text)
        return Observation(said, done=game.is_over, role=self._mover(game))

    def anchor_state(self) -> str | None:
        """Return the position: what the game says also names the last move, and what was wrong with it."""
        return self._opened.state()

    def reward(self) -> float | dict[str, float]:
        """Return the game's reward, or that of each role; 0 for a game that is not over."""
        if not self._roles:
            return self._opened.reward()
        return {role: self._opened.reward(self._roles.index(role)) for role in ROLES}

    def _mover(self, game: Game) -> str | None:
        return self._roles[game.mover] if self._roles else None

    @property
    def _opened(self) -> Game:
        if self._game is None:
            raise TaskEnvironmentError("the game has not begun")
        return self._game


def _known_game(name: str) -> str:
    """Return ``name`` if textarena has this game. Raises TaskFileError with the nearest one."""
    import_package(NAME, NAME)
    registry = import_package("textarena.envs.registration", NAME).ENV_REGISTRY
    games = [game.removesuffix(_RAW) for game in registry if game.endswith(_RAW)]
    if name in games:
        return name
    by_lower = {game.lower(): game for game in games}
    nearest = difflib.get_close_matches(name.lower(), by_lower, n=1)
    raise TaskFileError(
        f"textarena has no game {name!r}" if name else f"env:{NAME} names no game",
        hint=f"did you mean {by_lower[nearest[0]]!r}?" if nearest else f"env:{NAME}?game=GuessTheNumber-v0",
    )


def _first(name: str, seed: int, players: int) -> Game:
    """Begin a game once. Raises TaskFileError if it needs other players or data that are not installed."""
    try:
        return Game(name, seed, players)
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise TaskFileError(
            f"game {name} cannot be begun with players={players}: {type(error).__name__}: {reason}",
            hint="give players=1 or players=2, as the game wants it; word games need corpora:"
            " python -m nltk.downloader words",
        ) from error
