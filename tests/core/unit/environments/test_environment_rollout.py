"""Environments in rollouts: the agent that talks with one, its tools, and the score of its state."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import number_game
import pytest
from made_documents import made_task
from rollout_fakes import ScriptedEngine, format_of, make_rollout, nothing
from trajectories import score_trajectory

from agentrl.calls.journal import Journal
from agentrl.calls.turns import Turn
from agentrl.config.schema import AgentConfig, SamplingConfig, ToolConfig
from agentrl.documents.model_call import DispatchedSamplingTask, read_digest, state_digest
from agentrl.documents.status import StopReason
from agentrl.documents.task import Claim, Task
from agentrl.environments.environment import open_environment
from agentrl.errors import ConfigError, TaskEnvironmentError, TrajectoryError
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.agents import AGENTS, run_agent
from agentrl.rollout.load_tasks import read_task_source
from agentrl.rollout.rollout import Rollout
from agentrl.scoring.scorers import ScorerContext, run_scorer
from agentrl.tools.pool import ToolPool
from agentrl.tools.tool import TrajectoryInfo


def task(environment: str | None, **fields: Any) -> Task:
    values = {"query": "?", "scorer": "environment", "tools": (), **fields}
    return made_task("t", environment=environment, **values)


async def play(
    asked: Task, agent: str, *script: str, before: Sequence[DispatchedSamplingTask] = ()
) -> tuple[Rollout, Outcome]:
    """Run an agent on the tools of the task's environment; ``before`` are the calls of an earlier owner."""
    engine = ScriptedEngine(format_of(), *script)
    claim = Claim(task=asked, traj_id=0, attempt=1, owner="o")
    environment = open_environment(asked, call_timeout=10)

    async def write(call: Turn) -> None:
        """Store nothing."""

    pool = ToolPool(ToolConfig())
    async with pool, pool.session(TrajectoryInfo.of(claim), environment) as tools:
        rollout = make_rollout(
            claim, AgentConfig(), chat_format=engine.chat_format, engine=engine, write=write, tools=tools,
            schemas=await tools.list(), environment=environment, journal=Journal(before, nothing, nothing),
        )  # fmt: skip
        outcome = await run_agent(AGENTS.get(agent), agent, rollout, SamplingConfig())
        await rollout.finish()
    return rollout, outcome


async def test_a_game_is_played_by_messages_and_its_reward_is_the_score() -> None:
    asked = task("number_game", meta={"secret": 5}, max_turns=3)
    rollout, outcome = await play(asked, "multi_turn", "<think>3</think>2", "7", "5")
    assert outcome == Outcome(StopReason.ANSWERED, "5")
    said = [message["content"] for message in rollout.messages if message["role"] == "user"]
    assert said == ["?", "higher", "lower"]
    assert rollout.tool_rewards == {"environment": {"calls": [], "state": 1.0}}
    assert (await score_trajectory(asked, rollout, outcome, SamplingConfig())).score == 1.0
    rollout, outcome = await play(asked, "multi_turn", "1", "2", "3", "5")
    assert (outcome.stop_reason, rollout.turns) == (StopReason.TURNS_LIMIT, 3)
    assert (await score_trajectory(asked, rollout, outcome, SamplingConfig())).score == 0.0


async def test_its_tools_share_state_and_a_score_method_runs_in_a_process() -> None:
    number_game.Counter.closed.clear()
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    asked = task("number_game:Counter", meta={"from": 10})
    rollout, outcome = await play(asked, "react", call, call, "<answer>16</answer>")
    assert [item.tool_calls for item in rollout.scored_calls] == [("add",), ("add",), ()]
    result = await score_trajectory(asked, rollout, outcome, SamplingConfig())
    assert (result.score, result.details["value"]) == (1.0, 16.0)
    assert number_game.Counter.closed == ["t"]


async def test_the_agent_of_a_game_needs_an_environment_that_answers() -> None:
    with pytest.raises(TrajectoryError, match="no environment answers messages"):
        await play(task(None), "multi_turn", "hello")
    rollout, _ = await play(task(None), "single_turn", "hello")
    assert rollout.environment is None
    with pytest.raises(ConfigError, match="did you mean 'counter'"):
        open_environment(task("countr"), call_timeout=1)


