"""A teacher: what it reads of a trajectory, its logprobs, and ``agentrl teach``, which fills its column.

A teacher is a server of SGLang or vLLM, or a model in this process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from agentrl.base.processes import stop_on_signals
from agentrl.calls.prompts import chain_of, one_system
from agentrl.chat.chat_format import ChatFormat
from agentrl.chat.model_folder import read_chat_files
from agentrl.chat.open_format import open_chat_format
from agentrl.columns.outages import Outages, report_outages
from agentrl.columns.pool import Pool, count_gpus, owner_name
from agentrl.config.load import Configs
from agentrl.config.schema import ClaimConfig, ModelConfig, RunConfig, TeacherConfig
from agentrl.documents.model_call import DispatchedSamplingTask, unpack_ids
from agentrl.documents.record import TopLogprobs, checked_logprobs
from agentrl.documents.task import Task
from agentrl.errors import (
    AgentRLError,
    ColumnError,
    ConfigError,
    Dependency,
    DependencyKind,
    EngineError,
    LeaseLostError,
    RunMissingError,
    StoreError,
    StoreUnavailableError,
)
from agentrl.inference.engine import EngineAnswerError, EngineRefusedError, known_format, malformed
from agentrl.inference.http import EngineHttp
from agentrl.losses.loss import TEACHER
from agentrl.observe.logging import redact_and_cut
from agentrl.store.client import open_existing
from agentrl.store.mechanics.connection import COLUMN
from agentrl.store.mechanics.retry import retry_outages
from agentrl.weights.folder import read_config

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.store.groups import ColumnClaim

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 60.0
_WHY_CHARS = 500


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Logprobs of n consecutive ids under a teacher, at temperature 1."""

    logprobs: NDArray[np.float32]
    """float32[n], in nats."""
    top: TopLogprobs | None = None
    """The most likely ids at each place; None if none were asked for."""

    @classmethod
    def of(cls, logprobs: Sequence[float | None], rows: Sequence[Mapping[int, float]], top: int) -> Self:
        """Check an answer: a logprob of each id, and ``rows`` of {id: logprob}, of which ``top`` are kept.

        Raises ValueError for what no distribution has, and for more or fewer rows than ids.
        """
        values = checked_logprobs(logprobs)
        if not top:
            return cls(values)
        if len(rows) != len(values):
            raise ValueError(f"likeliest ids of {len(rows)} tokens, not {len(values)}")
        likeliest = [nlargest(top, row.items(), key=itemgetter(1)) for row in rows]
        return cls(values, TopLogprobs.of([dict(row) for row in likeliest]))


class TeacherEngine(Protocol):
    """Scores ids."""

    name: str
    """What is stored as ``Column.by``."""

    async def score(self, ids: Sequence[int], first: int, top: int) -> Scored:
        """Return the logprobs of ``ids[first:]``, each given the ids before it, with ``top`` others.

        ``first`` is at least 1. Raises EngineError; its ``outage`` says that the teacher is down.
        """

    async def folder(self) -> str | None:
        """Return the model's folder if the engine names one."""

    async def close(self) -> None:
        """Free what it holds."""


class HttpTeacher:
    """A teacher behind a server: SGLang's ``/generate``, or ``/v1/completions`` of vLLM."""

    def __init__(self, url: str, timeout: float) -> None:
        """``timeout`` limits a request, in seconds."""
        self._http = EngineHttp(url)
        self.name = self._http.url
        self._timeout = timeout
        self._served: str | None = None
        """The model's name, of a server that has ``/v1/completions`` alone."""

    async def folder(self) -> str | None:
        """Return the folder of the served model, and find out which server it is."""
        kind, content = await self._http.respond("GET", "/model_info", statuses=(200, 404))
        if "json" in kind and b'"model_path"' in content:
            return str((await self._http.call("GET", "/model_info")).get("model_path"))
        answer = await self._http.call("GET", "/v1/models")
        with known_format(self._http.url, answer):
            model = answer["data"][0]
            self._served = str(model["id"])
            return str(model.get("root") or model["id"])

    async def score(self, ids: Sequence[int], first: int, top: int) -> Scored:
        """Return the logprobs of ``ids[first:]``; see ``TeacherEngine``."""
        if self._served is not None:
            return await self._prompt_logprobs(ids, first, top)
        body = {
            "input_ids": list(ids), "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True, "logprob_start_len": first - 1, "top_logprobs_num": top,
        }  # fmt: skip
        answer = await self._http.call("POST", "/generate", body, self._timeout)
        with known_format(self._http.url, answer):
            meta = answer["meta_info"]
            rows = meta["input_token_logprobs"][first - len(ids) :]
            if [row[1] for row in rows] != list(ids[first:]):
                raise malformed(self._http.url, f"logprobs of other ids than the {len(ids)} that it was sent")
            others = meta["input_top_logprobs"][first - len(ids) :] if top else ()
            likeliest = [{int(each[1]): float(each[0]) for each in row} for row in others]
            return Scored.of([row[0] for row in rows], likeliest, top)

    async def _prompt_logprobs(self, ids: Sequence[int], first: int, top: int) -> Scored:
        body = {
            "model": self._served, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0,
            "prompt_logprobs": top,
        }  # fmt: skip
        answer = await self._http.call("POST", "/v1/completions", body, self._timeout)
        with known_format(self._http.url, answer):
            rows = answer["choices"][0]["prompt_logprobs"][first:]
            found = [{int(id): float(each["logprob"]) for id, each in row.items()} for row in rows]
            own = [row[id] for id, row in zip(ids[first:], found, strict=True)]
            return Scored.of(own, found, top)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


