"""textarena: games by seed, their random states, rewards, and games that cannot be played."""

from __future__ import annotations

import random
from typing import Any

import pytest
from environment_packages import needs_packages
from test_environment_rollout import play

from agentrl.config.schema import SamplingConfig
from agentrl.documents.status import StopReason
from agentrl.documents.task import Task
from agentrl.environments.session import open_environment
from agentrl.environments.tasks import read_task_source
from agentrl.environments.textarena import Game
from agentrl.errors import TaskEnvironmentError, TaskFileError
from agentrl.rollout.run_agent import score_trajectory

pytestmark = needs_packages


def tasks(address: str, split: str = "train") -> list[Task]:
    return list(read_task_source(address, split=split, shuffle=False).tasks)


def test_games_differ_by_seed_and_split_and_are_the_same_again() -> None:
    found = tasks("env:textarena?game=Minesweeper-v0-small&n=4&seed=1")
    assert [task.meta for task in found] == [
        task.meta for task in tasks("env:textarena?game=Minesweeper-v0-small&n=4&seed=1")
    ]
    evaluation = tasks("env:textarena?game=Minesweeper-v0-small&n=4&seed=1", split="eval")
    assert len({task.meta["textarena"]["seed"] for task in (*found, *evaluation)}) == 8
    assert {(task.agent_name, task.scorer, task.environment) for task in found} == {
        ("multi_turn", "environment", "textarena")
    }


def test_a_game_has_a_random_state_of_its_own() -> None:
    def boards(between: Any) -> list[str]:
        game = Game("2048-v0", 5)
        said = [game.prompt]
        for move in ("[up]", "[left]", "[down]", "[right]") * 3:
            between()
            said.append(game.step(move))
        return said

    random.seed(3)
    expected = random.Random(3).random()
    alone = boards(lambda: None)
    assert random.random() == expected, "the games do not touch the state of others"
    other = Game("2048-v0", 6)
    assert boards(lambda: (random.random(), other.step("[up]"))) == alone


async def test_a_game_is_played_to_its_end_and_scored_by_its_reward() -> None:
    (task,) = tasks("env:textarena?game=GuessTheNumber-v0&n=1&seed=1")
    assert "between 1 and 20" in task.query
    assert task.max_turns == 20
    rollout, outcome = await play(task, "multi_turn", *(f"I say [{number}]" for number in range(1, 20)))
    hints = [message["content"] for message in rollout.messages if message["role"] == "user"][1:]
    assert set(hints) <= {"The target number is higher.", "The target number is lower."}
    assert outcome.stop_reason is StopReason.ANSWERED
    result = await score_trajectory(task, rollout, outcome, SamplingConfig())
    assert result.score == rollout.tool_rewards["environment"]["state"]
    assert 0 <= result.score <= 1
    target = Game("GuessTheNumber-v0", task.meta["textarena"]["seed"])._env.game_number
    rollout, outcome = await play(task, "multi_turn", f"[{target}]")
    assert rollout.tool_rewards["environment"]["state"] == 1.0
    rollout, _ = await play(task, "multi_turn", "no idea")
    assert rollout.turns == 2, "a second invalid move ends the game"


async def test_a_game_that_begins_otherwise_fails_in_setup() -> None:
    (task,) = tasks("env:textarena?game=Minesweeper-v0-small&n=1&seed=1")
    changed = Task.from_document({**task.to_document(), "query": "another board"})
    session = open_environment(changed, call_timeout=30)
    assert session is not None
    with pytest.raises(TaskEnvironmentError, match="begins otherwise than when it was loaded"):
        await session.open()
    await session.close()


@pytest.mark.parametrize(
    ("game", "problem"),
    [
        ("GuessTheNumbr-v0", "did you mean 'GuessTheNumber-v0'"),
        ("", "names no game"),
        ("TicTacToe-v0", "cannot be begun for one player"),
    ],
)
def test_a_game_that_cannot_be_played_says_why(game: str, problem: str) -> None:
    with pytest.raises(TaskFileError, match=problem):
        tasks(f"env:textarena?n=1&game={game}")
