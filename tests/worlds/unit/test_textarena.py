"""textarena: games by seed, their random states, rewards, and games that cannot be played."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from environment_packages import needs_packages
from fake_llm import fake_llm
from test_environment_rollout import play
from trajectories import score_trajectory

from agentrl.config.schema import SamplingConfig
from agentrl.documents.status import StopReason
from agentrl.documents.task import Task
from agentrl.environments.environment import open_environment
from agentrl.errors import ConfigError, TaskEnvironmentError, TaskFileError
from agentrl.rollout.load_tasks import read_task_source
from agentrl.worlds.textarena import Game

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


async def test_a_position_is_a_state_whatever_way_led_to_it() -> None:
    (task,) = tasks("env:textarena?game=FrozenLake-v0&n=1&seed=1")
    moves = ("[down]", "[up]", "[right]", "[left]", "[no]", "[down]")
    rollout, _ = await play(task, "multi_turn", *moves)
    anchors = [call.document().anchor for call in rollout._calls.made]
    start, down, back, right, again, _ = anchors[:6]
    assert start == back == again != down
    assert right not in (start, down)


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


async def test_the_policy_plays_both_sides_each_with_its_reward() -> None:
    first, second = tasks("env:textarena?game=TicTacToe-v0&players=2&n=2&seed=1")
    assert (first.meta["textarena"]["roles"], second.meta["textarena"]["roles"]) == (
        ["player", "opponent"], ["opponent", "player"],
    )  # fmt: skip
    rollout, outcome = await play(first, "multi_turn", "[4]", "[0]", "foo", "[1]", "[2]", "[7]")
    assert outcome.stop_reason is StopReason.ANSWERED
    roles = [call.role for call in rollout.scored_calls]
    assert roles == ["player", "opponent", "player", "player", "opponent", "player"], "foo was no move"
    own = [str(message["content"]) for message in rollout.role("player").messages]
    assert "You are Player 0" in own[0]
    assert "attempted an invalid move" in own[4]
    assert "[Player 1] [2]" in own[-2]
    assert not any("You are Player 1" in text for text in own)
    assert "You are Player 1" in str(rollout.role("opponent").messages[0]["content"])
    assert rollout.tool_rewards["environment"] == {
        "calls": [], "state": 1.0, "roles": {"player": 1.0, "opponent": -1.0},
    }  # fmt: skip
    result = await score_trajectory(first, rollout, outcome, SamplingConfig())
    assert (result.score, result.details["role_rewards"]) == (1.0, {"player": 1.0, "opponent": -1.0})


async def test_a_fixed_model_plays_the_opponent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPPONENT_KEY", "sk-of-nobody")
    monkeypatch.chdir(tmp_path)
    async with fake_llm() as llm:
        llm.replies["strong"] = ["[0]", "[1]", "[2]"]
        file = tmp_path / "agent.yml"
        settings = {"base_url": llm.url, "model": "strong", "api_key_env": "OPPONENT_KEY"}
        file.write_text(yaml.safe_dump({"roles": {"opponent": settings}}))
        _, task = tasks("env:textarena?game=TicTacToe-v0&players=2&n=2&seed=1")
        rollout, outcome = await play(replace(task, agent_cfg_path=file.name), "multi_turn", "[4]", "[8]")
    assert rollout.fixed_roles == ("opponent",)
    assert [call.role for call in rollout.scored_calls] == ["opponent", "player"] * 2 + ["opponent"]
    result = await score_trajectory(task, rollout, outcome, SamplingConfig())
    assert result.score == -1.0, "the player's reward is the score"
    file.write_text(yaml.safe_dump({"roles": {"opponent": {"url": "x"}}}))
    with pytest.raises(ConfigError, match=r"role opponent: unknown key 'url'"):
        await play(replace(task, agent_cfg_path=file.name), "multi_turn", "[4]")


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
        ("TicTacToe-v0", "cannot be begun with players=1"),
        ("TicTacToe-v0&players=3", "players=1 or players=2"),
        ("GuessTheNumber-v0&players=2", "cannot be begun with players=2"),
    ],
)
def test_a_game_that_cannot_be_played_says_why(game: str, problem: str) -> None:
    with pytest.raises(TaskFileError, match=problem):
        tasks(f"env:textarena?n=1&game={game}")