class FolderTeacher:
    """A model folder, loaded into this process. One sequence is computed at a time, in a thread."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError for a folder without a model."""
        read_config(folder)  # refuses a wrong folder before seconds of imports
        from agentrl.model.logprobs import IdScorer  # torch is imported where a teacher computes here

        self.name = str(folder)
        self._folder = folder
        self._scorer = IdScorer(folder)
        self._turn = asyncio.Lock()

    async def folder(self) -> str | None:
        """Return the folder."""
        return str(self._folder)

    async def score(self, ids: Sequence[int], first: int, top: int) -> Scored:
        """Return the logprobs of ``ids[first:]``; see ``TeacherEngine``."""
        async with self._turn:
            try:
                values, rows = await asyncio.to_thread(self._scorer.score, ids, first, top)
                return Scored.of(values.tolist(), rows, top)
            except (RuntimeError, IndexError, ValueError) as error:
                raise EngineRefusedError(
                    f"{self.name} cannot compute {len(ids)} tokens: {type(error).__name__}: {error}"
                ) from error

    async def close(self) -> None:
        """Nothing is open."""


def token_ends(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int | None]:
    """Return the characters of text up to the end of each token; None inside a character."""
    stream = DecodeStream(skip_special_tokens=False)
    ends: list[int | None] = []
    length = 0
    for token in ids:
        piece = stream.step(tokenizer, token)
        length += len(piece or "")
        ends.append(None if piece is None else length)
    return ends


def align(
    student: Sequence[int | None], teacher: Sequence[int | None], logprobs: Sequence[float]
) -> NDArray[np.float32]:
    """Return float32[len(student)]: the teacher's logprob of each student token, NaN where there is none.

    ``student`` and ``teacher`` are ``token_ends`` of the same text, ``logprobs`` those of the teacher's
    tokens. Between two ends that both have, one student token gets the sum over the teacher's tokens of the
    same characters; several student tokens there get NaN, because nothing says how to share the sum.
    """
    values = np.full(len(student), np.nan, np.float32)
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(logprobs, np.float64))])
    after = {end: place + 1 for place, end in enumerate(teacher) if end is not None}
    first, before = 0, 0
    for place, end in enumerate(student):
        if end is None or end not in after:
            continue
        if place == first:
            values[place] = sums[after[end]] - sums[before]
        first, before = place + 1, after[end]
    return values


class ColumnValues(Protocol):
    """Computes the values of one column."""

    @property
    def name(self) -> str:
        """What is stored as ``Column.by``."""

    async def values(
        self, task: Task, calls: Sequence[DispatchedSamplingTask]
    ) -> tuple[NDArray[np.float32], TopLogprobs | None]:
        """Return float32 over the generated tokens of a Record's model calls, and likely other ids.

        ``calls`` are ordered by index. Raises ColumnError for a column that can never have its values, and
        another AgentRLError for one that may be tried again.
        """


