"""Class agents and agents that score their own trajectories."""

from __future__ import annotations

from typing import Any

import pytest
from trajectories import ADD, Trajectory, score_trajectory

from agentrl.config.schema import SamplingConfig
from agentrl.documents.status import StopReason
from agentrl.errors import ConfigError, FailureError, ScorerError
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.agents import AGENTS, agent
from agentrl.rollout.rollout import Rollout
from agentrl.scoring.scorers import ScorerContext, ScoreResult


@agent("counting_agent")
class CountingAgent:
    """Count tool calls in ``run``, and score by the count in ``evaluate``."""

    def __init__(self) -> None:
        self.seen = 0

    async def run(self, rollout: Rollout) -> Outcome:
        """Use tools until an answer."""
        while True:
            turn = await rollout.generate()
            if turn.answer is not None:
                return Outcome(StopReason.ANSWERED, turn.answer)
            self.seen += len(await rollout.call_tools(turn))

    async def evaluate(self, context: ScorerContext) -> ScoreResult:
        """Score by tool calls; a reward for each model call."""
        assert len(context.calls) == self.seen + 1
        return ScoreResult(self.seen / 2, {"answer": context.final_answer}, [0.5 for _ in context.calls])


async def scored(agent_name: str, *script: str) -> tuple[Trajectory, ScoreResult]:
    """Run an agent on tasks whose scorer does not exist; the agent's own score makes it needless."""
    trajectory = Trajectory(*script, task={"scorer": "needless"})
    outcome = await trajectory.run(agent_name)
    return trajectory, await score_trajectory(trajectory.task, trajectory.rollout, outcome, SamplingConfig())


async def test_a_class_agent_scores_by_the_state_of_its_instance() -> None:
    for _ in range(2):  # each trajectory has an instance of its own
        trajectory, result = await scored("counting_agent", ADD, ADD, "<answer>3</answer>")
        assert (result.score, result.details["answer"]) == (1.0, "3")
        assert result.details["scorer"] == "agent"
        assert result.details["turn_rewards"] == result.turn_rewards == [0.5, 0.5, 0.5]
        assert trajectory.rollout.agent_score == {
            "score": 1.0, "details": {"answer": "3"}, "turn_rewards": [0.5, 0.5, 0.5],
        }  # fmt: skip


async def test_an_outcome_may_carry_a_score_and_evaluate_is_then_not_called() -> None:
    @agent("certain")
    class Certain:
        async def run(self, rollout: Rollout) -> Outcome:
            await rollout.generate()
            return Outcome(StopReason.ANSWERED, "x", 0.25)

        async def evaluate(self, context: ScorerContext) -> float:
            raise AssertionError

    _, result = await scored("certain", "hello")
    assert (result.score, result.details) == (0.25, {"scorer": "agent"})


async def test_a_class_without_evaluate_leaves_the_score_to_the_scorer() -> None:
    @agent("plain_class")
    class Plain:
        async def run(self, rollout: Rollout) -> Outcome:
            await rollout.generate()
            return Outcome(StopReason.ANSWERED, "3")

    trajectory = Trajectory("hello", task={"scorer": "exact", "answer": "3"})
    outcome = await trajectory.run("plain_class")
    assert trajectory.rollout.agent_score is None
    result = await score_trajectory(trajectory.task, trajectory.rollout, outcome, SamplingConfig())
    assert (result.score, result.details["scorer"]) == (1.0, "exact")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("good", "agent bad_score returned 'good', which is not a finite number"),
        (float("nan"), "agent bad_score returned nan"),
        (ScoreResult(1.0, ["x"]), "which is not a mapping"),  # type: ignore[arg-type]
        (ScoreResult(1.0, {}, [1.0, 2.0]), "2 model calls|for 1 model calls"),
        (None, "evaluate of agent bad_score returned None"),
        (RuntimeError("no judge"), "evaluate of agent bad_score raised RuntimeError: no judge"),
    ],
)
async def test_a_malformed_score_fails_the_attempt_as_the_scorers(given: Any, problem: str) -> None:
    @agent("bad_score")
    class BadScore:
        async def run(self, rollout: Rollout) -> Outcome:
            await rollout.generate()
            return Outcome(StopReason.ANSWERED, "x")

        async def evaluate(self, context: ScorerContext) -> Any:
            if isinstance(given, Exception):
                raise given
            return given

    with pytest.raises(ScorerError, match=problem):
        await Trajectory("hello").run("bad_score")


async def test_a_class_that_cannot_be_made_or_has_no_run_is_named() -> None:
    @agent("needs_arguments")
    class NeedsArguments:
        def __init__(self, size: int) -> None: ...

        async def run(self, rollout: Rollout) -> Outcome:
            raise AssertionError

    with pytest.raises(FailureError, match="the class of agent needs_arguments raised TypeError"):
        await Trajectory("hello").run("needs_arguments")
    with pytest.raises(TypeError, match="no async method 'run'"):
        agent("x")(dict)
    with pytest.raises(ConfigError, match="no async method 'run'"):
        AGENTS.get("collections:OrderedDict")
