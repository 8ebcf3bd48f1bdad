"""Record: one trajectory with its owners, its columns, its base URL, and what people say of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from agentrl.documents.document import Document, Root, is_finite, is_score, now
from agentrl.documents.model_call import Event, PartialGeneration, SamplingMask
from agentrl.documents.status import ColumnStatus, RecordStatus, StopReason, shown_status
from agentrl.errors import ConfigError, StoreError

Floats = NDArray[np.float32]

_LEAST = -100.0
"""Logprob below which an id has no probability in float32. Engines write -inf, -1e5 or -9999 for one."""
_ABOVE_ZERO = 1e-3
"""Rounding that a logprob may have."""
_LARGEST_ID = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Root):
    """The values of one name for all generated tokens of one Record. ``id`` is ``record/name``.

    A group is finalized when every column that its rules name is filled or given up. ``attempt`` counts the
    claims: writes of an earlier claim are refused.
    """

    id: str
    record: str
    task: str
    split: str
    name: str
    filler: str = ""
    """The filler that may claim it, such as the name of a teacher; empty: any."""
    status: ColumnStatus = ColumnStatus.OPEN
    owner: str | None = None
    lease_expires_at: datetime | None = None
    attempt: int = 0
    failures: int = 0
    """Claims that ended with a failure that counts."""
    not_before: datetime | None = None
    problem: str | None = None
    """Why the last attempt failed."""
    by: str | None = None
    """What filled it, such as the model of the teacher."""
    created_at: datetime = field(default_factory=now)
    filled_at: datetime | None = None
    values: bytes = b""
    """float32[generated tokens of the Record], model calls by index; NaN: the filler has no value."""
    top: bytes = b""
    """The TopLogprobs of the same tokens; empty: none."""


def column_key(record: str, name: str) -> str:
    """Return the ``_id`` of a Record's column."""
    return f"{record}/{name}"


