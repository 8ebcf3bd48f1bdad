"""Run one trajectory of one task and print it, and keep nothing: ``agentrl try``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from agentrl.chat.chat_format import ChatFormat, unseen_problem
from agentrl.config.load import Configs
from agentrl.config.schema import AgentConfig, ModelConfig, RunConfig, SamplingConfig, ToolConfig
from agentrl.documents.base import now
from agentrl.documents.model_call import DispatchedSamplingTask, unpack_ids
from agentrl.documents.record import Failure, Record
from agentrl.documents.status import RecordStatus
from agentrl.documents.task import Claim, Task, scorer_weights, task_key
from agentrl.documents.task_json import make_task, parse
from agentrl.documents.task_messages import BadTaskError
from agentrl.documents.task_source import TaskSource
from agentrl.environments.session import EnvironmentSession, open_environment
from agentrl.environments.tasks import generate, is_address
from agentrl.errors import ConfigError, FailureError, TaskFileError, TrajectoryError
from agentrl.gateway.trial import TrialGateway
from agentrl.inference.engine import Engine
from agentrl.llm.agent_config import load_judge
from agentrl.observe.terminal import clean, stdout_console
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.agents import AGENTS
from agentrl.rollout.context import CONTEXT_MANAGERS
from agentrl.rollout.model_call import PendingCall
from agentrl.rollout.rollout import Rollout
from agentrl.rollout.run_agent import run_agent, score_trajectory
from agentrl.rollout.setup import allow_configured_imports, open_format, sampling_params
from agentrl.rollout.trace import end_trajectory, trajectory_span
from agentrl.rollout.trial_engine import OneEngine, PromptOnly, trial_router
from agentrl.scoring.answers import check_schema
from agentrl.scoring.judge import JUDGES
from agentrl.scoring.scorers import ScoreResult, require_scorer
from agentrl.snapshot.trajectory_page import render_trajectory
from agentrl.store.client import Store, open_existing
from agentrl.store.views.read import WholeTrajectory
from agentrl.tools.base import Schema, Trajectory
from agentrl.tools.browse import open_browse_agent
from agentrl.tools.pool import ToolPool
from agentrl.tools.session import ToolSession

_ID = "try"


@dataclass(kw_only=True)
class _Trial:
    """One trajectory: its dependencies, and its results so far."""

    configs: Configs
    claim: Claim
    engine: Engine
    chat_format: ChatFormat
    tools: ToolSession
    gateway: TrialGateway
    calls: list[DispatchedSamplingTask]
    offered: Sequence[Schema] = ()
    """The tools of the first prompt, unless a client names its own."""
    environment: EnvironmentSession | None = None
    outcome: Outcome | None = None
    result: ScoreResult | None = None
    trace_id: str | None = None
    began: datetime = field(default_factory=now)
    ended: datetime | None = None
    """When the agent ended, and scoring began."""

    async def run(self) -> None:
        """Run the agent, then score. Raises FailureError; ``calls`` holds the model calls until then."""
        agent, sampling = self.configs[AgentConfig], self.configs[SamplingConfig]
        with trajectory_span(self.claim, self.claim.task.agent_name or agent.agent_name) as span:
            self.trace_id = span.trace_id
            try:
                async with asyncio.timeout(agent.trajectory_timeout_seconds):
                    rollout = await self._run_agent(agent)
            except TimeoutError as error:
                limit = agent.trajectory_timeout_seconds
                raise TrajectoryError(f"the trajectory took longer than {limit:g} s") from error
            self.ended = now()
            if self.outcome is not None:
                end_trajectory(span, self.outcome, rollout.turns, rollout.tool_calls)
                self.result = await score_trajectory(self.claim.task, rollout, self.outcome, sampling)
                span.set({"agentrl.score": self.result.score})

    async def _run_agent(self, agent: AgentConfig) -> Rollout:
        name = self.claim.task.agent_name or agent.agent_name
        self.offered = await self.tools.list()
        rollout = Rollout(
            self.claim,
            agent,
            chat_format=self.chat_format,
            engine=self.engine,
            tools=self.tools,
            schemas=self.offered,
            environment=self.environment,
            params=sampling_params(self.configs[SamplingConfig], self.chat_format),
            seed=self.configs[RunConfig].seed,
            manage_context=CONTEXT_MANAGERS.get(agent.new_context),
            write=self._keep,
            gateway=self.gateway,
        )
        try:
            self.outcome = await run_agent(AGENTS.get(name), name, rollout, self.configs[SamplingConfig])
        finally:
            await rollout.finish()
            self.calls += self.gateway.calls
            if self.gateway.calls:
                self.offered = self.gateway.calls[0].tools or ()
        return rollout

    async def _keep(self, call: PendingCall) -> None:
        self.calls.append(call.document())


async def try_task(
    configs: Configs, wanted: str, *, line: int | None, engine_url: str | None, prompt: bool = False
) -> int:
    """Run one trajectory of a task and print it. Returns 1 if it failed, else 0.

    ``prompt``: print the first prompt instead, and call no engine. A warning names tools that it lacks.
    ``wanted`` is a JSON object, the id of a task of the run, or a task file. Raises ConfigError and
    TaskFileError for tasks that cannot be tried.
    """
    failure: Failure | None = None
    async with AsyncExitStack() as stack:
        store = await _store(stack, configs, wanted, "none" if prompt else engine_url)
        task = await _task(wanted, line, store)
        _require_usable(configs, task)
        chat_format = await open_format(store, configs)
        browse = open_browse_agent(configs[SamplingConfig].agent_config_path)
        pool = await stack.enter_async_context(ToolPool(configs[ToolConfig], browse))
        claim = Claim(task=task, traj_id=0, attempt=0, owner=_ID)
        environment = open_environment(task, call_timeout=configs[ToolConfig].tool_timeout_seconds)
        shown = PromptOnly()
        opened = trial_router(configs, store, engine_url, chat_format)
        router = OneEngine(shown) if prompt else await stack.enter_async_context(opened)
        trial = _Trial(
            configs=configs,
            claim=claim,
            engine=await stack.enter_async_context(router.session(_ID)),
            chat_format=chat_format,
            gateway=TrialGateway(configs, router, chat_format),
            tools=await stack.enter_async_context(pool.session(Trajectory.of(claim), environment)),
            calls=[],
            environment=environment,
        )
        try:
            await trial.run()
        except FailureError as error:
            failure = Failure(kind=error.kind, message=str(error))
    first = next((unpack_ids(call.context_ids).tolist() for call in trial.calls), shown.ids)
    unseen = None if first is None else unseen_problem(chat_format, first, trial.offered)
    if unseen is not None:
        print(f"warning  {clean(unseen)}", file=sys.stderr)
    if prompt and first is not None:
        print(clean(chat_format.decode(first)))
        return 0
    stdout_console().print(
        render_trajectory(WholeTrajectory(record=_record(trial, failure), calls=trial.calls))
    )
    return 1 if failure else 0


async def _store(
    stack: AsyncExitStack, configs: Configs, wanted: str, engine_url: str | None
) -> Store | None:
    """Open the run's store if the task, the engine or the model comes from it."""
    of_run = not _is_json(wanted) and not is_address(wanted) and not _is_file(wanted)
    if not of_run and engine_url is not None and configs[ModelConfig].model_name_or_path is not None:
        return None
    store = await stack.enter_async_context(await open_existing(configs[RunConfig]))
    if of_run:  # names in a database that others write do not decide what is imported here
        await allow_configured_imports(store, configs)
    return store


