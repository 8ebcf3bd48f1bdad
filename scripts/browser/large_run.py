"""Write a large run into a database for tests of the dashboard: hours of sampling and training, in a minute.

Documents are made by their classes and pass the validators. The model calls and training data of old
trajectories are pruned, as by ``agentrl db prune``; those of the last groups are complete.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from conversations import HOSTILE, Conversations
from run_services import ability_at, services_of, step_metrics

from agentrl.config.schema import GroupConfig
from agentrl.documents.document import Root, now
from agentrl.documents.record import Failure, Label, Record, label_key
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import DataStatus, RecordStatus, SlotStatus, StepStatus, StopReason, TaskStatus
from agentrl.documents.task import Slot, Task, record_key, task_key
from agentrl.documents.training import DBRecordData, TrainStep
from agentrl.scoring.groups import decide_group
from agentrl.store.client import Store
from agentrl.store.mechanics.connection import SETTINGS

SPLIT: Final = "train"
GENERATIONS: Final = 8
STEP_TRAJECTORIES: Final = 128
STEP_SECONDS: Final = 90.0
_COMPLETE_GROUPS = 80
_OPEN_GROUPS = 12
_FAILED_SHARE = 0.015
_BATCH = 1000
_COLLECTIONS = {"RunSettings": SETTINGS}
_FAILURES = (
    ("engine", "POST http://10.0.0.11:30000/generate: the server closed the connection"),
    ("tool", "server sandbox: call run_python timed out after 30 s"),
    ("timeout", "the trajectory took longer than 900 s"),
)


@dataclass(slots=True)
class LargeRun:
    """Makes the documents of a run of about ``trajectories`` attempts, oldest first."""

    trajectories: int
    tokenizer_folder: Path
    seed: int = 0
    interesting: dict[str, str] = field(default_factory=dict)
    """Ids for the pages to open: ``trained``, ``sibling``, ``failed``, ``hostile``; ``step``."""
    _rng: random.Random = field(init=False)
    _texts: Conversations = field(init=False)
    _ready: list[tuple[Record, Task]] = field(default_factory=list)
    _data: dict[str, DBRecordData] = field(default_factory=dict)
    _steps: int = 0
    _began: datetime = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._texts = Conversations(self.tokenizer_folder, self._rng)

    def documents(self) -> Iterator[Root]:
        """Yield every document of the run."""
        groups = self.trajectories // GENERATIONS
        questions = max(1, groups // 5)
        seconds = groups * GENERATIONS * 0.89 / STEP_TRAJECTORIES * STEP_SECONDS
        self._began = now() - timedelta(seconds=seconds)
        yield self._version(0, self._began)
        for number in range(groups):
            at = self._began + timedelta(seconds=seconds * (number + 1) / groups)
            complete = number >= groups - _COMPLETE_GROUPS
            yield from self._group(number, questions, at, progress=number / groups, complete=complete)
        for number in range(groups, groups + _OPEN_GROUPS):
            yield from self._open_group(number, questions)
        yield from self._data.values()
        self._choose()
        yield from self._labels()
        yield from services_of(self._steps, self._began)
        self.interesting["step"] = str(self._steps)

    def _group(
        self, number: int, questions: int, at: datetime, *, progress: float, complete: bool
    ) -> Iterator[Root]:
        """Yield a finalized group: its Task, its Records, their model calls, and a step when it is full."""
        hostile = number == self.trajectories // GENERATIONS - 10
        question = self._texts.question(number % questions, hostile=hostile)
        difficulty = random.Random(question.task_id).gauss(0.3, 0.8)
        ability = ability_at(progress)
        key = task_key(SPLIT, number // questions, question.task_id)
        records = [
            self._record(key, slot, question, at, ability - difficulty, progress)
            for slot in range(GENERATIONS)
        ]
        failed = [self._failed(record) for record in records if self._rng.random() < _FAILED_SHARE]
        yield from failed
        retried = {record.traj_id for record in failed}
        records = [self._second(record) if record.traj_id in retried else record for record in records]
        records = self._finalized(records)
        task = self._task(key, question, number, questions, records, at)
        for record in records:
            conversation = self._texts.converse(record, question, complete=complete, hostile=hostile)
            stored = dataclasses.replace(record, **conversation.counts)
            yield stored if complete else dataclasses.replace(stored, traj=(), pruned_at=at)
            if complete:
                yield from conversation.calls
                self._note(stored, hostile)
                if stored.advantage is not None:
                    self._data[stored.id] = conversation.training_data(stored)
            if stored.advantage is not None:
                self._ready.append((stored, task))
        yield task
        while len(self._ready) >= STEP_TRAJECTORIES:
            yield from self._step(at, progress)

    def _record(
        self, key: str, slot: int, question: Any, at: datetime, logit: float, progress: float
    ) -> Record:
        right = self._rng.random() < 1 / (1 + math.exp(-logit))
        judge = min(1.0, max(0.0, (1.0 if right else 0.1) + self._rng.gauss(0, 0.12)))
        seconds = self._rng.lognormvariate(2.8, 0.6)
        version = max(0, self._steps - self._rng.choice((0, 0, 0, 1, 1, 2)))
        answer = question.answer if right else str(int(question.answer) + self._rng.choice((-2, -1, 1, 10)))
        details = {
            "scorer": "sum", "parts": {"math": {"score": float(right)}, "judge": {
                "score": round(judge, 2), "judge": "Qwen/Qwen3-32B",
                "reply": "The final count is correct." if right else "The count is off; see the overlap."}},
        }  # fmt: skip
        began = at - timedelta(seconds=seconds + self._rng.random() * 5)
        return Record(
            id=record_key(key, slot, 1), task=key, traj_id=slot, attempt=1, split=SPLIT,
            epoch=int(key.split("/")[1]), status=RecordStatus.SCORED, query=question.query,
            answer=question.answer, final_answer=answer, score=float(right), score_details=details,
            stop_reason=StopReason.ANSWERED if self._rng.random() > 0.02 else StopReason.TURNS_LIMIT,
            turns=self._rng.choices((1, 2, 3, 4, 6), (12, 50, 22, 12, 4))[0],
            min_version=version, max_version=version, owner=f"node{slot % 4 + 1}-{4200 + slot % 4}",
            created_at=began, completed_at=began + timedelta(seconds=seconds),
            scored_at=began + timedelta(seconds=seconds + 0.4),
        )  # fmt: skip

    def _failed(self, record: Record) -> Record:
        kind, message = self._rng.choices(_FAILURES, (5, 3, 1))[0]
        self.interesting["failed"] = record.id
        return dataclasses.replace(
            record, status=RecordStatus.FAILED, score=None, score_details={}, final_answer=None,
            stop_reason=None, completed_at=None, scored_at=None, min_version=None, max_version=None,
            failure=Failure(kind=kind, message=message, at=record.created_at),
        )  # fmt: skip

    def _second(self, record: Record) -> Record:
        return dataclasses.replace(record, id=record_key(record.task, record.traj_id, 2), attempt=2)

    def _finalized(self, records: Sequence[Record]) -> list[Record]:
        decisions = {item.record_id: item for item in decide_group(records, GroupConfig(), self._rng)}
        return [
            dataclasses.replace(
                record, advantage=decisions[record.id].advantage,
                abandoned_because=decisions[record.id].abandoned_because,
                status=RecordStatus.READY if decisions[record.id].advantage is not None
                else RecordStatus.ABANDONED,
            )
            for record in records
        ]  # fmt: skip

    def _task(
        self, key: str, question: Any, number: int, questions: int, records: Sequence[Record], at: datetime
    ) -> Task:
        scores = [record.score or 0.0 for record in records]
        trained = any(record.advantage is not None for record in records)
        group = {
            "scored": len(records), "failed": 0, "mean_score": sum(scores) / len(scores),
            "outcome": "trained" if trained else "abandoned", "rules": "leave_one_out", "filtered": [],
            "finalized_at": at, "counted_at_step": self._steps + 1,
        }  # fmt: skip
        slots = tuple(
            Slot(traj_id=record.traj_id, status=SlotStatus.SCORED, attempt=record.attempt, owner=record.owner,
                 record_id=record.id, score=record.score)
            for record in records
        )  # fmt: skip
        return Task(
            id=key, task_id=question.task_id, split=SPLIT, epoch=number // questions,
            order=number % questions, status=TaskStatus.COMPLETED, query=question.query,
            answer=question.answer, scorer="math", slots=slots, group=group,
            created_at=self._began, updated_at=at,
        )  # fmt: skip

    def _open_group(self, number: int, questions: int) -> Iterator[Root]:
        """Yield a group that samplers work on."""
        question = self._texts.question(number % questions)
        key = task_key(SPLIT, number // questions, question.task_id)
        lease, slots = now() + timedelta(hours=6), []
        for slot in range(GENERATIONS):
            record = Record(
                id=record_key(key, slot, 1), task=key, traj_id=slot, attempt=1, split=SPLIT,
                epoch=number // questions, status=RecordStatus.RUNNING, query=question.query,
                answer=question.answer, owner=f"node{slot % 4 + 1}-{4200 + slot % 4}",
            )  # fmt: skip
            slots.append(
                Slot(traj_id=slot, status=SlotStatus.RUNNING, attempt=1, owner=record.owner,
                     lease_expires_at=lease, record_id=record.id)
            )  # fmt: skip
            yield record
        yield Task(
            id=key, task_id=question.task_id, split=SPLIT, epoch=number // questions,
            order=number % questions, status=TaskStatus.RUNNING, query=question.query,
            answer=question.answer, scorer="math", slots=tuple(slots),
        )  # fmt: skip

    def _step(self, at: datetime, progress: float) -> Iterator[Root]:
        """Yield the step that trains the oldest ready trajectories, and the policy version that it makes."""
        batch, self._ready = self._ready[:STEP_TRAJECTORIES], self._ready[STEP_TRAJECTORIES:]
        self._steps += 1
        records = [record for record, _ in batch]
        yield TrainStep(
            id=f"1/{self._steps}", step=self._steps, status=StepStatus.COMMITTED,
            policy_version=self._steps - 1, data=tuple(record.id for record in records),
            metrics=step_metrics(self._rng, self._steps, progress, records), owner="node0-4100",
            planned_at=at - timedelta(seconds=30), committed_at=at,
        )  # fmt: skip
        yield self._version(self._steps, at)
        for record in records:
            if record.id in self._data:
                self._data[record.id] = dataclasses.replace(
                    self._data[record.id], status=DataStatus.TRAINED, trained_count=1,
                    trained_at_steps=(self._steps,),
                )  # fmt: skip

    def _version(self, number: int, at: datetime) -> PolicyVersion:
        return PolicyVersion(
            id=number, step=number, location=str(self.tokenizer_folder), files=(), published_at=at,
            train_step=f"1/{number}" if number else None,
        )  # fmt: skip

    def _note(self, record: Record, hostile: bool) -> None:
        if hostile:
            self.interesting["hostile"] = record.id

    def _choose(self) -> None:
        """Choose a trained trajectory of three turns, and one of its group with another score."""
        for one in self._data.values():
            others = [
                each for each in self._data.values() if each.task == one.task and each.score != one.score
            ]
            if one.status is DataStatus.TRAINED and one.turns == 3 and one.score and others:
                self.interesting.update(trained=one.id, sibling=others[0].id)
                return

    def _labels(self) -> Iterator[Label]:
        rows = [
            (self.interesting["hostile"], "cheats", HOSTILE, 0.0),
            (self.interesting["trained"], "good", "", 1.0),
        ]
        for record_id, label, note, score in rows:
            yield Label(
                id=label_key(record_id, "mei"),
                record=record_id,
                by="mei",
                label=label,
                note=note,
                score=score,
            )


async def write(store: Store, run: LargeRun, report: Callable[[str], None]) -> int:
    """Insert the documents of ``run``. Return their number; ``report`` gets a line every 20,000."""
    waiting: dict[str, list[dict[str, Any]]] = {}
    written = 0
    for document in run.documents():
        name = type(document).__name__
        name = _COLLECTIONS.get(name, name)
        batch = waiting.setdefault(name, [])
        batch.append(document.to_document())
        if len(batch) == _BATCH:
            await store.database[name].insert_many(batch, ordered=False)
            batch.clear()
        written += 1
        if written % 20_000 == 0:
            report(f"{written:,} documents")
    for name, batch in waiting.items():
        if batch:
            await store.database[name].insert_many(batch, ordered=False)
    return written