def checked_logprobs(values: Sequence[float | None]) -> Floats:
    """Return logprobs as float32, at least -100. Raises ValueError for NaN, None, and one above 0."""
    found = np.array(values, np.float64)
    wrong = found[~(found <= _ABOVE_ZERO)]
    if wrong.size:
        raise ValueError(f"a logprob of {wrong[0]}")
    return found.clip(_LEAST, 0.0).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class TopLogprobs:
    """The most likely ids of n tokens' distributions and their logprobs; a token may have none."""

    ids: SamplingMask
    """The ids of each token, ascending."""
    logprobs: NDArray[np.float16]
    """float16[K], in nats, one for each of ``ids.ids``."""

    @classmethod
    def of(cls, rows: Sequence[Mapping[int, float]]) -> Self:
        """Build it from {id: logprob} of each token, without the ids that have no probability.

        Raises ValueError for NaN, a logprob above 0, and an id that is negative or has more than 31 bits.
        """
        checked_logprobs([logprob for row in rows for logprob in row.values()])
        for id in (id for row in rows for id in row if not 0 <= id <= _LARGEST_ID):
            raise ValueError(f"a token id of {id}")
        kept = [{id: value for id, value in row.items() if value >= _LEAST} for row in rows]
        ordered = [row[id] for row in kept for id in sorted(row)]
        return cls(SamplingMask.of([list(row) for row in kept]), np.array(ordered, np.float16))

    @classmethod
    def join(cls, parts: Sequence[TopLogprobs]) -> Self:
        """Concatenate at least one."""
        return cls(
            SamplingMask.join([part.ids for part in parts]), np.concatenate([p.logprobs for p in parts])
        )

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)

    def select(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> TopLogprobs:
        """Return those of the chosen tokens."""
        return TopLogprobs(self.ids.select(chosen), self.logprobs[self.ids.places(chosen)])

    def pack(self) -> bytes:
        """Return the number of ids as uint32, their logprobs as float16, and ``ids.pack()``; b"" for none."""
        if not len(self.logprobs):
            return b""
        count = len(self.logprobs).to_bytes(4, "little")
        return count + self.logprobs.astype("<f2").tobytes() + self.ids.pack()

    @classmethod
    def unpack(cls, data: bytes, tokens: int) -> Self:
        """Return the inverse of ``pack`` for ``tokens`` tokens. Raises StoreError for other bytes."""
        count = int.from_bytes(data[:4], "little")
        ids = SamplingMask.unpack(data[4 + 2 * count :], tokens)
        if len(ids.ids) != count:
            raise StoreError(f"top logprobs of {len(data)} bytes have {len(ids.ids)} ids, not {count}")
        return cls(ids, np.frombuffer(data, "<f2", count, 4).astype(np.float16))


@dataclass(frozen=True, slots=True, eq=False)
class TokenColumns:
    """Columns of the same n tokens, by name."""

    values: Mapping[str, Floats]
    """float32[n] each; NaN: the token has no value."""
    top: Mapping[str, TopLogprobs] = field(default_factory=dict)
    """Of the columns that have any."""

    @classmethod
    def of_record(cls, columns: Iterable[Column], tokens: int) -> Self:
        """Return filled columns of the ``tokens`` generated tokens of a Record. Raises StoreError."""
        values: dict[str, Floats] = {}
        top: dict[str, TopLogprobs] = {}
        for column in columns:
            if len(column.values) != 4 * tokens:
                raise StoreError(
                    f"column {column.id} has {len(column.values) // 4} values, and its Record has {tokens}"
                    " generated tokens",
                    hint="the filler read other model calls: agentrl db reopen --failure_kind column",
                )
            values[column.name] = np.frombuffer(column.values, "<f4")
            if column.top:
                top[column.name] = TopLogprobs.unpack(column.top, tokens)
        return cls(values, top)

    @classmethod
    def join(cls, parts: Sequence[tuple[TokenColumns | None, int]]) -> TokenColumns | None:
        """Concatenate (columns, tokens) pairs; None if no part has any. Missing values are NaN."""
        present = [part for part, _ in parts if part is not None]
        if not present:
            return None
        values = {
            name: np.concatenate([_values(part, name, tokens) for part, tokens in parts])
            for name in sorted({name for part in present for name in part.values})
        }
        top = {
            name: TopLogprobs.join([_top(part, name, tokens) for part, tokens in parts])
            for name in sorted({name for part in present for name in part.top})
        }
        return TokenColumns(values, top)

    def select(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> TokenColumns:
        """Return those of the chosen tokens."""
        return TokenColumns(
            {name: values[chosen] for name, values in self.values.items()},
            {name: top.select(chosen) for name, top in self.top.items()},
        )

    def pack(self) -> bytes:
        """Return a header line, {name: bytes of top}, then the values and the top of each; b"" for none.

        Equal columns have equal bytes.
        """
        if not self.values:
            return b""
        header: dict[str, int] = {}
        pieces: list[bytes] = []
        for name in sorted(self.values):
            top = self.top.get(name)
            packed = b"" if top is None else top.pack()
            header[name] = len(packed)
            pieces += [self.values[name].astype("<f4").tobytes(), packed]
        return json.dumps(header).encode() + b"\n" + b"".join(pieces)

    @classmethod
    def unpack(cls, data: bytes, tokens: int) -> Self | None:
        """Return the columns of ``tokens`` tokens, None without any. Raises StoreError for other bytes."""
        if not data:
            return None
        values: dict[str, Floats] = {}
        top: dict[str, TopLogprobs] = {}
        line, _, rest = data.partition(b"\n")
        try:
            for name, size in json.loads(line).items():
                values[name] = np.frombuffer(rest, "<f4", tokens).astype(np.float32)
                packed, rest = rest[4 * tokens : 4 * tokens + size], rest[4 * tokens + size :]
                if packed:
                    top[name] = TopLogprobs.unpack(packed, tokens)
        except (ValueError, TypeError, AttributeError) as error:
            raise StoreError(f"columns of {len(data)} bytes are not those of {tokens} tokens") from error
        if rest:
            raise StoreError(f"columns of {tokens} tokens have {len(rest)} bytes too many")
        return cls(values, top)


def _values(part: TokenColumns | None, name: str, tokens: int) -> Floats:
    found = None if part is None else part.values.get(name)
    return np.full(tokens, np.nan, np.float32) if found is None else found


def _top(part: TokenColumns | None, name: str, tokens: int) -> TopLogprobs:
    found = None if part is None else part.top.get(name)
    return TopLogprobs.of([{}] * tokens) if found is None else found


class GatewayCallStatus(StrEnum):
    """One request to a gateway."""

    RUNNING = "running"  # a gateway generates its answer, until ``expires_at``
    DONE = "done"  # its model call is stored
    FAILED = "failed"  # it has no answer; the same request starts again


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySession(Root):
    """The base URL of one trajectory. ``id`` is the SHA-256 of its token; the token itself is not stored."""

    id: str
    record: str
    task: str
    traj_id: int
    attempt: int
    begun: int | None = None
    """The attempt that began the Record; None: this one."""
    owner: str
    """The owner of the claim; the URL is dead when its lease ends."""
    models: tuple[str, ...]
    """The names, and patterns such as ``claude-*``, by which a request may name the policy."""
    max_calls: int
    volatile: tuple[str, ...] = ()
    """Regular expressions of text that may differ when a later owner's program sends the same request."""
    created_at: datetime = field(default_factory=now)
    closed_at: datetime | None = None
    stopped_by: str | None = None
    """Why a request was refused: ``turns``, ``length``, or ``unavailable`` if no engine answered it."""
    trace_id: str | None = None
    """The trace of the trajectory, to which every gateway adds its model calls."""
    reward_key_digest: str | None = None
    """SHA-256 of the key, not the token, that a reward or feedback needs; None: it takes no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayCall(Root):
    """One request and its model call. ``id`` is ``record:digest:number``.

    ``digest`` identifies retries: of the idempotency key if there is one, else of the body. That of a later
    owner's request ends in ``.`` and its attempt.
    """

    id: str
    record: str
    attempt: int = 1
    """The claim under which it came: one of ``Record.owners``."""
    digest: str
    number: int
    answer_id: str
    """Identifies the answer to the client."""
    dialect: str
    gateway: str
    """The process that generates the answer."""
    status: GatewayCallStatus
    expires_at: datetime
    call: str | None = None
    """``_id`` of the model call."""
    after: str | None = None
    """Digest of the conversation with the answer; a request that continues it has the same prefix."""
    key: str | None = None
    """Digest of what the answered request asked for, without volatile text; the same key, the same answer."""
    replays: str | None = None
    """The earlier owner's request whose answer it got; None: its own was sampled."""
    replayed_in: int | None = None
    """The latest attempt under which a request got its answer again."""
    replayed_by: str | None = None
    """That request."""
    created_at: datetime = field(default_factory=now)
    finished_at: datetime | None = None

    @property
    def place(self) -> str:
        """Return its place among the trajectory's requests, the same for every owner: seeds depend on it."""
        return f"{self.record}:{self.digest.partition('.')[0]}:{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedReward(Document):
    """A reward that the agent reported through its gateway; no scorer runs then."""

    score: float
    details: dict[str, Any] = field(default_factory=dict)
    turn_rewards: dict[str, float] = field(default_factory=dict)
    """Index of the model call → its reward."""
    role_rewards: dict[str, float] = field(default_factory=dict)
    """Role → its reward."""


class Ending(StrEnum):
    """How a harness, or the command that scores it, ended."""

    EXITED = "exited"  # by itself, with exit code 0
    NONZERO_EXIT = "nonzero_exit"  # by itself, with another exit code
    KILLED = "killed"  # by a signal that AgentRL did not send, also one that a shell reports as 128 + n
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    DISK_LIMIT = "disk_limit"  # its files reached limits.disk_mb or limits.files
    OUTPUT_LIMIT = "output_limit"
    NO_CALLS = "no_calls"  # it ended with exit code 0 and has made no model call


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRun(Document):
    """One command that ran in the working directory of a trajectory."""

    ended: Ending
    exit_code: int
    """Minus the number of the signal that ended it."""
    seconds: float
    memory_mb: float
    """Largest memory seen."""
    stdout: str = ""
    """The first and the last bytes of standard output."""
    stderr: str = ""
    stdout_bytes: int = 0
    stderr_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessRun(Document):
    """What a trajectory did to its files: its harness, what changed, and the command that scored it."""

    run: CommandRun | None
    """The harness; None of an agent that worked through the tools of its environment."""
    changed_files: tuple[str, ...] = ()
    """The first files of the working directory that differ from its beginning."""
    changes: int = 0
    """How many files differ."""
    diff: str = ""
    """A unified diff of the changed text files, cut at a limit."""
    scoring: CommandRun | None = None
    """The command that scored it; None without one."""
    files: dict[str, str] = field(default_factory=dict)
    """Text files that it and its scoring left, by their path, each cut at a limit."""


TURN_REWARDS = "turn_rewards"
"""The key of ``score_details`` with a reward for each model call."""
ROLE_REWARDS = "role_rewards"
"""The key of ``score_details`` with the rewards of roles, {role: reward}."""
CALL_ROLES = "call_roles"
"""The key of ``score_details`` with the role of each model call, if roles have rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Document):
    """Why an attempt failed; ``kind`` is engine, tool, harness, scorer, trajectory, replay, poison, …"""

    kind: str
    message: str
    at: datetime = field(default_factory=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership(Document):
    """The time in which one claim sampled a trajectory, and what it took over from those before."""

    owner: str
    attempt: int
    since: datetime = field(default_factory=now)
    until: datetime | None = None
    ended: str | None = None
    """Why it ended before the trajectory: ``released``, ``lease`` or ``restarted``; None otherwise."""
    replayed: int = 0
    """Model calls that came from the journal."""
    tokens: int = 0
    """Generated tokens that it did not have to sample again."""
    tool_seconds: float = 0.0
    """Seconds of tools that it did not have to run again."""
    diverged_at: int | None = None
    """Index of the first model call that differed from the journal; None: none did."""
    dropped: int = 0
    """Model calls that are not trained for it: they went to the Record of this attempt, or, of a gateway, are
    ``Record.dropped_calls``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Root):
    """One trajectory, from the attempt that began it over all owners that went on with it.

    A scored Record has a score, a failed one a failure, and a released one neither. ``min_version`` and
    ``max_version`` are the lowest and highest policy version of the generated tokens.
    """

    id: str
    task: str
    traj_id: int
    attempt: int
    split: str
    epoch: int
    status: RecordStatus = RecordStatus.CREATED
    query: str
    answer: Any = None
    final_answer: str | None = None
    score: float | None = None
    score_details: dict[str, Any] = field(default_factory=dict)
    answer_seen_in: str | None = None
    """The tool whose result had the task's answer before the model wrote it (``--watch_answers``)."""
    stop_reason: StopReason | None = None
    failure: Failure | None = None
    unscored_because: Failure | None = None
    """Why the last attempt to score it failed; it waits for the next attempt."""
    abandoned_because: str | None = None
    advantage: float | None = None
    """The advantage of the score, for all model calls."""
    turn_advantages: tuple[float, ...] = ()
    """What each model call's own reward, or that of its role, adds to it; empty without such rewards."""
    tool_rewards: dict[str, Any] = field(default_factory=dict)
    """``{tool: {"calls": [reward of each call], "state": reward of its state}}``, of tools that give any.

    Of an environment also ``roles``, and ``details`` for those of the score.
    """
    agent_score: dict[str, Any] | None = None
    """``{score, details, turn_rewards, role_rewards}`` of an agent that scores its own trajectories."""
    turns: int = 0
    tool_calls: int = 0
    context_resets: int = 0
    """Contexts that a context manager started. Prompts that drop earlier thoughts are not counted."""
    prompt_tokens: int = 0
    """Tokens of the last model call's prompt."""
    input_tokens: int = 0
    """Tokens of the prompts of all model calls."""
    cached_tokens: int = 0
    """Tokens of these prompts that the engines had in their prefix caches."""
    generated_tokens: int = 0
    generate_seconds: float = 0.0
    """Seconds of the policy's model calls; an engine makes several at a time."""
    tool_seconds: float = 0.0
    """Seconds of its tools and of its environment."""
    api_tokens: int = 0
    """Tokens of models other than the policy that its agent and its tools asked, without judges."""
    api_cost: float = 0.0
    """What they cost, by the prices at the time of the call."""
    judge_tokens: int = 0
    """Tokens of the judges of all its scores, those that were replaced too (``judged``)."""
    judge_seconds: float = 0.0
    judge_cost: float = 0.0
    min_version: int | None = None
    max_version: int | None = None
    owner: str | None = None
    fence: int | None = None
    """The attempt of the claim that may write it; lower ones are refused."""
    owners: tuple[Ownership, ...] = ()
    """Who sampled it, in order."""
    events: tuple[Event, ...] = ()
    """What no model call can take: ``once`` behind a gateway, runs of outside tools between model calls."""
    partial: PartialGeneration | None = None
    """The tokens of a released Record's unfinished model call; the next owner resumes it."""
    spent_seconds: float = 0.0
    """How much of ``--trajectory_timeout_seconds`` was used when its last owner stopped."""
    train_rule: str | None = None
    """Which branches of a gateway's trajectory are trained: main, agent, all, or module:function."""
    untrained_calls: tuple[int, ...] = ()
    """Indexes of the model calls that ``train_rule`` leaves out, and of the dropped ones."""
    dropped_calls: tuple[int, ...] = ()
    """Indexes of a gateway's model calls for which the program of its last owner did not ask again.

    Their branch is neither scored nor trained. ``traj`` has them; the counts above do not.
    """
    dropped_tokens: int = 0
    """The generated tokens of the dropped calls."""
    reported_reward: ReportedReward | None = None
    """The reward that the agent reported through its gateway; at the end it becomes ``agent_score``."""
    harness: HarnessRun | None = None
    """What the harness of the agent ``command``, or the tests of a container, left; None without one."""
    trace_id: str | None = None
    """The OpenTelemetry trace of this attempt, in hexadecimal digits; None if it was not traced."""
    traj: tuple[str, ...] = ()
    """``_id`` of each model call, in order."""
    trained_count: int = 0
    last_trained_step: int | None = None
    created_at: datetime = field(default_factory=now)
    completed_at: datetime | None = None
    scored_at: datetime | None = None
    score_history: tuple[dict[str, Any], ...] = ()
    """``{score, details, scored_at}`` of each score that ``agentrl db rescore`` replaced, oldest first."""
    rescored: dict[str, Any] | None = None
    """``{score, details, at}`` of a new score that came after the Record had been trained."""
    pruned_at: datetime | None = None
    """When ``agentrl db prune`` deleted its model calls and training data."""
    checksums: dict[str, str] = field(default_factory=dict, compare=False)
    """See ``store.mechanics.blobs``."""

    @property
    def shown_status(self) -> str:
        """The status that people read: ``trained`` in place of ``ready`` once a step trained it."""
        return shown_status(self.status, self.trained_count)

    @property
    def owned_seconds(self) -> float:
        """How long owners that have ended had it; time of outages included."""
        ended = [(owner.since, owner.until) for owner in self.owners if owner.until is not None]
        return sum((until - since).total_seconds() for since, until in ended)

    @property
    def stored_calls(self) -> int:
        """The number of its model calls, dropped ones included: their indexes are below it."""
        return self.turns + len(self.dropped_calls)

    @property
    def first_scored_at(self) -> datetime | None:
        """When the first score was written; a later rescoring does not count."""
        earlier = self.score_history[0].get("scored_at") if self.score_history else None
        return earlier if isinstance(earlier, datetime) else self.scored_at

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Return the reward of each model call; empty if neither the scorer nor a tool gave one."""
        stored = self.score_details.get(TURN_REWARDS)
        values = stored if isinstance(stored, (list, tuple)) else ()
        return tuple(float(value) if is_finite(value) else 0.0 for value in values)

    @property
    def role_rewards(self) -> dict[str, float]:
        """Return the rewards of roles; empty without any."""
        stored = self.score_details.get(ROLE_REWARDS)
        values = stored if isinstance(stored, dict) else {}
        return {role: float(value) for role, value in values.items() if is_finite(value)}

    @property
    def score_parts(self) -> dict[str, tuple[float, float]]:
        """Return (weight, score) of each scorer whose weighted sum the score is; empty for one scorer."""
        stored = self.score_details.get("parts")
        parts = stored if isinstance(stored, dict) else {}
        return {
            name: (float(part["weight"]), float(part["score"]))
            for name, part in parts.items()
            if isinstance(part, dict) and is_finite(part.get("weight")) and is_finite(part.get("score"))
        }

    @property
    def call_roles(self) -> tuple[str | None, ...]:
        """Return the role of each model call; empty if no role has a reward."""
        stored = self.score_details.get(CALL_ROLES)
        return tuple(stored) if isinstance(stored, (list, tuple)) else ()


def judged(details: Mapping[str, Any]) -> dict[str, float]:
    """Return what the judges of a score took by its details; of a sum of scorers, those of its parts too."""
    parts = details.get("parts")
    each = (details, *(parts.values() if isinstance(parts, Mapping) else ()))
    asked = [one for one in each if isinstance(one, Mapping) and isinstance(one.get("judge"), str)]

    def total(*names: str) -> float:
        # A scorer of a user may have written anything: count what the Record's fields can hold.
        return float(sum(one[name] for one in asked for name in names if is_score(one.get(name))))

    tokens = int(total("prompt_tokens", "completion_tokens"))
    return {"judge_tokens": tokens, "judge_seconds": total("seconds"), "judge_cost": total("cost")}


MAX_LABEL: Final = 64
MAX_NOTE: Final = 4000
MAX_NAME: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Label(Root):
    """One person's label of one Record. ``id`` is ``record_id@by``: a person has one label per trajectory."""

    id: str
    record: str
    by: str
    """The name that the person gave."""
    written_by: str | None = None
    """Who wrote it by authentication: the user and host of the dashboard, and the database user."""
    label: str
    """A word to filter by, such as ``wrong`` or ``cheats``."""
    note: str = ""
    score: float | None = None
    """The score that the trajectory deserves; ``agentrl db rescore --from-labels`` applies it."""
    created_at: datetime = field(default_factory=now)
    updated_at: datetime = field(default_factory=now)


def label_key(record_id: str, by: str) -> str:
    """Return the ``_id`` of a person's label of a Record."""
    return f"{record_id}@{by}"


def check_label(*, label: str, note: str, by: str, score: float | None) -> None:
    """Raise ConfigError for a text that is missing or too long, or a score that is not finite."""
    for what, text, shortest, longest in (
        ("label", label, 1, MAX_LABEL), ("note", note, 0, MAX_NOTE), ("name", by, 1, MAX_NAME)
    ):  # fmt: skip
        if not shortest <= len(text) <= longest:
            raise ConfigError(
                f"the {what} has {len(text)} characters", hint=f"give {shortest} to {longest} characters"
            )
    if score is not None and not math.isfinite(score):
        raise ConfigError(f"the score is {score}", hint="give a finite number, or none")
