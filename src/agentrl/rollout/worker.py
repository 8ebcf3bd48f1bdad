"""Run one claimed trajectory to its score: agent, answer, scorer. Each state is stored when it is reached."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from agentrl.base.spans import Span
from agentrl.base.user_code import allow, contain, contain_call, is_allowed
from agentrl.calls.journal import Journal
from agentrl.calls.trace import end_trajectory, trajectory_span
from agentrl.calls.trajectory_calls import CallWriter, TrajectoryCalls
from agentrl.chat.chat_format import ChatFormat
from agentrl.chat.renderer import CLOCK
from agentrl.columns.outages import Clock, HeldTools, Outages
from agentrl.columns.scores import Scoring
from agentrl.config.schema import AgentConfig, ClaimConfig, SamplingConfig, ToolConfig
from agentrl.documents.record import Failure, Record
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import RecordStatus, SlotStatus
from agentrl.documents.task import Claim, Task
from agentrl.environments.environment import (
    EnvironmentSession,
    environment_names,
    keeps_files,
    names_of,
    open_environment,
)
from agentrl.environments.snapshots import Snapshots
from agentrl.errors import (
    ConfigError,
    FailureError,
    LeaseLostError,
    ReplayError,
    ScorerError,
    SessionLostError,
    StoreDeniedError,
    StoreError,
    StoreUnavailableError,
    ToolServerError,
    TrajectoryError,
)
from agentrl.inference.engine import Engine, Router
from agentrl.observe.logging import failure_text
from agentrl.rollout.agent_io import Gateway, Outcome
from agentrl.rollout.agents import AGENTS, CONTEXT_MANAGERS, Agent, AgentClass, run_agent, scorer_context
from agentrl.rollout.rollout import Rollout
from agentrl.scoring.answers import check_schema
from agentrl.scoring.scorers import require_scorer
from agentrl.tools.pool import ToolPool
from agentrl.tools.tool import TrajectoryInfo

if TYPE_CHECKING:
    from agentrl.store.client import Store

T = TypeVar("T")

logger = logging.getLogger(__name__)

_DEPENDENCIES = frozenset({"engine", "tool", "session"})
"""Kinds of failure that a signal to other processes can cause."""

_KEEP_SECONDS = 2.0
_SIGNAL_SECONDS = 0.5
"""Longest delay until this process notices a signal that also ended a tool server or an engine."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Run trajectories. Stateless: serves any number of claims concurrently."""

    store: Store
    router: Router
    tools: ToolPool
    chat_format: ChatFormat
    params: SamplingParams
    seed: int
    """Seed of the run; the sampling seed of each model call is derived from it."""
    agent: AgentConfig
    sampling: SamplingConfig
    claims: ClaimConfig
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when this process must stop: calls that run may end, and no other begins.

    Failures of engines and tool servers then count as interruptions."""
    environment_timeout: float = ToolConfig.tool_timeout_seconds
    """Bound of each call of an environment's method, in seconds."""
    outages: Outages = field(default_factory=Outages)
    """The circuit breakers of this process."""
    gateway: Gateway | None = None
    """Opens base URLs for agents that are clients of a model API."""
    snapshots: Snapshots | None = None
    """Keeps the files that trajectories change in their containers; None: none are kept."""

    @cached_property
    def scoring(self) -> Scoring:
        """How trajectories are scored, at once or from the queue."""
        return Scoring(store=self.store, outages=self.outages, sampling=self.sampling, claims=self.claims)

    async def run(self, claim: Claim) -> bool:
        """Run one claimed trajectory to its score; return whether it was scored.

        While an engine or a tool server is down, the trajectory waits. If it waits too long, its slot is
        released. A trajectory that gets no score waits for one, sampled, in the queue. Any other failure is
        stored in the Record, and any sampler retries it later. On cancellation the caller must
        release the claim. While this process stops, a trajectory cancels itself at its next call, and at a
        failure of an engine, a tool server or a scorer. Raises StoreError if the database stays unavailable
        or refuses this user, and ConfigError if this process cannot work on the task: the caller must release
        the claim then too. A value that no document can hold fails this trajectory only.
        """
        with trajectory_span(claim, claim.task.agent_name or self.agent.agent_name) as span:
            if span.trace_id is not None:
                claim = replace(claim, trace_id=span.trace_id)
            return await self._run(claim, span)

    async def _run(self, claim: Claim, span: Span) -> bool:
        clock = Clock()
        try:
            try:
                async with clock.limit(self.agent.trajectory_timeout_seconds):
                    rollout, outcome = await self._run_trajectory(claim, clock)
                end_trajectory(
                    span, outcome.stop_reason, outcome.final_answer, rollout.turns, rollout.tool_calls
                )
                return await self._score(claim, rollout, outcome, span)
            except TimeoutError:
                limit = self.agent.trajectory_timeout_seconds
                span.fail("timeout")
                await self._fail(claim, "timeout", f"the trajectory took longer than {limit:g} s")
            except FailureError as error:
                span.fail(error.kind, str(error))
                if isinstance(error, ReplayError):
                    await self._begin_anew(claim, error)
                    return False
                is_lost = isinstance(error, SessionLostError)
                # Blame a slot whose trajectories lose session after session: they may end the server.
                is_to_blame = is_lost and self.outages.count_lost_session(claim.task.id, claim.traj_id)
                if error.outage is None or is_to_blame:
                    await self._fail(claim, error.kind, error)
                else:
                    await self._give_back(claim, error)
            except (ConfigError, LeaseLostError, StoreUnavailableError, StoreDeniedError):
                raise
            except Exception as error:
                logger.exception("a trajectory cannot go on", extra={"record": claim.record_id})
                span.fail(FailureError.kind, str(error))
                await self._fail(claim, FailureError.kind, error)
        except LeaseLostError:
            logger.warning("the claim was lost; its result is dropped", extra={"record": claim.record_id})
            span.fail("lease")
        return False

    async def _run_trajectory(self, claim: Claim, clock: Clock) -> tuple[Rollout, Outcome]:
        # Create the Record before anything can fail: it is where the failure is stored.
        record = await self.store.records.create(claim)
        journal = await self._journal(claim, record)
        # Bound the sum by the time of the owners: parallel calls took less than their seconds together. An
        # owner that died has left nothing but its calls; one that stopped, also the time of one that hangs.
        clock.spend(max(record.spent_seconds, min(journal.seconds, record.owned_seconds)))
        name = claim.task.agent_name or self.agent.agent_name
        agent = await self._import(claim.task, name)
        files = None
        if self.snapshots is not None and keeps_files(claim.task):
            files = self.snapshots.of(claim.record_id, claim.attempt)
        environment = open_environment(claim.task, call_timeout=self.environment_timeout, files=files)
        await self.store.records.advance(claim, RecordStatus.RUNNING)
        async with (
            CallWriter(self.store, claim) as writer,
            self._open_rollout(claim, record, journal, environment, writer, clock) as rollout,
        ):
            outcome = await self._run_agent(claim, agent, name, rollout, writer)
        await self.store.records.advance(
            claim,
            RecordStatus.COMPLETED,
            final_answer=outcome.final_answer,
            stop_reason=outcome.stop_reason,
            tool_rewards=rollout.tool_rewards,
            agent_score=rollout.agent_score,
            harness=rollout.harness_run,
            partial=None,
            **({} if rollout.train_rule is None else {"train_rule": rollout.train_rule}),
        )
        await self._delete_files(claim)
        return rollout, outcome

    async def _journal(self, claim: Claim, record: Record) -> Journal:
        """Return what earlier owners of the trajectory have done."""
        # Spare new trajectories the query.
        calls = await self.store.model_calls.by_record(record.id) if record.traj else []

        async def drop(first: int) -> None:
            await self.store.model_calls.drop(claim, first)

        async def note(journal: Journal) -> None:
            await self.store.records.note(
                claim, replayed=journal.replayed, tokens=journal.tokens, tool_seconds=journal.tool_seconds
            )

        return Journal(calls, drop, note, record.events)

    async def _import(self, task: Task, agent_name: str) -> Agent | AgentClass:
        """Return the agent; check that this process can use it and the task's scorer and answer schema."""
        if not all(map(is_allowed, (agent_name, *names_of(task), *environment_names(task)))):
            allow(await self.store.imports.paths())  # loaded after this process started
        agent = contain_call(lambda: AGENTS.get(agent_name), f"agent {agent_name}", TrajectoryError)
        contain_call(lambda: require_scorer(task.scorer), f"scorer {task.scorer}", ScorerError)
        check_schema(task.answer_schema)
        return agent

    @asynccontextmanager
    async def _open_rollout(
        self, claim: Claim, record: Record, journal: Journal, environment: EnvironmentSession | None,
        writer: CallWriter, clock: Clock,
    ) -> AsyncIterator[Rollout]:  # fmt: skip
        """Open the tools, the environment and the engine of a trajectory; yield the Rollout over them."""
        trajectory = asyncio.current_task()
        assert trajectory is not None

        def begin() -> None:
            """Let a call begin; while this process stops, cancel the trajectory instead.

            Why not an error? An agent may catch it and return an answer; `contain` lets no agent suppress the
            cancellation of its trajectory.
            """
            if self.stop.is_set():
                trajectory.cancel()
                raise asyncio.CancelledError("this process stops: no call begins")

        async def hold(call: Callable[[], Awaitable[T]]) -> T:
            async def made() -> T:
                begin()
                return await call()

            return await self.outages.hold(made, clock)

        async with AsyncExitStack() as stack:
            stack.callback(CLOCK.reset, CLOCK.set(record.created_at))
            session = await hold(
                lambda: stack.enter_async_context(self.tools.session(TrajectoryInfo.of(claim), environment))
            )
            if environment is not None:
                # Record the success: ``hold`` records only those of calls that have failed before.
                self.outages.breaker(environment.dependency).succeeded()
            tools = HeldTools(session, self.outages, clock)
            engine = await stack.enter_async_context(
                self.router.session(claim.record_id, claim.task.id, record.partial, clock.stopped)
            )
            await stack.enter_async_context(self._keeping_partial(claim, engine, writer, clock))
            calls = TrajectoryCalls(
                claim, self.agent, chat_format=self.chat_format, engine=engine, params=self.params,
                seed=self.seed, writer=writer, journal=journal, images=self.store.images, hold=hold,
                begin=begin, environment=environment, tools=tools,
            )  # fmt: skip
            stack.push_async_callback(calls.stop_keeping)
            yield Rollout(
                claim, self.agent, calls=calls, tools=tools,
                schemas=await contain(tools.list, "tools", ToolServerError),
                manage_context=CONTEXT_MANAGERS.get(self.agent.new_context), environment=environment,
                gateway=self.gateway, time_limit=clock.limit,
            )  # fmt: skip

    @asynccontextmanager
    async def _keeping_partial(
        self, claim: Claim, engine: Engine, writer: CallWriter, clock: Clock
    ) -> AsyncIterator[None]:
        """Store the spent time and an unfinished model call if the trajectory is cancelled or given back."""
        try:
            yield
        except (asyncio.CancelledError, FailureError) as error:
            # Keep nothing of a failed attempt: the next one must be another sample, not its continuation.
            is_over = isinstance(error, FailureError) and error.outage is None
            if not is_over:
                kept = {} if engine.partial is None else {"partial": engine.partial}
                with suppress(StoreError, TimeoutError):  # the next attempt then begins without them
                    async with asyncio.timeout(_KEEP_SECONDS):
                        # Store the calls first: each drops what was kept before it, which is used up.
                        await writer.flush()
                        await self.store.records.keep(claim, spent_seconds=clock.spent(), **kept)
            raise

    async def _run_agent(
        self, claim: Claim, agent: Agent | AgentClass, name: str, rollout: Rollout, writer: CallWriter
    ) -> Outcome:
        """Run the agent and store all its model calls, also if the agent failed."""
        try:
            outcome = await run_agent(agent, name, rollout, self.sampling)
        except (FailureError, ConfigError):
            await rollout.finish()
            await writer.flush()
            if rollout.harness_run is not None:
                await self.store.records.keep(claim, harness=rollout.harness_run)
            raise
        await rollout.finish()
        await writer.flush()
        return outcome

    async def _score(self, claim: Claim, rollout: Rollout, outcome: Outcome, span: Span) -> bool:
        logger.info(
            "sampled",
            extra={
                "record": claim.record_id, "stop": str(outcome.stop_reason), "turns": rollout.turns,
            },
        )  # fmt: skip
        is_scored = rollout.agent_score is not None
        if not is_scored and claim.task.scorer in self.outages.needs_down(claim.record_id).scorers:
            await self.store.attempts.release(claim)
            return False
        if not is_scored:
            self.outages.begin_probes(claim.record_id, (), claim.task.scorer)
        context = scorer_context(claim.task, rollout, outcome, self.sampling)
        return await self.scoring.score(claim, context, span)

    async def _give_back(self, claim: Claim, error: FailureError) -> None:
        """Release the slot of a trajectory that has waited for too long; this uses up no attempt."""
        logger.warning(
            "slot released: what its trajectory needs stays down",
            extra={"record": claim.record_id, "why": failure_text(error)},
        )
        await self.store.attempts.release(claim)

    async def _begin_anew(self, claim: Claim, error: ReplayError) -> None:
        """End a trajectory whose tools are not as they were; this uses up no attempt."""
        why = failure_text(error)
        await self._require_no_signal(claim, why)
        status = await self.store.attempts.begin_anew(claim, Failure(kind=error.kind, message=why))
        then = "begins anew" if status is SlotStatus.OPEN else "has begun anew too often, and fails"
        logger.warning(
            "a trajectory %s: its tools are not as they were", then,
            extra={"record": claim.record_id, "why": why},
        )  # fmt: skip
        await self._delete_files(claim)

    async def _delete_files(self, claim: Claim) -> None:
        """Delete the snapshots of a trajectory that nobody goes on with."""
        if self.snapshots is not None and keeps_files(claim.task):
            await self.snapshots.delete(claim.record_id)

    async def _require_no_signal(self, claim: Claim, why: str) -> None:
        """Raise CancelledError if this process is stopping: its signal may have ended tools and engines."""
        # Wait a moment: a signal to the process group may end a tool server before this process sees it.
        with suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), _SIGNAL_SECONDS)
        if self.stop.is_set():
            logger.info("interrupted", extra={"record": claim.record_id, "why": why})
            raise asyncio.CancelledError

    async def _fail(self, claim: Claim, kind: str, why: Exception | str) -> None:
        message = failure_text(why)
        if kind in _DEPENDENCIES:
            await self._require_no_signal(claim, message)
        logger.warning("trajectory failed", extra={"record": claim.record_id, "kind": kind, "why": message})
        try:
            await self.store.attempts.fail(
                claim,
                Failure(kind=kind, message=message),
                max_attempts=self.claims.max_attempts,
                backoff_seconds=self.claims.retry_backoff_seconds,
            )
            await self._delete_files(claim)
        except (LeaseLostError, StoreUnavailableError, StoreDeniedError):
            raise
        except StoreError as error:
            logger.error(
                "a failure cannot be stored; the lease of its slot runs out",
                extra={"record": claim.record_id, "why": error.message},
            )