@dataclass(frozen=True)
class Teaching:
    """How a teacher reads trajectories."""

    engine: TeacherEngine
    teacher: ChatFormat | None = None
    """How it writes prompts; None: it reads the student's ids as they are, prompts included."""
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None
    """Those of student and teacher if they differ; None: the ids of an answer mean the same to both."""
    stop_ids: frozenset[int] = frozenset()
    """The ids that end a turn of the student."""
    prompt: str | None = None
    """A privileged prompt, added to the system message: ``{answer}`` and ``{query}`` are the Task's."""
    top_logprobs: int = 0

    @property
    def name(self) -> str:
        """The engine's."""
        return self.engine.name

    async def values(
        self, task: Task, calls: Sequence[DispatchedSamplingTask]
    ) -> tuple[NDArray[np.float32], TopLogprobs | None]:
        """Return the column of a Record: float32 over the generated tokens of ``calls``, and the top ids.

        Calls that another model answered have NaN. ``calls`` are ordered by index.
        """
        values: list[NDArray[np.float32]] = [np.zeros(0, np.float32)]
        tops: list[TopLogprobs] = []
        for call, prompt in self._prompts(task, calls):
            output = unpack_ids(call.output_ids).tolist()
            nothing = TopLogprobs.of([{}] * len(output))
            if prompt is None or not output or not len(prompt):
                values.append(np.full(len(output), np.nan, np.float32))
                tops.append(nothing)
            elif self.tokenizers is None:
                scored = await self.engine.score([*prompt, *output], len(prompt), self.top_logprobs)
                values.append(scored.logprobs)
                tops.append(scored.top or nothing)
            else:
                values.append(await self._aligned(prompt, output))
                tops.append(nothing)
        joined = TopLogprobs.join(tops) if tops else None
        return np.concatenate(values), joined if joined is not None and len(joined.logprobs) else None

    async def _aligned(self, prompt: Sequence[int], output: Sequence[int]) -> NDArray[np.float32]:
        """Score an answer as text: its last token is the end of a turn for both."""
        assert self.tokenizers is not None
        assert self.teacher is not None
        student, teacher = self.tokenizers
        ends_turn = output[-1] in self.stop_ids
        spoken = output[: len(output) - ends_turn]
        text = student.decode(spoken, skip_special_tokens=False)
        ids = teacher.encode(text, add_special_tokens=False).ids
        end = [_end_of_turn(self.teacher)] if ends_turn else []
        if not [*ids, *end]:
            return np.full(len(output), np.nan, np.float32)
        scored = await self.engine.score([*prompt, *ids, *end], len(prompt), 0)
        values = align(
            token_ends(student, spoken), token_ends(teacher, ids), scored.logprobs[: len(ids)].tolist()
        )
        return np.concatenate([values, scored.logprobs[len(ids) :]]).astype(np.float32)

    def _prompts(
        self, task: Task, calls: Sequence[DispatchedSamplingTask]
    ) -> Iterator[tuple[DispatchedSamplingTask, Sequence[int] | None]]:
        """Yield each call with the ids before its answer; None for a call that another model answered."""
        known = {call.id: call for call in calls}
        tools: dict[str, tuple[dict[str, Any], ...] | None] = {}
        for call in calls:
            tools[call.id] = call.tools if call.parent is None else tools[call.parent]
            if call.fixed is not None:
                yield call, None
                continue
            chain = chain_of(known, call.id)
            if self.teacher is None:
                yield call, chain.prompt_ids
            else:
                messages = self._privileged(task, one_system(chain.messages[:-1]))
                yield call, self.teacher.render(messages, tools[call.id] or None)

    def _privileged(self, task: Task, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with the privileged prompt at the end of the system message."""
        if self.prompt is None:
            return list(messages)
        text = self.prompt.replace("{answer}", str(task.answer)).replace("{query}", task.query)
        if messages and messages[0]["role"] == "system":
            first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
            return [first, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]


def _end_of_turn(chat: ChatFormat) -> int:
    """Return the id with which the format closes an assistant's turn."""
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids = chat.render(turn, None, add_generation_prompt=False)
    return next((token for token in reversed(ids) if token in chat.stop_ids), min(chat.stop_ids))


@dataclass(eq=False, kw_only=True)
class TeacherColumn:
    """The filler of a column of a run, ``teacher`` by default, from one teacher."""

    store: Store
    teaching: ColumnValues
    claims: ClaimConfig
    column: str = TEACHER
    name: str = ""
    """The name by which tasks ask for this teacher (``meta.teacher``); empty: those that name none."""
    until_empty: bool = False
    """Whether the pool ends when no Record waits for this teacher."""
    gpus: int = 1
    """On how many this process computes; 0: the teacher is a server of others, whose time is not known."""

    def __post_init__(self) -> None:
        self._owner = owner_name()
        self._outages = Outages()
        self._breaker = self._outages.breaker(Dependency(DependencyKind.TEACHER, self.teaching.name))

    async def run(self, stop: asyncio.Event, concurrency: int, at_once: asyncio.Event | None = None) -> int:
        """Fill until ``stop``, or until nothing waits; return how many Records were filled.

        ``at_once`` is that of ``Pool.release``.
        """
        pool = Pool(self.store, self, self.claims, concurrency)
        self._outages.changed = pool.wake

        async def watch() -> None:
            while True:
                if await self.store.wait_for_change(COLUMN, timeout=_WATCH_SECONDS):
                    pool.wake()

        try:
            reports = report_outages(self.store, lambda: self._outages.open, self._owner)
            counting = [count_gpus(self.store, self.gpus)] if self.gpus else []
            await pool.run(stop, reports, watch(), *counting, at_once=at_once)
        finally:
            self._outages.close()
        return pool.filled

    async def claim(self, free: int) -> Sequence[ColumnClaim]:
        """Claim Records that wait; one alone probes a teacher that is down."""
        is_probe = self._breaker.is_open
        if is_probe and not self._breaker.probe_is_due:
            return []
        claims = await self.store.columns.claim(
            self.column, owner=self._owner, lease_seconds=self.claims.lease_seconds,
            limit=1 if is_probe else free, filler=self.name,
        )  # fmt: skip
        if claims and is_probe:
            self._breaker.begin_probe()
        return claims

    async def is_done(self) -> bool:
        """Return whether no Record waits for this teacher, and the pool ends then."""
        if not self.until_empty:
            return False
        waiting = await self.store.columns.waiting(self.column)
        return not any(waiting.get(filler) for filler in {"", self.name})

    async def renew(self, claims: Sequence[ColumnClaim], lease_seconds: float) -> Collection[ColumnClaim]:
        """Renew the leases of ``claims``; return those that others took over."""
        return await self._lost(claims, partial(self.store.columns.renew, lease_seconds=lease_seconds))

    async def release(self, claims: Sequence[ColumnClaim]) -> Collection[ColumnClaim]:
        """Hand ``claims`` back unfilled; return those that others took over."""
        return await self._lost(claims, self.store.columns.release)

    async def granted(self) -> Sequence[ColumnClaim]:
        """Return the claims that this process holds according to the database."""
        return await self.store.columns.of_owner(self.column, self._owner)

    async def fill(self, claim: ColumnClaim) -> bool:
        """Fill one column; return whether it is filled. A failure hands it back."""
        column, store = claim.column, self.store
        try:
            task = await store.tasks.get(column.task)
            if task is None:
                raise StoreError(
                    f"there is no Task {column.task}", hint="agentrl db check lists what is missing"
                )
            calls = await store.model_calls.by_record(column.record)
            values, top = await self.teaching.values(task, calls)
            self._breaker.succeeded()
            await store.columns.fill(claim, values.tolist(), top, by=self.teaching.name)
        except LeaseLostError as error:
            logger.warning("%s", error.message)
            return False
        except StoreUnavailableError:
            raise
        except EngineError as error:
            if error.outage is None:
                self._breaker.succeeded()  # it refused this Record, so it is up
            else:
                self._breaker.failed(error.message, error.retry_after)
            # A malformed answer may be the Record's fault: without a bound it would be asked for ever.
            counts = error.outage is None or isinstance(error, EngineAnswerError)
            await self._fail(claim, error, counts=counts)
            return False
        except AgentRLError as error:
            if self._breaker.is_open:
                self._breaker.failed(error.message)
            await self._fail(claim, error, counts=True, is_final=isinstance(error, ColumnError))
            return False
        logger.info("column filled", extra={"record": claim.record_id, "by": self.teaching.name})
        return True

    async def _fail(
        self, claim: ColumnClaim, error: AgentRLError, *, counts: bool, is_final: bool = False
    ) -> None:
        why = redact_and_cut(error.message, _WHY_CHARS)
        try:
            status = await self.store.columns.fail(
                claim, why, max_attempts=1 if is_final else self.claims.max_attempts, counts=counts,
                backoff_seconds=self.claims.retry_backoff_seconds,
            )  # fmt: skip
        except LeaseLostError as lost:
            logger.warning("%s", lost.message)
            return
        logger.warning("column not filled", extra={"record": claim.record_id, "why": why, "now": status})

    async def _lost(
        self, claims: Sequence[ColumnClaim], write: Callable[[ColumnClaim], Awaitable[None]]
    ) -> list[ColumnClaim]:
        lost = []
        for claim in claims:
            try:
                await write(claim)
            except LeaseLostError:
                lost.append(claim)
        return lost


_RETRY_SECONDS = 2.0
_BEGIN_SECONDS = 60.0


async def teach(configs: Configs, *, until_empty: bool) -> int:
    """Fill until a signal, or with ``until_empty`` until nothing waits; return how many were filled."""
    run, flags = configs[RunConfig], configs[TeacherConfig]
    at_once = asyncio.Event()
    stop = stop_on_signals(at_once)
    if configs[ModelConfig].model_name_or_path is None:
        raise ConfigError("--model_name_or_path is missing", hint="give the folder of the student's model")
    read_prompt(flags)  # before a server is awaited
    engine = await asyncio.to_thread(_open, flags)
    try:
        with retry_outages(run.db_wait_seconds, stop):
            async with await open_begun(run, stop) as store:
                teaching = await _teaching(engine, configs[ModelConfig], flags)
                column = TeacherColumn(
                    store=store, teaching=teaching, claims=configs[ClaimConfig], name=flags.teacher_name,
                    until_empty=until_empty, gpus=int(isinstance(engine, FolderTeacher)),
                )  # fmt: skip
                return await column.run(stop, flags.teacher_concurrency, at_once)
    finally:
        await engine.close()


async def open_begun(run: RunConfig, stop: asyncio.Event) -> Store:
    """Open the run; wait for a sampler or trainer that starts at the same time and begins it."""
    deadline = time.monotonic() + _BEGIN_SECONDS
    while True:
        try:
            return await open_existing(run)
        except RunMissingError as error:
            if time.monotonic() >= deadline or stop.is_set():
                raise
            logger.warning("waiting %g s for the run to begin: %s", _BEGIN_SECONDS, error.message)
            await asyncio.sleep(_RETRY_SECONDS)


def _open(flags: TeacherConfig) -> TeacherEngine:
    if flags.teacher is None:
        raise ConfigError("--teacher is missing", hint="give a model folder, or the URL of a server")
    if "://" in flags.teacher and not flags.teacher.startswith(("http://", "https://")):
        raise ConfigError(
            f"--teacher is {flags.teacher}", hint="a server's URL begins with http:// or https://"
        )
    if "://" in flags.teacher:
        return HttpTeacher(flags.teacher, flags.teacher_timeout_seconds)
    return FolderTeacher(Path(flags.teacher))


async def _teaching(engine: TeacherEngine, model: ModelConfig, flags: TeacherConfig) -> Teaching:
    """Return how the teacher reads: the student's ids if both tokenizers have the same vocabulary."""
    served = await _reached(engine, flags.teacher_wait_seconds)
    folder = Path(flags.teacher_tokenizer or served or "none")
    teaching = await asyncio.to_thread(_compare, engine, model, folder, flags)
    reads = "the student's ids" if teaching.tokenizers is None else "text, aligned"
    logger.info("teacher", extra={"by": engine.name, "reads": reads})
    return teaching


def _compare(engine: TeacherEngine, model: ModelConfig, folder: Path, flags: TeacherConfig) -> Teaching:
    if not folder.is_dir():
        raise ConfigError(
            f"teacher {engine.name} serves {folder}, which is not a folder here: its tokenizer cannot be"
            " compared with the student's",
            hint="give --teacher_tokenizer, a folder with its tokenizer.json",
        )
    student, own = read_chat_files(str(model.model_name_or_path)), read_chat_files(folder)
    is_same = student.tokenizer.get_vocab() == own.tokenizer.get_vocab()
    prompt = read_prompt(flags)
    if is_same and prompt is None:
        return Teaching(engine, top_logprobs=flags.teacher_top_logprobs)
    described = replace(model, model_name_or_path=str(folder)) if is_same else ModelConfig()
    return Teaching(
        engine,
        teacher=open_chat_format(folder, described),
        tokenizers=None if is_same else (student.tokenizer, own.tokenizer),
        stop_ids=student.stop_ids,
        prompt=prompt,
        top_logprobs=flags.teacher_top_logprobs,
    )


def read_prompt(flags: TeacherConfig) -> str | None:
    """Return the text of --teacher_prompt. Raises ConfigError, also for a wrong --teacher_tokenizer."""
    folder, path = flags.teacher_tokenizer, flags.teacher_prompt
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"--teacher_tokenizer {folder} is not a folder", hint="one with a tokenizer.json")
    try:
        return None if path is None else Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--teacher_prompt {path} cannot be read: {error}", hint="give a text file"
        ) from error


async def _reached(engine: TeacherEngine, wait_seconds: float) -> str | None:
    """Return the folder of the teacher's model; wait for a server that is not up yet."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            return await engine.folder()
        except EngineError as error:
            if error.outage is None or time.monotonic() >= deadline:
                error.hint = (
                    "start the server, or correct --teacher; --teacher_wait_seconds is how long it is awaited"
                )
                raise
            logger.warning("the teacher is not up yet: %s", error.message)
            await asyncio.sleep(_RETRY_SECONDS)