async def test_a_tool_that_the_environment_does_not_list_is_not_called() -> None:
    environment = open_environment(task("counter", meta={"from": 1}), call_timeout=5)
    assert environment is not None
    claim = Claim(task=task("counter", meta={"from": 1}), traj_id=0, attempt=1, owner="o")
    pool = ToolPool(ToolConfig())
    async with pool, pool.session(TrajectoryInfo.of(claim), environment) as tools:
        assert (await tools.call("reward", {})).error
        assert (await tools.call("add", {"a": "x", "b": 1})).error
        assert (await tools.call("add", {"a": 1, "b": 1})).text == "3"


async def test_a_trajectory_without_a_reward_has_no_score() -> None:
    context = ScorerContext(query="?", final_answer=None, environment="number_game")
    with pytest.raises(Exception, match="gave the trajectory no reward"):
        await run_scorer("environment", context, 30)
    with pytest.raises(Exception, match="names no environment"):
        await run_scorer("environment", ScorerContext(query="?", final_answer=None), 30)


async def test_each_model_call_is_made_in_a_state() -> None:
    """The environment's where it gives one, else what the model reads: nobody else tells walls apart."""

    def anchors(rollout: Rollout) -> list[str | None]:
        return [call.document().anchor for call in rollout._calls.made]

    walk = ("right", "left", "right", "right", "right")
    rollout, _ = await play(task("number_game:Corridor"), "multi_turn", *walk)
    assert anchors(rollout) == [state_digest(place) for place in "01012"]
    rollout, _ = await play(task("number_game:Corridor", meta={"state": None}), "multi_turn", *walk)
    asked, wall = (read_digest([{"role": "user", "content": text}]) for text in ("?", "a wall"))
    assert anchors(rollout) == [asked, *[wall] * 4]
    with pytest.raises(
        TaskEnvironmentError, match=r"anchor_state of environment number_game:Corridor returned 7"
    ):
        await play(task("number_game:Corridor", meta={"state": 7}), "multi_turn", *walk)


@pytest.mark.parametrize("known", range(5))
async def test_a_new_owner_is_in_the_same_states(known: int) -> None:
    """The new instance makes the moves of earlier owners again before it says where it is."""
    walk = ("right", "left", "right", "right", "right")
    first, _ = await play(task("number_game:Corridor"), "multi_turn", *walk)
    calls = [call.document() for call in first._calls.made]
    second, outcome = await play(
        task("number_game:Corridor"), "multi_turn", *walk[known:], before=calls[:known]
    )
    assert outcome.stop_reason is StopReason.ANSWERED
    assert [call.document().anchor for call in second._calls.made] == [call.anchor for call in calls]


def test_what_a_tool_returns_is_a_state_wherever_it_is_called() -> None:
    def read(call_id: str, text: str) -> str:
        call = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": {}}}
        return read_digest([
            {"role": "user", "content": call_id}, {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "content": text},
        ])  # fmt: skip

    assert read("call00100", "a door") == read("call00400", "a door") != read("call00100", "a wall")
    assert read_digest([]) != read_digest([{"role": "user", "content": "\ud800"}])
    assert state_digest(b"a") == state_digest("a") != state_digest("\ud800")


PAGE = Path(__file__).parents[4] / "docs" / "your_own" / "environment.md"


async def test_the_environment_of_the_page_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r'```python title="halving.py"\n(.*?)```', page, re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 22
    (tmp_path / "halving.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    task = read_task_source("env:halving:Halving?n=3&seed=1", shuffle=False).tasks[0]
    assert (task.max_turns, task.system_prompt) == (7, "Answer with a number only.")
    secret = task.meta["secret"]
    rollout, outcome = await play(task, "multi_turn", "I do not know", str(secret + 1), str(secret))
    assert outcome.stop_reason is StopReason.ANSWERED
    said = [message["content"] for message in rollout.messages if message["role"] == "user"]
    assert said == [task.query, "higher", "lower"]
    assert rollout.tool_rewards["environment"]["state"] == 1.0
