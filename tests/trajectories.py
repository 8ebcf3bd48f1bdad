"""Run an agent on a scripted engine, and convert what it leaves behind."""

from __future__ import annotations

from typing import Any

from rollout_fakes import FakeSession, FakeTools, ScriptedEngine, format_of, make_rollout

from agentrl.calls.journal import Journal
from agentrl.calls.turns import Turn
from agentrl.config.schema import AgentConfig, GroupConfig, SamplingConfig
from agentrl.data.finalize_group import to_training_data
from agentrl.documents.model_call import DispatchedSamplingTask, unpack_ids
from agentrl.documents.record import Record
from agentrl.documents.status import CallStatus
from agentrl.documents.task import Claim, Task
from agentrl.documents.training import DBRecordData
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.agents import AGENTS, CONTEXT_MANAGERS, Agent, run_agent, scorer_context
from agentrl.rollout.rollout import Rollout
from agentrl.scoring.scorers import ScoreResult, score_context

ADD = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
ANSWER = "So it is <answer>3</answer>"
LONG = "I think of it at length. " * 4
FULL = {"max_prompt_tokens": 700, "prompt_reserve_tokens": 540}
"""Limits that ``LONG`` and a call exceed."""


class Trajectory:
    """One run of an agent and what it left behind."""

    def __init__(self, *script: Any, task: dict[str, Any] | None = None, **flags: Any) -> None:
        self.task = Task(
            id="train/0/t", task_id="t", split="train", epoch=0, order=0, query="1+2?", **task or {}
        )
        self.engine = ScriptedEngine(format_of(), *script)
        self.tools = FakeTools()
        self.pending: list[Turn] = []
        self.calls: list[DispatchedSamplingTask] = []
        self.config = AgentConfig(**flags)
        self.manager = CONTEXT_MANAGERS.get(self.config.new_context)
        self.rollout: Rollout
        self.journal: Journal | None = None

    async def run(self, agent: str | Agent = "react", attempt: int = 1) -> Outcome:
        """Run an agent, or the registered one of a name."""

        async def write(call: Turn) -> None:
            self.pending.append(call)
            self.calls.append(call.document())

        self.rollout = make_rollout(
            Claim(task=self.task, traj_id=0, attempt=attempt, owner="o"), self.config,
            chat_format=self.engine.chat_format, engine=self.engine, write=write,
            tools=FakeSession(self.tools, self.task.tools), schemas=self.tools.list(self.task.tools),
            manage_context=self.manager, journal=self.journal,
        )  # fmt: skip
        name = agent if isinstance(agent, str) else agent.__name__
        outcome = await run_agent(
            AGENTS.get(agent) if isinstance(agent, str) else agent, name, self.rollout, SamplingConfig()
        )
        await self.rollout.finish()
        return outcome

    @property
    def statuses(self) -> list[CallStatus]:
        """The status of each call."""
        return [call.status for call in self.calls]


def converted(trajectory: Trajectory) -> DBRecordData:
    """Return the training data of the trajectory."""
    record = Record(
        id="train/0/t/0/1", task=trajectory.task.id, traj_id=0, attempt=1, split="train", epoch=0, query="q",
        score=1.0, turns=len(trajectory.calls),
    )  # fmt: skip
    data = to_training_data(trajectory.task, record, trajectory.calls, 0.5, GroupConfig())
    assert data is not None
    return data


def trained(trajectory: Trajectory) -> list[list[int]]:
    """Return the ids of every trained span that the trajectory is converted to."""
    data = converted(trajectory)
    ids = unpack_ids(data.input_ids).tolist()
    return [ids[span.start : span.end] for span in data.spans]


async def score_trajectory(
    task: Task, rollout: Rollout, outcome: Outcome, sampling: SamplingConfig
) -> ScoreResult:
    """Score a finished trajectory with the scorer of its task."""
    context = scorer_context(task, rollout, outcome, sampling)
    return await score_context(task.scorer, context, sampling.scorer_timeout_seconds)
