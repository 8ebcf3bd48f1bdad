"""Task: a question to sample, with one slot per generation. Claim: the right to sample one slot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b
from operator import attrgetter
from typing import Any, Final

import orjson

from agentrl.documents.document import Document, Root, is_finite, now
from agentrl.documents.images import ImageRef
from agentrl.documents.status import SlotStatus, TaskStatus

FEEDBACK: Final = "feedback"
"""The scorer of trajectories whose score comes from people; also the kind of failure if none comes."""
CONVERSATIONS: Final = -1
"""The epoch of Tasks that a gateway opens for conversations that no task asked for. Samplers and epochs leave
them alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot(Document):
    """One generation of a Task. ``attempt`` counts claims and fences the writes of earlier owners.

    ``released`` counts the attempts that ended without a fault of their own: released, or with an owner that
    died. They do not count towards ``max_attempts``.
    """

    traj_id: int
    status: SlotStatus = SlotStatus.OPEN
    attempt: int = 0
    released: int = 0
    begun: int | None = None
    """The attempt whose Record is sampled: the next claim goes on with it. None: it begins a new one."""
    deaths: int = 0
    """How many owners in a row died while the trajectory's journal had ``died_at`` entries."""
    died_at: int | None = None
    restarts: int = 0
    """How often in a row it began anew, because the state of its tools could not be made again."""
    scorings: int = 0
    """Failed attempts to score the Record of this attempt."""
    owner: str | None = None
    lease_expires_at: datetime | None = None
    not_before: datetime | None = None
    record_id: str | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission(Document):
    """The admission of a group; cleared when its first slot is claimed.

    A sampler may claim the first slot only if its own limit, computed after ``after_step`` or a later step,
    is at least ``rank``.
    """

    rank: int
    """Position among the open groups at the time of admission, from 1."""
    after_step: int
    """The last committed step at the time of admission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin(Document):
    """When and why a group was begun, with another ``--task_selection`` than ``order`` or of a mixture."""

    number: int
    """Serial number over all groups of the run, from 1; groups are trained in this order."""
    by: str
    """``order``, or ``pass_rate`` if the task was selected before the next task in order."""
    ability: float
    """Ability of the policy, in logits, estimated from recent groups (``scoring.difficulty``)."""
    ease: float
    """Ease of the task, in logits, estimated from its group in the previous epoch; 0 for a new task."""
    credits: tuple[float, ...] = ()
    """Of a mixture: ``MixtureSource.credit`` of every source after this group, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Root):
    """A question to sample. ``id`` is ``split/epoch/task_id``, which makes loading idempotent.

    ``order`` is the task's position in the shuffled order of its epoch; slots are claimed by (epoch, order).
    ``tools`` lists the MCP servers to offer; None offers all, an empty list offers none.
    """

    id: str
    task_id: str
    split: str
    epoch: int
    order: int
    source: str | None = None
    """The source of a mixture that it comes from; its ``task_id`` is then ``SOURCE/ID``."""
    status: TaskStatus = TaskStatus.CREATED
    query: str
    answer: Any = None
    aug_answers: tuple[Any, ...] = ()
    scorer: str = "agentcpm"
    answer_schema: str = "answer"
    agent_name: str | None = None
    agent_cfg_path: str | None = None
    """The agent's YAML file, below the folder in which samplers are started; None: ``--agent_cfg_path``."""
    environment: str | None = None
    """The environment that gives tools, state and score (``@environment``); None without one."""
    system_prompt: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    """Chat messages between the system prompt and the question, such as worked examples; never trained."""
    query_prompt: str | None = None
    images: tuple[ImageRef, ...] = ()
    """The images of the question; ``<image>`` in it is the place of one."""
    tools: tuple[str, ...] | None = None
    max_turns: int | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    slots: tuple[Slot, ...] = ()
    retracted: int = 0
    """How many more slots it had until ``agentrl retract`` withdrew them."""
    admission: Admission | None = None
    begun: Begin | None = None
    ease: float | None = None
    """Set when the group is finalized with ``--task_selection pass_rate``; cleared when the task's copy in
    the next epoch is begun. A task with an ease may be selected again."""
    group: dict[str, Any] | None = None
    """Set when the group is finalized: ``{scored, failed, mean_score, outcome, rules, filtered,
    finalized_at, counted_at_step}``; the last is the step whose metrics count it. ``filtered`` is
    ``[{record, because}]`` of the Records that ``--group_filter`` dropped.

    A group of an evaluation split has ``right_threshold`` instead of ``rules``. A group that was given up
    has the outcome ``failed``, and the reason in ``problem``. ``kept_as_trained`` is true after trajectories
    of a trained group were withdrawn: the others keep the advantages that steps trained."""
    finalizing: dict[str, Any] | None = None
    """``{attempts, problem, retry_at}`` of a group whose finalization has failed so far."""
    created_at: datetime = field(default_factory=now)
    updated_at: datetime = field(default_factory=now)
    inherited: bool = False
    """A child's copy of a Task that its parent trained before the child began; the parent has its Records."""
    pruned_at: datetime | None = None
    """When ``agentrl db prune`` last deleted calls or data of its trajectories."""
    checksums: dict[str, str] = field(default_factory=dict, compare=False)
    """See ``store.mechanics.blobs``."""


