"""Several roles in one trajectory: conversations of their own, fixed models, rewards, limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM, fake_llm
from trajectories import ADD, Trajectory, converted, score_trajectory

from agentrl.config.schema import SamplingConfig
from agentrl.documents.model_call import unpack_ids
from agentrl.documents.status import CallStatus, StopReason
from agentrl.errors import ConfigError, TrajectoryError
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.agents import react
from agentrl.rollout.rollout import FixedModel, Rollout

SECRET = "sk-not-for-anyones-eyes-123456"


@pytest.fixture
async def llm() -> AsyncIterator[FakeLLM]:
    async with fake_llm() as server:
        yield server


def fixed(llm: FakeLLM, **settings: Any) -> FixedModel:
    return FixedModel(base_url=llm.url, model="judge", api_key_env="CRITIC_KEY", **settings)


async def debate(rollout: Rollout) -> Outcome:
    """The solver answers, the critic comments, the solver answers again."""
    solver = rollout.role("solver")
    critic = rollout.role("critic", system_prompt="Criticize.", messages=(), tools=())
    draft = await solver.generate()
    critic.append_messages([{"role": "user", "content": draft.content}])
    comment = await critic.generate(temperature=0.5)
    solver.append_messages([{"role": "user", "content": comment.content}])
    final = await solver.generate()
    return Outcome(StopReason.ANSWERED, final.content, rewards={"solver": 1.0, "critic": 0.2})


async def test_each_role_continues_its_own_ids() -> None:
    trajectory = Trajectory("3?", "Sure?", "3.", task={"scorer": "needless"})
    outcome = await trajectory.run(debate)
    assert [(call.index, call.role, call.parent) for call in trajectory.calls] == [
        (0, "solver", None), (1, "critic", None), (2, "solver", "train/0/t/0/1/0"),
    ]  # fmt: skip
    assert [call.is_context_reset for call in trajectory.calls] == [False, False, False]
    assert [call.opens_branch for call in trajectory.calls] == [True, True, False]
    first, second, third = trajectory.engine.prompts
    assert third[: len(first)] == first
    assert third[len(first) :][: len(trajectory.engine.outputs[0])] == trajectory.engine.outputs[0]
    decode = trajectory.engine.chat_format.decode
    assert "Criticize." in decode(second)
    assert "1+2?" not in decode(second)
    assert trajectory.calls[1].tools == ()
    assert trajectory.calls[1].sampling_params["temperature"] == 0.5
    seeds = {call.sampling_params["sampling_seed"] for call in trajectory.calls}
    assert len(seeds) == 3
    assert (trajectory.rollout.turns, trajectory.rollout.context_resets) == (3, 0)
    result = await score_trajectory(trajectory.task, trajectory.rollout, outcome, SamplingConfig())
    assert result.score == pytest.approx(0.6), "without a score it is the mean of the policy's roles"
    assert result.details == {
        "scorer": "agent", "role_rewards": {"solver": 1.0, "critic": 0.2},
        "call_roles": ["solver", "critic", "solver"],
    }  # fmt: skip
    assert [message["content"] for message in trajectory.rollout.result_messages][-1] == "3."


async def test_react_runs_on_a_role_and_tools_of_two_roles_do_not_mix() -> None:
    trajectory = Trajectory(ADD, "<answer>3</answer>", "<answer>yes</answer>")

    async def agent(rollout: Rollout) -> Outcome:
        found = await react(rollout.role("solver"))
        verdict = await react(rollout.role("critic", messages=[{"role": "user", "content": "?"}], tools=[]))
        return Outcome(StopReason.ANSWERED, f"{found.final_answer} {verdict.final_answer}")

    outcome = await trajectory.run(agent)
    assert outcome.final_answer == "3 yes"
    assert [len(call.tool_executions) for call in trajectory.calls] == [1, 0, 0]
    assert [call.index for call in trajectory.calls] == [0, 1, 2]
    assert trajectory.rollout.tool_calls == 1


async def test_a_call_whose_tools_run_later_keeps_their_results() -> None:
    async def agent(rollout: Rollout) -> Outcome:
        left, right = rollout.role("left"), rollout.role("right")
        turn = await left.generate()
        await right.generate()
        await right.generate()
        await left.call_tools(turn)
        await asyncio.gather(left.generate(), right.generate())
        return Outcome(StopReason.ANSWERED, "x", 1.0)

    trajectory = Trajectory(ADD, "a", "b", "c", "d")
    await trajectory.run(agent)
    calls = sorted(trajectory.calls, key=lambda call: call.index)
    assert [call.index for call in calls] == [0, 1, 2, 3, 4], "indexes have no gap"
    assert sum(len(call.tool_executions) for call in calls) == 1
    seen: set[str] = set()
    for call in calls:
        assert call.parent is None or call.parent in seen
        seen.add(call.id)
    by_role = [call for call in calls if call.role == "left"]
    assert [call.parent for call in by_role] == [None, by_role[0].id]
    assert sum(call.is_context_reset for call in calls) == 0


async def test_a_fixed_model_plays_a_role_and_is_never_trained(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRITIC_KEY", SECRET)
    llm.replies["judge"] = ["Not quite."]
    trajectory = Trajectory("4", "3")

    async def agent(rollout: Rollout) -> Outcome:
        solver = rollout.role("solver")
        critic = rollout.role("critic", model=fixed(llm, params={"temperature": 0}), messages=(), tools=[])
        draft = await solver.generate()
        critic.append_messages([{"role": "user", "content": draft.content}])
        comment = await critic.generate(max_tokens=16)
        solver.append_messages([{"role": "user", "content": comment.content}])
        return Outcome(StopReason.ANSWERED, (await solver.generate()).content, rewards={"solver": 1.0})

    outcome = await trajectory.run(agent)
    solver, critic, _ = trajectory.calls
    assert (critic.role, critic.generated_tokens, critic.prompt_tokens, critic.output_ids) == (
        "critic", 0, 0, b"",
    )  # fmt: skip
    assert critic.fixed is not None
    assert (critic.fixed.model, critic.fixed.prompt_tokens, critic.fixed.completion_tokens) == (
        "judge", 100, 10,
    )  # fmt: skip
    assert critic.sampling_params == {"temperature": 0, "max_tokens": 16}
    assert critic.response["content"] == "Not quite."
    assert (llm.keys, llm.asked[0]["max_tokens"]) == ([f"Bearer {SECRET}"], 16)
    assert SECRET not in str([call.to_document() for call in trajectory.calls])
    data = converted(trajectory)
    assert {span.call for span in data.spans} == {0, 2}
    trained = sum(span.end - span.start for span in data.spans)
    assert trained == solver.generated_tokens + trajectory.calls[2].generated_tokens
    assert len(unpack_ids(data.input_ids)) == data.tokens
    result = await score_trajectory(trajectory.task, trajectory.rollout, outcome, SamplingConfig())
    assert result.score == 1.0


async def test_a_fixed_model_uses_tools(llm: FakeLLM) -> None:
    tool = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    bad = {**tool, "function": {"name": "add", "arguments": "{"}}
    trajectory = Trajectory("never asked")

    async def agent(rollout: Rollout) -> Outcome:
        helper = rollout.role("helper", model=FixedModel(base_url=llm.url, model="m", api_key_env=None))
        return await react(helper)

    llm.tool_calls = [[tool], [bad], []]
    llm.replies["m"] = ["", "", "<answer>3</answer>"]
    outcome = await trajectory.run(agent)
    assert outcome.final_answer == "3"
    assert [call.status for call in trajectory.calls] == [
        CallStatus.COMPLETED, CallStatus.FORMAT_ERROR, CallStatus.COMPLETED,
    ]  # fmt: skip
    assert trajectory.calls[0].tool_executions[0].result == "3"
    sent = llm.asked[1]["messages"]
    assert sent[-2]["tool_calls"][0]["function"]["arguments"] == '{"a": 1, "b": 2}'
    assert (sent[-1]["role"], sent[-1]["tool_call_id"]) == ("tool", sent[-2]["tool_calls"][0]["id"])
    assert [call.parent for call in trajectory.calls] == [None, *(call.id for call in trajectory.calls[:2])]


async def test_a_fixed_model_that_is_down_is_an_outage_and_a_missing_key_a_config_error(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CRITIC_KEY", raising=False)
    with pytest.raises(ConfigError, match="CRITIC_KEY"):
        await Trajectory("x").run(lambda_of(fixed(llm)))
    monkeypatch.setenv("CRITIC_KEY", SECRET)
    llm.error = f"bad key {SECRET}"
    for status, is_outage in ((503, True), (400, False)):
        llm.replies["judge"] = [status]
        with pytest.raises(TrajectoryError, match="role critic gave no answer") as raised:
            await Trajectory("x").run(lambda_of(fixed(llm, max_retries=1)))
        assert (raised.value.outage is not None) is is_outage
        assert SECRET not in str(raised.value)


def lambda_of(model: FixedModel) -> Any:
    async def agent(rollout: Rollout) -> Outcome:
        await rollout.role("critic", model=model).generate()
        return Outcome(StopReason.ANSWERED, "x", 1.0)

    return agent


async def test_limits_and_names_of_roles() -> None:
    async def greedy(rollout: Rollout) -> Outcome:
        role = rollout.role("solver", max_turns=2)
        assert rollout.role("solver") is role
        with pytest.raises(TrajectoryError, match="exists already"):
            rollout.role("solver", max_turns=3)
        for name in ("", "a.b", "$x"):
            with pytest.raises(TrajectoryError, match="a role is named"):
                rollout.role(name)
        with pytest.raises(TrajectoryError, match="wants the tool 'nope'"):
            rollout.role("other", tools=["nope"])
        while True:
            await role.generate()

    trajectory = Trajectory("x")
    assert (await trajectory.run(greedy)).stop_reason is StopReason.TURNS_LIMIT
    assert trajectory.rollout.turns == 2

    async def shared(rollout: Rollout) -> Outcome:
        while True:
            await rollout.role("a").generate()
            await rollout.role("b").generate()

    trajectory = Trajectory("x", max_turns=3)
    assert (await trajectory.run(shared)).stop_reason is StopReason.TURNS_LIMIT
    assert [call.role for call in trajectory.calls] == ["a", "b", "a"]


async def test_a_role_may_begin_again() -> None:
    async def agent(rollout: Rollout) -> Outcome:
        role = rollout.role("player")
        await role.generate()
        await role.restart([{"role": "user", "content": "round two"}])
        await role.generate()
        return Outcome(StopReason.ANSWERED, "x", 1.0)

    trajectory = Trajectory("hello")
    await trajectory.run(agent)
    assert [(call.parent, call.opens_branch, call.status) for call in trajectory.calls] == [
        (None, True, CallStatus.COMPLETED), (None, True, CallStatus.COMPLETED),
    ]  # fmt: skip
    assert "1+2?" not in trajectory.engine.chat_format.decode(trajectory.engine.prompts[1])


async def test_the_example_in_the_docs_runs() -> None:
    page = Path(__file__).parents[4] / "docs" / "multi_agent.md"
    code = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    exec(compile(code, str(page), "exec"), {})
    trajectory = Trajectory("2", "No.", "<answer>3</answer>", task={"answer": "3", "scorer": "needless"})
    outcome = await trajectory.run("solver_critic")
    assert (outcome.score, outcome.rewards) == (1.0, {"solver": 1.0, "critic": 0.2})
