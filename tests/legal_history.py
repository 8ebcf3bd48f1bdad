"""A random legal history of a run: what samplers, trainers, engines and operators may do, in any order."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import small_run as run
from ready_data import ready_data

from agentrl.config.schema import GroupConfig
from agentrl.data.finalize_group import decide_stored
from agentrl.documents.record import Failure
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import RecordStatus, StopReason, TaskStatus
from agentrl.documents.task import Claim, Slot, Task, task_key
from agentrl.documents.training import Checkpoint, CheckpointState, TrainStep
from agentrl.errors import LeaseLostError
from agentrl.lab.deletion import Retention
from agentrl.lab.regroup import NewScore, Reopening, Rescoring
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.store.client import Store
from agentrl.store.epochs import Selection
from agentrl.store.steps import StaleVersions
from agentrl.weights.folder import checksums

SPLITS = ("train", "eval")
GENERATIONS = 2
MAX_ATTEMPTS = 2
MOST_EPOCHS = 4
"""Epochs of which a task may be begun before they are opened."""
GROUPS_PER_STEP = 2


class DiedError(Exception):
    """The trainer is killed here."""


@dataclass
class History:
    """One run and what its processes hold in memory. Each operation in ``ways`` is legal at any time."""

    store: Store
    weights: Path
    rng: random.Random
    rules: GroupConfig
    running: dict[str, tuple[Claim, int]] = field(default_factory=dict)
    """Claims by Record id, with the number of model calls made."""
    lost: list[tuple[Claim, int]] = field(default_factory=list)
    """Claims whose lease has run out; their owners do not know it."""
    loaded: int = 0
    owners: int = 0
    step: int = 0
    attempt: int = 0
    contained: list[str] = field(default_factory=list)
    """TrainSteps in the trainer's weights."""
    checkpoint: Checkpoint | None = None
    served: int = 0
    """The version that the engines serve."""

    @property
    def ways(self) -> list[Callable[[], Awaitable[None]]]:
        """What may happen next; frequent things are named more than once."""
        return [
            self.load, self.claim, self.claim, self.claim_selected, self.sample_selected,
            self.sample_selected,
            self.converse, self.converse, self.converse,
            self.score, self.score, self.score, self.score, self.fail, self.release, self.expire,
            self.write_late, self.reap, self.postpone, self.score_queued, self.score_queued,
            self.finalize, self.finalize, self.start_trainer, self.train,
            self.train, self.train,
            self.die_in_a_step, self.die_between_parts, self.die_publishing, self.save,
            self.update_engines, self.update_engines, self.mark_stale,
            self.reopen, self.rescore, self.prune, self.open_epoch, self.resample_errors,
        ]  # fmt: skip

    async def go_on(self, operations: int) -> None:
        """Do so many operations."""
        for _ in range(operations):
            await self.rng.choice(self.ways)()

    async def load(self) -> None:
        """A task file grows by a few tasks."""
        split = self.rng.choice(SPLITS)
        slots = tuple(Slot(traj_id=number) for number in range(GENERATIONS if split == "train" else 1))
        tasks = [
            Task(id=task_key(split, 0, name), task_id=name, split=split, epoch=0, order=place, query="1 + 1?",
                 slots=slots)
            for place, name in enumerate((f"t{self.loaded}", f"t{self.loaded + 1}"), start=self.loaded)
        ]  # fmt: skip
        self.loaded += len(tasks)
        await self.store.tasks.load(tasks)

    async def open_epoch(self) -> None:
        """The next epoch of the training tasks."""
        epochs = await self.store.tasks.epochs("train")
        if epochs and not await self.store.tasks.any_with_status("train", TaskStatus.CREATED):
            following = await self.store.epochs.next("train", max(epochs) + 2)
            if following is not None:
                await self.store.epochs.open("train", following, 0, GENERATIONS)

    async def claim(self) -> None:
        """A sampler claims a slot; it may die before it makes the Record."""
        self.owners += 1
        claim = await self.store.claims.claim(
            split=self.rng.choice(SPLITS), owner=f"sampler-{self.owners}", lease_seconds=600.0
        )
        await self._begin(claim)

    async def claim_selected(self) -> None:
        """A sampler claims a slot, where new groups are begun by what is known of their tasks."""
        self.owners += 1
        limit = self.rng.randint(0, GROUPS_PER_STEP) + await self.store.groups.count_open("train")
        claim = await self.store.claims.claim(
            split="train", owner=f"sampler-{self.owners}", lease_seconds=600.0,
            max_groups_open=limit, selection=Selection(MOST_EPOCHS),
        )  # fmt: skip
        await self._begin(claim)

    async def sample_selected(self) -> None:
        """A sampler claims a group by what is known of its task; all that runs is scored and finalized."""
        for _ in range(GENERATIONS):
            await self.claim_selected()
        while self.running:
            await self.score()
        await GroupFinalizer(self.store, self.rules, split="train", seed=0).run_waiting()

    async def _begin(self, claim: Claim | None) -> None:
        if claim is None:
            return
        if self.rng.random() < 0.9:
            await self.store.records.create(claim)
        if self.rng.random() < 0.9:
            record = await self.store.records.create(claim)
            await self.store.records.advance(claim, RecordStatus.RUNNING)
            self.running[claim.record_id] = claim, record.turns

    async def converse(self) -> None:
        """A model call under the version that the engines serve."""
        if self.running:
            key = self.rng.choice(sorted(self.running))
            claim, calls = self.running[key]
            await self._call(claim, calls)
            self.running[key] = claim, calls + 1

    async def score(self) -> None:
        """A trajectory ends with a score."""
        if not self.running:
            return
        claim, calls = self.running.pop(self.rng.choice(sorted(self.running)))
        if not calls and self.rng.random() < 0.9:
            await self._call(claim, 0)
        stop = self.rng.choice([StopReason.ANSWERED, StopReason.TURNS_LIMIT])
        await self.store.records.advance(claim, RecordStatus.COMPLETED, final_answer="4", stop_reason=stop)
        await self.store.records.advance(claim, RecordStatus.SCORING)
        await self.store.attempts.score(claim, self.rng.choice([0.0, 0.0, 0.5, 1.0]), {"scorer": "exact"})

    async def fail(self) -> None:
        """A trajectory ends with a failure."""
        if self.running:
            claim, _ = self.running.pop(self.rng.choice(sorted(self.running)))
            failure = Failure(kind=self.rng.choice(["engine", "tool"]), message="it went away")
            await self.store.attempts.fail(claim, failure, max_attempts=MAX_ATTEMPTS, backoff_seconds=0.0)

    async def release(self) -> None:
        """A sampler stops and hands a slot back; the next one may have to begin anew."""
        if self.running:
            claim, _ = self.running.pop(self.rng.choice(sorted(self.running)))
            if self.rng.random() < 0.3:
                await self.store.attempts.begin_anew(claim, Failure(kind="replay", message="another result"))
            else:
                await self.store.attempts.release(claim)

    async def expire(self) -> None:
        """A sampler freezes: its lease runs out."""
        if not self.running:
            return
        claim, calls = self.running.pop(self.rng.choice(sorted(self.running)))
        self.lost.append((claim, calls))
        await self.store.database["Task"].update_one(
            {"_id": claim.task.id},
            [{"$set": {"slots": {"$map": {"input": "$slots", "as": "slot", "in": {"$cond": [
                {"$eq": ["$$slot.traj_id", claim.traj_id]},
                {"$mergeObjects": ["$$slot", {"lease_expires_at": {"$subtract": ["$$NOW", 1]}}]}, "$$slot",
            ]}}}}}],
        )  # fmt: skip

    async def write_late(self) -> None:
        """A frozen sampler wakes up and writes: it goes on, unless another has taken the slot over."""
        if not self.lost:
            return
        claim, calls = self.lost.pop(self.rng.randrange(len(self.lost)))
        try:
            await self._call(claim, calls)
        except LeaseLostError:
            return
        assert await self.store.claims.heartbeat([claim], 600.0) == []
        self.running[claim.record_id] = claim, calls + 1

    async def postpone(self) -> None:
        """A trajectory ends, and its scorer fails or is down."""
        if not self.running:
            return
        claim, calls = self.running.pop(self.rng.choice(sorted(self.running)))
        if not calls:
            await self._call(claim, 0)
        await self.store.records.advance(
            claim, RecordStatus.COMPLETED, final_answer="4", stop_reason=StopReason.ANSWERED
        )
        if self.rng.random() < 0.3:
            await self.store.attempts.release(claim)
            return
        await self.store.records.advance(claim, RecordStatus.SCORING)
        await self.store.attempts.postpone(
            claim, Failure(kind="scorer", message="no verdict"), max_scorings=MAX_ATTEMPTS,
            backoff_seconds=0.0, counts=self.rng.random() < 0.7,
        )  # fmt: skip

    async def score_queued(self) -> None:
        """A scorer takes what waits for a score; it may die, or score it."""
        self.owners += 1
        claims = await self.store.claims.claim_sampled(
            split=self.rng.choice(SPLITS), owner=f"scorer-{self.owners}", lease_seconds=600.0, limit=2
        )
        for claim in claims:
            if self.rng.random() < 0.2:
                await self.store.attempts.release(claim)
                continue
            await self.store.records.advance(claim, RecordStatus.SCORING)
            await self.store.attempts.score(claim, self.rng.choice([0.0, 1.0]), {"scorer": "exact"})

    async def reap(self) -> None:
        """Any sampler frees what expired."""
        await self.store.expired_leases.reap(self.rng.choice(SPLITS))

    async def finalize(self) -> None:
        """Any sampler finalizes what is complete."""
        split = self.rng.choice(SPLITS)
        await GroupFinalizer(self.store, self.rules, split=split, seed=0).run_waiting()

    async def start_trainer(self) -> None:
        """A trainer starts: from the last checkpoint, or from nothing."""
        if not self.running and self.rng.random() < 0.5:
            return
        self.attempt = await self.store.trainer_lease.acquire("trainer", "host", 1, 600.0)
        if await self.store.policy_versions.latest() is None:
            await self._publish(0, step=0, train_step=None)
        self.step = self.checkpoint.state.step if self.checkpoint else 0
        self.contained = list(self.checkpoint.state.train_steps) if self.checkpoint else []
        await self.store.policy_versions.withdraw_after(self.step, attempt=self.attempt)
        await self.store.steps.revert_after(self.step, attempt=self.attempt)

    async def train(self) -> None:
        """A step is planned and committed, and mostly published."""
        plan = await self._plan()
        if plan is None:
            return
        await self.store.steps.commit(plan.id, {"loss": 0.1}, plan.data, attempt=self.attempt)
        self.step = plan.step
        self.contained.append(plan.id)
        if self.rng.random() < 0.8:
            reserved, newest = (
                await self.store.policy_versions.reserved(),
                await self.store.policy_versions.newest_id(),
            )
            number = reserved.id if reserved else 1 + (newest or 0)
            await self._publish(number, step=plan.step, train_step=plan.id)

    async def die_in_a_step(self) -> None:
        """A trainer plans a step and dies."""
        if await self._plan() is not None:
            self.attempt = 0

    async def die_between_parts(self) -> None:
        """A trainer dies between two transactions of a plan, a commit or an undoing; another may start."""
        work = self.rng.choice([self.train, self.start_trainer])
        before = self.step, list(self.contained)
        with self._transactions(self.rng.randint(1, 6)), contextlib.suppress(DiedError):
            await work()
            return
        self.attempt = 0
        self.step, self.contained = before

    async def die_publishing(self) -> None:
        """A trainer reserves a version and dies before it publishes it."""
        newest = await self.store.policy_versions.newest_id()
        if self.attempt and newest is not None and self.contained:
            folder = self.weights / f"reserved-{self.attempt}-{newest + 1}"
            reserved = PolicyVersion(
                id=newest + 1, step=self.step, location=str(folder), files=(), train_step=self.contained[-1],
                attempt=self.attempt,
            )  # fmt: skip
            if await self.store.policy_versions.reserved() is None:
                await self.store.policy_versions.reserve(reserved, attempt=self.attempt)
            self.attempt = 0

    @contextlib.contextmanager
    def _transactions(self, limit: int) -> Iterator[None]:
        """Within the block, the trainer dies before its transaction number ``limit`` + 1."""
        connection = self.store.connection
        whole = connection.transaction
        done = 0

        async def transaction(callback: Callable[[Any], Any]) -> Any:
            nonlocal done
            done += 1
            if done > limit:
                raise DiedError
            return await whole(callback)

        with mock.patch.object(connection, "transaction", transaction):
            yield

    async def save(self) -> None:
        """The trainer saves a checkpoint."""
        if self.attempt:
            state = CheckpointState(
                run_name="run", step=self.step, policy_version=self.step, architecture={},
                train_steps=tuple(self.contained),
            )  # fmt: skip
            self.checkpoint = Checkpoint(Path(state.folder_name), state)

    async def update_engines(self) -> None:
        """Engines load the newest version; what they hold stays until then, withdrawn or not."""
        newest = await self.store.policy_versions.latest()
        self.served = newest.id if newest else 0

    async def mark_stale(self) -> None:
        """The trainer sets old data aside."""
        newest = await self.store.policy_versions.latest()
        if self.attempt and newest is not None:
            await self.store.training.mark_stale(
                "train", StaleVersions(((0, newest.id - self.rng.randint(1, 3)),))
            )

    async def reopen(self) -> None:
        """An operator opens failed slots."""
        await Reopening(self.store.connection).reopen(self.rng.choice([(), ("engine",)]))

    async def resample_errors(self) -> None:
        """A sampler starts with --resample_error_records."""
        await self.store.claims.reopen_failed("train")

    async def rescore(self) -> None:
        """An operator scores a group again."""
        rescoring = Rescoring(self.store.connection)
        tasks = await rescoring.tasks()
        if tasks:
            group = await rescoring.group(self.rng.choice(tasks))
            scores = {
                record.id: NewScore(score=self.rng.choice([0.0, 1.0]), details={"scorer": "other"})
                for record in group.records
            }
            await rescoring.apply(group.task.id, scores, decide_stored)

    async def prune(self) -> None:
        """An operator deletes what nothing needs."""
        last_step = self.checkpoint.state.step if self.checkpoint else 0
        await Retention(self.store.connection).prune(last_step=last_step)

    async def _call(self, claim: Claim, index: int) -> None:
        prompt = 2 + 6 * index
        await self.store.model_calls.add(claim, run.call(claim, index, self.served, prompt))

    async def _plan(self) -> TrainStep | None:
        data = await self._ready()
        if not self.attempt or not data:
            return None
        newest = await self.store.policy_versions.latest()
        assert newest is not None
        plan = TrainStep(
            id=f"{self.attempt}/{self.step + 1}", step=self.step + 1, policy_version=newest.id,
            data=tuple(data), owner="trainer",
        )  # fmt: skip
        await self.store.steps.plan(plan, attempt=self.attempt)
        return plan

    async def _ready(self) -> Sequence[str]:
        """A few whole groups."""
        groups: dict[str, list[str]] = {}
        for item in await ready_data(self.store, "train", step=self.step + 1):
            groups.setdefault(item.task, []).append(item.id)
        chosen = self.rng.sample(sorted(groups), min(GROUPS_PER_STEP, len(groups)))
        return [key for task in chosen for key in groups[task]]

    async def _publish(self, version: int, *, step: int, train_step: str | None) -> None:
        folder = self.weights / f"v{version:06d}-{self.attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_bytes(bytes([version % 256, self.attempt % 256]) * 8)
        policy = PolicyVersion(
            id=version, step=step, location=str(folder), files=checksums(folder), train_step=train_step,
            attempt=self.attempt,
        )  # fmt: skip
        await self.store.policy_versions.reserve(policy, attempt=self.attempt)
        await self.store.policy_versions.publish(policy, attempt=self.attempt)