CONTENT: Final = (
    "query", "answer", "aug_answers", "scorer", "answer_schema", "agent_name", "agent_cfg_path",
    "environment", "system_prompt", "messages", "query_prompt", "images", "tools", "max_turns", "meta",
)  # fmt: skip
"""The fields that come from the task file; a run sets the other fields."""
FINGERPRINT_BYTES: Final = 16
_content = attrgetter(*CONTENT)


def fingerprint(task: Task) -> bytes:
    """Return a digest of the text of a Task and of its number of slots."""
    return _digest([*_content(task), len(task.slots)])


def stored_fingerprint(document: Mapping[str, Any], slots: int) -> bytes:
    """Return the fingerprint of a stored Task. Equal texts may differ in it: it tells 1 from 1.0."""
    return _digest([*map(document.get, CONTENT), slots])


def _digest(values: list[Any]) -> bytes:
    text = orjson.dumps(values, default=repr, option=orjson.OPT_PASSTHROUGH_DATETIME)
    return blake2b(text, digest_size=FINGERPRINT_BYTES).digest()


def task_key(split: str, epoch: int, task_id: str) -> str:
    """Return the ``_id`` of a Task."""
    return f"{split}/{epoch}/{task_id}"


def record_key(task_key: str, traj_id: int, attempt: int) -> str:
    """Return the ``_id`` of the Record of one attempt at one slot."""
    return f"{task_key}/{traj_id}/{attempt}"


def record_task(record_key: str) -> str:
    """Return the ``_id`` of the Task of a Record, or of its training data, by its ``_id``."""
    # Split from the right: a task's own id may have slashes, the two numbers behind it have none.
    return record_key.rsplit("/", 2)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A process's right to write to one slot until another process takes it over after the lease."""

    task: Task
    traj_id: int
    attempt: int
    begun: int | None = None
    """The attempt that began the Record; None: this one."""
    owner: str
    trace_id: str | None = None
    """The trace of this attempt; None if it is not traced."""

    @property
    def first_attempt(self) -> int:
        """Return the attempt that began the Record: its seeds are those of the whole trajectory."""
        return self.attempt if self.begun is None else self.begun

    @property
    def record_id(self) -> str:
        """Return the ``_id`` of the Record that this claim writes."""
        return record_key(self.task.id, self.traj_id, self.first_attempt)


_TERM = re.compile(r"(-?[0-9.]+(?:e[+-]?[0-9]+)?)\*(\S+)")
_PLUS = " + "


def sum_name(weights: Mapping[str, float]) -> str:
    """Return the name of a weighted sum; a single scorer with the weight 1 keeps its name.

    Raises ValueError for no scorer at all, an empty name and a weight that is not a finite number.
    """
    if not weights:
        raise ValueError("it names no scorer")
    for name, weight in weights.items():
        # Refuse white space: " + " separates the terms of a stored sum.
        if not name or name != "".join(name.split()):
            raise ValueError(f"{name!r} is not the name of a scorer")
        # Ask for bool apart: True is a number to Python, and in a task file a slip.
        if isinstance(weight, bool) or not is_finite(weight):
            raise ValueError(f"the weight of {name} is {weight!r}, which is not a number")
    if list(weights.values()) == [1]:
        return next(iter(weights))
    # Write weights by repr, the shortest text that is read back as the same float.
    return _PLUS.join(f"{weight!r}*{name}" for name, weight in weights.items())


def scorer_weights(name: str) -> dict[str, float]:
    """Return {scorer: weight} of a task's ``scorer``; of a plain name, {name: 1.0}."""
    terms = [_TERM.fullmatch(term) for term in name.split(_PLUS)] if "*" in name else [None]
    if not all(terms):
        return {name: 1.0}
    return {term.group(2): float(term.group(1)) for term in terms if term}
