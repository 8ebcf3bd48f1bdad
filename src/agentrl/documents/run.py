"""Documents beside trajectories: settings, family, epochs, leases, weights, engines, evaluations.

Each kind has a collection of its own, because different database users may write it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, Literal

from agentrl.base.processes import ProcessIdentity
from agentrl.documents.document import Document, Root, now
from agentrl.documents.mixture import MixtureSource
from agentrl.documents.status import (
    EpochStatus,
    EvaluationStatus,
    ServiceStatus,
    TrainerEnd,
    VersionStatus,
    Work,
)

PARENT: Final = "parent"
"""``_id`` of the document in a child's ``Run`` that names its parent."""
CHILD_PREFIX: Final = "child/"
"""Begins the ``_id`` of each document in a parent's ``Run`` that names a child."""

Kinship = Literal["fork", "whatif"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relative(Root):
    """Where a child begins, and what it reads of its parent. The child and the parent hold the same values.

    In the child's ``Run`` it is the document ``parent``, and ``run`` names the parent. In the parent's it is
    ``child/NAME``, and ``run`` names the child; the parent keeps the checkpoint and the data that it names.
    """

    id: str
    run: str
    """The other run, a database of the same server."""
    kind: Kinship
    step: int
    """The child's weights begin as the parent's after this many optimizer steps."""
    checkpoint: str
    """Absolute path of the parent's checkpoint of that step; empty for step 0, which is the base model."""
    steps: tuple[int, ...] = ()
    """``whatif``: the first and the last step of the parent whose data the child trains; else empty."""
    since: int = 0
    """``whatif``: the step from which ``changed`` holds; earlier ones are trained with the parent's flags."""
    without: tuple[str, ...] = ()
    """``whatif``: ``_id`` of Records of the parent that the child leaves out."""
    changed: dict[str, Any] = field(default_factory=dict)
    """Flag → [the parent's value, the child's value]."""
    at: datetime = field(default_factory=now)

    @property
    def shown(self) -> str:
        """``NAME, fork at step 40``."""
        of_steps = f" of steps {self.steps[0]} to {self.steps[-1]}" if self.steps else ""
        return f"{self.run}, {self.kind}{of_steps or f' at step {self.step}'}"


def child_key(name: str) -> str:
    """Return the ``_id`` in the parent's ``Run`` of the document that names the child ``name``."""
    return f"{CHILD_PREFIX}{name}"


class Withdrawn(StrEnum):
    """What a tombstone stands for."""

    RECORD = "record"  # one attempt at a trajectory
    TASK = "task"  # a task as a whole, with query and answer; its Records have tombstones of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone(Root):
    """One withdrawn Record or Task; ``id`` is its ``_id``, which appears nowhere else in the run any more."""

    id: str
    kind: Withdrawn
    task: str
    """``_id`` of the Task."""
    retraction: int
    """``_id`` of the Retraction."""
    created_at: datetime
    """When the Record or Task was created: it tells it from one of another run with the same ``_id``."""
    steps: tuple[str, ...] = ()
    """``_id`` of each TrainStep that trained it, undone ones included."""
    deleted_at: datetime | None = None
    """When its documents were deleted; None: not yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraction(Root):
    """One call of ``agentrl retract``, and how far it is. ``id`` counts from 1."""

    id: int
    because: str
    by: str
    """The user and the host."""
    records: int
    tasks: int
    first_step: int | None = None
    """The first step in the weights that trained some of it; None: no such step."""
    rebuilds: bool = False
    """Whether the run is to go back to the last checkpoint before ``first_step``."""
    rebuilt: Rebuilt | None = None
    family: bool = False
    """Whether it is still to be withdrawn from the run's children."""
    archives: tuple[str, ...] = ()
    """Host and path of each export that it is still to be taken out of. For people: no export is opened that
    the command line does not name."""
    images: tuple[str, ...] = ()
    """Images that the withdrawn documents named and that are not looked at yet."""
    at: datetime = field(default_factory=now)
    deleted_at: datetime | None = None
    """When the run held nothing of it any more except images; None: a trainer would still read some of it."""
    finished_at: datetime | None = None
    """When nothing was left to delete; None: the next call goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt(Document):
    """How the run went back."""

    step: int
    """The step of the checkpoint that training goes on from; 0: the base model."""
    checkpoints: tuple[str, ...] = ()
    """The deleted checkpoints."""
    versions: tuple[int, ...] = ()
    """The versions whose folders were deleted: the first and the last; empty without any."""
    at: datetime = field(default_factory=now)


SCHEMA: Final = "schema"
"""``_id`` of the document in ``Run`` with the version of the database schema. Administrators change it."""

REMARKS: Final = "remarks"
"""``_id`` of the document in ``Run`` with the tags and the note that people give the run."""

ADMISSION: Final = "admission"
"""``_id`` of the ``Gate`` in ``Admission`` that admissions write."""

TURN: Final = "turn"
"""``_id`` of the ``Gate`` in ``Admission`` that says who admits groups now."""

TRAINER: Final = "trainer"
"""``_id`` of the ``TrainerLease``, alone in its collection."""

SETTINGS: Final = (
    "tasks", "model", "files", "chat", "sampling", "temperature", "groups", "rollouts", "loss", "adapter",
    "critic",
)  # fmt: skip
"""Concerns that the processes of a run must agree on; each is the ``_id`` of a document of ``Settings``."""

IDENTITY: Final = "identity"
"""``_id`` in ``Settings`` of the run's random id, which tells it from another run of its name."""

TRAIN_ROLE: Final = "train"
FLAGS: Final = ("sample", TRAIN_ROLE, "serve", "gateway")
"""Roles whose resolved configuration is stored: the first process's, and those of later trainers."""


WeightEncoding = Literal["full", "delta", "adapter"]
LiveKind = Literal["tensor", "distributed"]
FLAGS_PREFIX: Final = "flags/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker(Document):
    """The process that makes a run of a database, by an import or a fork."""

    id: str
    """A random number of this one call."""
    host: str
    process: ProcessIdentity | None
    lease_expires_at: datetime

    @property
    def pid(self) -> str:
        """Name the process for people."""
        return "a process" if self.process is None else f"process {self.process.pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFact(Root):
    """A document of ``Run``, which administrators write."""

    id: str
    version: int | None = None
    made_at: datetime | None = None
    """Tells the run from an earlier one of its name."""
    importing: bool | None = None
    """True during an import or a fork, and while a renamed run is copied."""
    maker: Maker | None = None
    """Who makes it, while ``importing``."""
    deleting: bool | None = None
    """Whether somebody deletes the run: its processes end before its database does."""
    renaming: tuple[str, ...] = ()
    """The old and the new name, in both databases, until a renaming has ended."""
    tags: tuple[str, ...] = ()
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportList(Root):
    """The code, servers and files that tasks may name: see ``permissions``; alone in its collection."""

    id: str = "imports"
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings(Root):
    """Settings of a concern, or flags of a role: inserted once, by the first process, and never changed.

    A trainer that starts with other flags than the trainer before it inserts a document of its own.
    """

    id: str
    values: dict[str, Any]
    """Name → value, without secrets. Flags are resolved: defaults that depend on others are filled in."""
    by: str
    """The command and the host that wrote them."""
    at: datetime
    given: tuple[str, ...] = ()
    """The names of the given flags, on the command line or in a file; only for flags."""
    packages: dict[str, str] | None = None
    """Flags alone: package → version."""
    threads: int | None = None
    """Flags of a trainer alone: the threads of its products, on which rounding depends."""

    @property
    def given_values(self) -> list[tuple[str, Any]]:
        """The given flags with their values; ``***`` for secret ones, which are not stored."""
        return [(name, self.values.get(name, "***")) for name in self.given]

    @property
    def role(self) -> str | None:
        """The role whose flags these are; None for the settings of a concern."""
        is_flags = self.id.startswith(FLAGS_PREFIX)
        return self.id.removeprefix(FLAGS_PREFIX).partition("@")[0] if is_flags else None

    @property
    def attempt(self) -> int:
        """The trainer (``TrainerLease.attempt``) that began with these flags; 0: the first process."""
        return int(self.id.partition("@")[2] or 0)


def flags_key(role: str, attempt: int = 0) -> str:
    """Return the ``_id`` in ``Settings`` of a role's first flags, or of those that a trainer began with."""
    return f"{FLAGS_PREFIX}{role}" + (f"@{attempt}" if attempt else "")


def flags_at(starts: Iterable[RunSettings], attempt: int) -> RunSettings | None:
    """Return the flags of the trainer that was ``attempt``, by the flags of all ``starts``, in their order.

    A step names its trainer (``TrainStep.attempt``), so a resume from an earlier step needs no correction.
    """
    return next((item for item in reversed([*starts]) if item.attempt <= attempt), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate(Root):
    """Counts the groups that were opened. Every admission writes it, so that concurrent ones conflict."""

    id: str = ADMISSION
    opened: int = 0
    begun: int = 0
    """Groups begun under another ``--task_selection`` than ``order``, or of a mixture: the last
    ``Task.begun.number``."""
    sources: tuple[MixtureSource, ...] = ()
    """The sources of the training tasks, if they are a mixture."""
    turn_until: datetime | None = None
    """Of ``TURN``: how long the sampler that admits groups now has its turn; None: nobody admits any."""


def epoch_key(split: str, epoch: int, source: str | None = None) -> str:
    """Return the ``_id`` of an ``EpochOpening``; of a mixture, each source has epochs of its own."""
    return f"{split}/{epoch}" if source is None else f"{split}/{epoch}/{source}"


_EPOCH_KEY = re.compile(r"(.+)/([0-9]+)(?:/([A-Za-z][^/]*))?", re.DOTALL)


def parse_epoch_key(key: str) -> tuple[str, int, str | None]:
    """Return the split, the epoch and the source of an ``EpochOpening``. Raises ValueError."""
    found = _EPOCH_KEY.fullmatch(key)
    if found is None:
        raise ValueError(f"{key!r} is not SPLIT/EPOCH or SPLIT/EPOCH/SOURCE")
    return found[1], int(found[2]), found[3]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOpening(Root):
    """One epoch of one split: whether all of its tasks are inserted, and the process that inserts them.

    Epoch 0 holds the loaded tasks; each later epoch copies it. A process that takes over uses the stored
    ``seed``, ``shuffle`` and ``num_generations``. ``attempt`` fences earlier owners.

    Each source of a mixture has epochs of its own: ``train/1/NAME`` beside ``train/0``, which is all that
    was loaded, and ``train/0/NAME``, which counts those of the source.
    """

    id: str
    status: EpochStatus = EpochStatus.OPENING
    tasks: int = 0
    """Number of its tasks; while it is opening, the expected number."""
    set_aside: dict[str, int] = field(default_factory=dict)
    """Pool → tasks of the source that this epoch leaves out, because of their last pass rates."""
    attempt: int = 0
    owner: str | None = None
    lease_expires_at: datetime | None = None
    seed: int | None = None
    shuffle: bool | None = None
    num_generations: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint(Document):
    """The newest complete checkpoint that a trainer has written."""

    place: str
    """Host and absolute path, for people: the path may be another one on another host."""
    step: str
    """``_id`` of the last TrainStep in it. If that is reverted, the checkpoint does not count any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing(Document):
    """What a trainer or a sampler does, as its last heartbeat says."""

    work: Work
    what: str = ""
    """Follows the word: ``step 7``, or ``for the data of step 7``."""

    @property
    def shown(self) -> str:
        """``training step 7``."""
        return f"{self.work} {self.what}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLease(Root):
    """The lease of the one trainer that may plan, commit and revert steps; ``attempt`` fences it."""

    id: str = TRAINER
    attempt: int = 0
    owner: str | None = None
    host: str | None = None
    pid: int | None = None
    process: ProcessIdentity | None = None
    lease_expires_at: datetime | None = None
    writes: int = 0
    """Incremented by each write that the attempt fences, so that it conflicts with a takeover."""
    discarded: tuple[str, ...] = ()
    """Checkpoints that are being deleted; training does not resume from them."""
    ended: TrainerEnd | None = None
    """How the last trainer ended; None while one runs, and if it failed or was killed."""
    output: str | None = None
    """Host and absolute path of the last trainer's output folder."""
    saved: SavedCheckpoint | None = None
    doing: Doing | None = None
    """What its holder does."""

    def is_held(self, at: datetime) -> bool:
        """Return whether a trainer holds the lease at the server's time ``at``."""
        return self.owner is not None and self.lease_expires_at is not None and self.lease_expires_at > at


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChecksum(Document):
    """The name, size and checksum of one file in a published folder."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveShare(Document):
    """The tensors of a version that one rank of the trainer holds in memory."""

    name: str
    """No other share has it."""
    host: str
    process: ProcessIdentity
    file: str | None = None
    """``tensor``: the memory file, for processes of the same user, host and container."""
    port: int | None = None
    """``distributed``: where the rank takes requests for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWeights(Document):
    """How engines take a version from the trainer's memory, while the trainer holds it."""

    kind: LiveKind
    shares: tuple[LiveShare, ...]
    """One of each rank that holds tensors; together they are the version."""
    nccl: bool = False
    """``distributed``: the trainer has GPUs, and sends over NCCL to engines that have one too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion(Root):
    """One published set of weights. Version 0 is the model that the run starts from."""

    id: int
    step: int
    status: VersionStatus = VersionStatus.PUBLISHED
    location: str
    """Absolute path of a Hugging Face folder that every engine can read; empty if it is not stored."""
    files: tuple[FileChecksum, ...]
    """The files in ``location``; none if it is not stored."""
    live: LiveWeights | None = None
    """How engines take it from the trainer's memory; None if they cannot."""
    encoding: WeightEncoding = "full"
    """What they hold: whole weights, the elements that differ from ``base``, or an adapter of ``base``."""
    base: int | None = None
    """The version that a delta changes, or to which an adapter belongs; None for whole weights."""
    digest: str | None = None
    """SHA-256 over the checksums of all tensors: the same for the same weights, however they are encoded."""
    train_step: str | None
    published_at: datetime = field(default_factory=now)
    attempt: int | None = None
    """The attempt of the trainer that reserved the number; None without a reservation."""
    pruned_at: datetime | None = None
    """When the folder was marked for deletion."""

    @property
    def is_stored(self) -> bool:
        """Whether it has files, which outlive the trainer."""
        return bool(self.location)

    @property
    def is_full(self) -> bool:
        """Whether its files are whole weights."""
        return self.is_stored and self.encoding == "full"

    @property
    def bytes(self) -> int:
        """The bytes of its files."""
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVersion(Document):
    """A policy version that an engine has loaded."""

    version: int
    at: datetime
    """When it began to serve the version, by the server's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures(Document):
    """What an engine says about its work, from its metrics; a sampler finds its own concurrency by it."""

    at: float
    """When they were read: seconds of the clock of the process that sends the heartbeats."""
    running: int
    waiting: int
    """Requests in the queue."""
    kv_usage: float
    """Share of the KV cache that running requests hold, in [0, 1]; the fullest rank's."""
    capacity: int
    """Tokens that its KV cache holds; 0: unknown."""
    generated: int
    """Tokens that it has generated since it started."""
    computed: int
    """Tokens of prompts that it has computed since it started: those that its prefix cache did not have."""
    preempted: int
    """Requests whose KV cache it took away since it started: SGLang's retractions, vLLM's preemptions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceService(Root):
    """One live engine. It is alive while ``heartbeat`` is younger than the heartbeat timeout."""

    id: str
    url: str
    engine: str
    model: str
    status: ServiceStatus = ServiceStatus.STARTING
    policy_version: int | None = None
    adapter: str | None = None
    """The adapter that requests must name, ``RUN@VERSION``; None: the engine serves whole weights."""
    running_requests: int = 0
    running_tokens: int = 0
    """Tokens of the running and queued requests; 0 for an engine that does not report them."""
    figures: EngineFigures | None = None
    """None for an engine whose metrics are off, and until they were read."""
    context_length: int | None = None
    """Largest number of tokens of a prompt and its continuation; None until the engine is ready."""
    tokenizer: str | None = None
    """Fingerprint of the tokenizer in the folder that the engine serves."""
    detail: str | None = None
    needs_full: bool = False
    """Whether it waits for whole weights: a delta that it needs is damaged or missing."""
    gpus: int = 1
    """The GPUs that it computes on; without any, 1."""
    host: str
    pid: int
    # Ask for more than the URL: after a restart another engine may listen at the same host and port.
    instance: str | None = None
    """A random name that the engine's server returns; it identifies the server behind ``url``."""
    process: ProcessIdentity | None = None
    """The process that sends the heartbeats."""
    served: tuple[ServedVersion, ...] = ()
    """The last 20 versions that it has loaded since it started, oldest first."""
    started_at: datetime = field(default_factory=now)
    heartbeat: datetime = field(default_factory=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerProcess(Root):
    """One sampler. It renews ``heartbeat`` until it ends; one that is silent is dead.

    Its claims are the slots whose owner is ``id``. Times are the server's. An entry with ``gpus``
    is not a sampler: it counts the GPU time of a teacher or of an evaluation's own engine for the costs.
    """

    id: str
    host: str
    pid: int
    started_at: datetime
    heartbeat: datetime
    asked_at: datetime | None = None
    """When it was asked to drain: to let its running calls end, release what it holds, and end."""
    asked_by: str | None = None
    """The user and the host of who asked."""
    draining_at: datetime | None = None
    """When it began to drain, because of that or of a signal."""
    ended_at: datetime | None = None
    """When it ended; a dead one is given the time at which another sampler found it so."""
    doing: Doing | None = None
    gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage(Root):
    """One outage. It goes on while ``ended_at`` is None and its process refreshes ``seen_at``."""

    id: str
    dependency: str
    """What is down, as text: ``tool server search``."""
    by: str
    """The process that sees it."""
    why: str
    """The last error."""
    held: int = 0
    """Calls that wait for it."""
    began_at: datetime = field(default_factory=now)
    seen_at: datetime = field(default_factory=now)
    ended_at: datetime | None = None


OUTSIDE_VERSION: Final = -2
"""The version in the tokens of weights that are not a policy version of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Root):
    """One evaluation. ``id`` is the split of its Tasks and Records.

    The id contains a hash of the tasks and of the settings: an edited task file is another evaluation.
    """

    id: str
    status: EvaluationStatus = EvaluationStatus.WAITING
    version: int | None
    """The policy version; None for a model folder."""
    step: int | None = None
    """The optimizer step of the version."""
    model: str | None
    """Folder of the weights; None if it is not on the machine of the evaluation."""
    model_digest: str | None = None
    """Hash of the files of a model folder."""
    file: str
    """The task file as it was named."""
    tasks_digest: str
    """Hash of the content of all tasks."""
    settings_digest: str
    """Hash of ``settings``."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Flags that change what is sampled."""
    samples: int
    """Trajectories per task."""
    label: str = ""
    right_threshold: float
    """A trajectory passes when its score is above this."""
    # Hold JSON and no Summary: scoring is a layer above the documents, which may not import it.
    results: dict[str, Any] | None = None
    """Set when it is finished: ``scoring.evaluation.Summary`` as JSON, and one for each group of tasks."""
    by: str | None = None
    """The process that evaluates."""
    began_at: datetime = field(default_factory=now)
    seen_at: datetime = field(default_factory=now)
    """When its process last wrote; the weights of an evaluation that was seen lately are not deleted."""
    finished_at: datetime | None = None

    @property
    def total(self) -> dict[str, Any]:
        """The results of all tasks together; empty before it is finished."""
        return (self.results or {}).get("total") or {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldScore(Document):
    """What a scorer gave one row of the gold slice; ``problem``: it gave nothing."""

    scorer: str
    expected: float
    score: float | None = None
    model: str | None = None
    """The judge's; None: the scorer asked none, for this answer."""
    tokens: int = 0
    seconds: float = 0.0
    cost: float = 0.0
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeCheck(Root):
    """One judging of the gold slice (``--judge_gold``). ``id`` is ``digest/step``."""

    id: str
    digest: str
    """Of the file: another one is compared with itself alone."""
    step: int
    owner: str
    lease_expires_at: datetime
    """Another process judges it then, if it is not finished."""
    began_at: datetime = field(default_factory=now)
    scores: tuple[GoldScore, ...] = ()
    """In the order of the file."""
    finished_at: datetime | None = None