async def _task(wanted: str, line: int | None, store: Store | None) -> Task:
    if _is_json(wanted):
        try:
            item = parse(wanted.encode("utf-8", "surrogatepass"))
            return make_task({"id": _ID, **item}, _ID, 0, 1)
        except BadTaskError as error:
            raise TaskFileError(f"this is not a task: {error}", hint="see docs/tasks.md") from error
    if is_address(wanted):
        return await asyncio.to_thread(lambda: _task_of_file(generate(wanted, _ID), line))
    if _is_file(wanted):
        return await asyncio.to_thread(lambda: _task_of_file(TaskSource(Path(wanted)), line))
    if store is None:
        raise ConfigError(f"{wanted!r} is neither JSON nor a file", hint="give one of them")
    for key in (wanted, task_key("train", 0, wanted)):
        task = await store.tasks.get(key)
        if task is not None:
            return task
    raise ConfigError(
        f"{wanted!r} is neither a task of run {store.run_name!r} nor a file",
        hint="give a task's _id (split/epoch/id), its id in the task file, a task file, or JSON",
    )


def _is_json(wanted: str) -> bool:
    return wanted.lstrip().startswith("{")


def _is_file(wanted: str) -> bool:
    try:
        return Path(wanted).is_file()
    except (OSError, ValueError):
        return False


def _task_of_file(source: TaskSource, line: int | None) -> Task:
    path = source.path
    for item in source.items():
        if line is not None and item.line != line:
            continue
        try:
            if isinstance(item.value, BadTaskError):
                raise item.value
            return make_task(item.value, _ID, 0, 1, path.parent)
        except BadTaskError as error:
            raise TaskFileError(f"{path}:{item.line}: {error}", hint="correct this line") from error
    where = f"no task begins on line {line}" if line is not None else "it holds no tasks"
    raise TaskFileError(f"{path}: {where}", hint="give --line N of a task")


def _require_usable(configs: Configs, task: Task) -> None:
    """Raise ConfigError for a task that no sampler can run."""
    AGENTS.get(task.agent_name or configs[AgentConfig].agent_name)
    require_scorer(task.scorer)
    check_schema(task.answer_schema)
    if not JUDGES.isdisjoint(scorer_weights(task.scorer)):
        load_judge(configs[SamplingConfig].agent_config_path)


def _record(trial: _Trial, failure: object) -> Record:
    """Return the Record that a sampler would store."""
    task, calls, outcome, result = trial.claim.task, trial.calls, trial.outcome, trial.result
    versions = [span.version for call in calls for span in call.versions]
    record = Record(
        id=trial.claim.record_id,
        task=task.id,
        traj_id=0,
        attempt=0,
        split=task.split,
        epoch=task.epoch,
        status=RecordStatus.FAILED if failure else RecordStatus.SCORED,
        query=task.query,
        answer=task.answer,
        owner=_ID,
        turns=len(calls),
        tool_calls=sum(len(call.tool_executions) for call in calls),
        context_resets=sum(call.is_context_reset for call in calls),
        prompt_tokens=calls[-1].prompt_tokens if calls else 0,
        generated_tokens=sum(call.generated_tokens for call in calls),
        min_version=min(versions, default=None),
        max_version=max(versions, default=None),
        created_at=trial.began,
        completed_at=trial.ended or now(),
        trace_id=trial.trace_id,
        failure=failure if isinstance(failure, Failure) else None,
        train_rule=trial.gateway.train_rule,
        untrained_calls=tuple(trial.gateway.left_out),
    )
    if outcome is not None:
        record = replace(record, stop_reason=outcome.stop_reason, final_answer=outcome.final_answer)
    if result is not None:
        record = replace(record, score=result.score, score_details=result.details, scored_at=now())
    return record
