"""DBRecordData: training data of one Record. TrainStep: one optimizer step, and the checkpoints of steps."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from agentrl.documents.document import Document, Root, now
from agentrl.documents.images import ImageSpan
from agentrl.documents.status import DataStatus, StepStatus
from agentrl.errors import ConfigError

logger = logging.getLogger(__name__)

STATE = "state.json"
_NAME = re.compile(r"(undone-)?checkpoint-(\d+)(?:-(\d+))?")


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """The content of ``state.json``."""

    run_name: str
    step: int
    policy_version: int
    """The newest published version at that time; the checkpoint's own weights are published later."""
    train_steps: tuple[str, ...]
    """``_id`` of every TrainStep in the weights, in order."""
    architecture: dict[str, Any]
    attempt: int = 1
    """Attempt of its trainer's lease: a later trainer may have resumed from an earlier step."""

    @property
    def folder_name(self) -> str:
        """From attempt 2 on it ends with the attempt: two trainers never write one folder."""
        return f"checkpoint-{self.step:06d}" + (f"-{self.attempt}" if self.attempt > 1 else "")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    state: CheckpointState

    @property
    def model(self) -> Path:
        """A Hugging Face folder, or peft's adapter folder."""
        return self.folder / "model"


def is_checkpoint(folder: Path) -> bool:
    """Return whether ``folder`` is a complete checkpoint, whatever its name."""
    return (folder / STATE).is_file()


def require_choice(choice: str | None) -> None:
    """Raise ConfigError for a ``--resume_from_checkpoint`` that is a folder without a checkpoint."""
    if choice not in (None, "none", "auto") and not is_checkpoint(Path(choice)):
        raise ConfigError(
            f"--resume_from_checkpoint {choice} is not a checkpoint: it has no {STATE}",
            hint="give 'auto', 'none' or a folder checkpoint-…",
        )


def state_files(root: Path, *, undone: bool = False) -> Iterator[Path]:
    """Yield the ``state.json`` of each ``read_checkpoints``."""
    return root.glob(f"{'*' if undone else ''}checkpoint-*/{STATE}")


def checkpoint_folders(root: Path, *, undone: bool = False, attempt: int | None = None) -> list[Path]:
    """Return the complete checkpoints that a trainer named, the newest of the last trainer last.

    ``undone`` includes those with reverted steps, which a resume has renamed. ``attempt`` leaves out those of
    later trainers.
    """
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        name = _NAME.fullmatch(path.name)
        if name is not None and (undone or not name[1]) and is_checkpoint(path):
            # Sort by attempt before step: a trainer that went back has written lower steps later.
            found.append((int(name[3] or 1), int(name[2]), path))
    return [path for number, _, path in sorted(found) if attempt is None or number <= attempt]


def read_checkpoints(root: Path, *, undone: bool = False) -> list[Checkpoint]:
    """Read the complete checkpoints, the newest of the last trainer last, also renamed: checkpoint-best.

    ``undone`` includes those with reverted steps, and those that a killed trainer was still writing. Raises
    ConfigError if one is unreadable.
    """
    found = [read_checkpoint(state.parent) for state in state_files(root, undone=undone)]
    return sorted(found, key=lambda item: (item.state.attempt, item.state.step))


def readable_checkpoints(root: Path, attempt: int | None = None) -> list[Checkpoint]:
    """Read the ``checkpoint_folders`` that can be read; log the others."""
    found = []
    for folder in checkpoint_folders(root, attempt=attempt):
        try:
            found.append(read_checkpoint(folder))
        except ConfigError as error:
            logger.warning("%s", error.message)
    return found


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint's ``state.json``. Raises ConfigError if it is unreadable."""
    try:
        content = {"attempt": 1, **json.loads((folder / STATE).read_text(encoding="utf-8"))}
        values = {item.name: content[item.name] for item in fields(CheckpointState)}
        # Make a tuple again: JSON reads lists, and no list equals a tuple.
        state = CheckpointState(**{**values, "train_steps": tuple(content["train_steps"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / STATE} cannot be read: {error}",
            hint="use another checkpoint, or repair or delete this one",
        ) from error
    return Checkpoint(folder, state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node(Document):
    """Consecutive tokens ``[start, end)``; the first one follows the last token of node ``parent``.

    ``parent`` is an index into ``nodes``, lower than the node's own; −1 marks a root.
    """

    start: int
    end: int
    parent: int = -1


# Leave it unfrozen: a frozen one takes twice as long to make, and training data have one for each model call.
# Keep its hash: that of the data, which a loss may keep in a set, is made of it.
@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class TrainableSpan(Document):
    """Trainable tokens ``[start, end)``, all of one model call, sampled under one policy version."""

    start: int
    end: int
    call: int
    version: int
    advantage: float
    temperature: float
    """The model call sampled from softmax(logits / temperature)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DBRecordData(Root):
    """The token tree of one trajectory. ``id`` is the Record's ``_id``.

    A trajectory whose prompts continue each other is one node. Each prompt that does not starts a new root:
    after a context reset, or where earlier thoughts are dropped.
    """

    id: str
    record: str
    task: str
    split: str
    status: DataStatus = DataStatus.READY
    score: float
    advantage: float
    """The advantage of the trajectory's score; a span's has its call's turn advantage added."""
    turn_advantages: tuple[float, ...] = ()
    """``Record.turn_advantages``."""
    min_version: int
    max_version: int
    tokens: int
    trainable_tokens: int
    turns: int
    untrained_calls: tuple[int, ...] = ()
    """``Record.untrained_calls``."""
    faulty_calls: tuple[int, ...] = ()
    """Trained model calls that are malformed or repeat themselves: their advantage is at most 0."""
    nodes: tuple[Node, ...]
    spans: tuple[TrainableSpan, ...]
    images: tuple[ImageSpan, ...] = ()
    """Tokens that stand for images, by their place in ``input_ids``."""
    trained_count: int = 0
    trained_at_steps: tuple[int, ...] = ()
    planned_step: int | None = None
    not_before_step: int = 0
    """The first step that may train it again."""
    problem: str | None = None
    """The reason for its quarantine."""
    created_at: datetime = field(default_factory=now)
    input_ids: bytes
    """int32[tokens], nodes in order."""
    behavior_logprobs: bytes
    """float32[trainable_tokens], spans in order."""
    sampling_mask: bytes = b""
    """The SamplingMask of the trainable tokens, spans in order; empty if no call was truncated."""
    routing: bytes = b""
    """The experts of each token (``documents.routing``); empty: no model call has a routing."""
    columns: bytes = b""
    """The TokenColumns of the trainable tokens, spans in order; empty: the run waits for no column."""

    def earned_advantage(self, call: int) -> float:
        """Return the advantage that model call ``call`` has unless it is faulty."""
        return earned_advantage(self.advantage, self.turn_advantages, call)


def earned_advantage(advantage: float, turn_advantages: Sequence[float], call: int) -> float:
    """Return a trajectory's advantage with what the own reward of model call ``call`` adds to it."""
    return advantage + (turn_advantages[call] if call < len(turn_advantages) else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCommit(Document):
    """The arguments of a commit that is applied in several chunks, so that another process can finish it."""

    max_trained_count: int
    retrained_interval: int
    counted: tuple[str, ...] = ()
    """Tasks whose groups the step's metrics count."""
    untrained: tuple[str, ...] = ()
    """Data of the step that were not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrigin(Document):
    """The step of another run whose stored data a step trains again (``agentrl whatif``)."""

    run: str
    """The run that holds the data: the parent, or the run that the parent was forked from."""
    train_step: str
    """``_id`` of the TrainStep in that run."""
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep(Root):
    """One optimizer step. ``id`` is ``attempt-of-the-run/step``; ``step`` counts committed steps from 1."""

    id: str
    step: int
    status: StepStatus = StepStatus.PLANNED
    policy_version: int
    """The policy version that the step updates."""
    data: tuple[str, ...]
    """``_id`` of every DBRecordData of the step."""
    recorded: StepOrigin | None = None
    """Where the data lie, if not in this run; they are read, and nothing of them changes."""
    scores: dict[str, float] = field(default_factory=dict)
    """The scores that a what-if with another scorer gave the Records of the step, by ``_id``."""
    metrics: dict[str, Any] = field(default_factory=dict)
    owner: str
    planned_at: datetime = field(default_factory=now)
    committed_at: datetime | None = None
    inherited: bool = False
    """Its data are an ancestor's: a copy of a step of the parent, or a step that a what-if repeats."""
    pending: PendingCommit | None = None
    """Set while the status is ``committing``."""
    pruned_at: datetime | None = None
    """When ``agentrl db prune`` last deleted data of the step."""
    checksums: dict[str, str] = field(default_factory=dict, compare=False)
    """See ``store.mechanics.blobs``."""

    @property
    def attempt(self) -> int:
        """The attempt of the run whose trainer made it; it names the trainer's flags (``flags_at``)."""
        return attempt_of(self.id)

    @property
    def own_data(self) -> tuple[str, ...]:
        """``data`` that this run holds: none for a recorded step."""
        return self.data if self.recorded is None else ()


def attempt_of(step_id: str) -> int:
    """Return the attempt of the run whose trainer made the step."""
    return int(step_id.split("/")[0])


JUDGED: Final = ("loss", "grad_norm", "value_loss", "critic_grad_norm")
"""Metrics of a step that must be finite, as far as it has them; otherwise it is undone."""

BYTES_PER_TOKEN: Final = 4
"""Packed bytes of one token: two float16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan(Document):
    """Tokens ``[start, end)`` of ``DBRecordData.input_ids``."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStatistics(Root):
    """Log-ratios and entropies of one trajectory in one step. ``id`` is ``record@train_step``.

    They are those of the first pass over the step's data, before the update that trains the token. The
    document is for display: nothing reads it in training, and it may be missing.
    """

    id: str
    record: str
    train_step: str
    """``_id`` of the TrainStep."""
    step: int
    spans: tuple[TokenSpan, ...]
    """The tokens that the step trained, in the order of the packed values."""
    log_ratios: bytes
    """float16, log πθ − log μ of each token, in nats."""
    entropies: bytes
    """float16, entropy of the policy's distribution at each token, in nats."""

    def problem(self, tokens: int) -> str | None:
        """Return why the values do not fit training data of ``tokens`` tokens; None if they do."""
        end = max((span.end for span in self.spans), default=0)
        if end > tokens or any(not 0 <= span.start < span.end for span in self.spans):
            return f"a span is outside {tokens} tokens"
        count = sum(span.end - span.start for span in self.spans)
        # Count bytes, not values: numpy raises for an odd number of bytes, and damage is to be told.
        packed = {len(self.log_ratios), len(self.entropies)}
        return None if packed == {2 * count} else f"{count} tokens have {sorted(packed)} packed bytes"


def statistics_key(record: str, train_step: str) -> str:
    """Return the ``_id`` of a trajectory's statistics in a step."""
    return f"{record}@{train_step}"
