"""``agentrl teach``: open a teacher, compare its tokenizer with the student's, and fill its column."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.base.concurrency import background, end_tasks, wait_for_any
from agentrl.base.processes import stop_on_signals
from agentrl.chat.model_folder import read_chat_files
from agentrl.chat.open_format import open_chat_format
from agentrl.config.load import Configs
from agentrl.config.schema import ClaimConfig, ModelConfig, RunConfig, TeacherConfig
from agentrl.errors import (
    AgentRLError,
    ConfigError,
    Dependency,
    DependencyKind,
    EngineError,
    LeaseLostError,
    RunMissingError,
    StoreError,
    StoreUnavailableError,
)
from agentrl.inference.engine import EngineAnswerError
from agentrl.losses.loss import TEACHER
from agentrl.observe.logging import redact_and_cut
from agentrl.rollout.held_claims import bounded, owner_name
from agentrl.rollout.outages import Breaker, report_outages
from agentrl.store.client import Store, open_existing
from agentrl.store.mechanics.connection import COLUMN
from agentrl.store.mechanics.lease import renewed
from agentrl.store.mechanics.retry import log_store_errors, retry_outages
from agentrl.teaching.teacher import FolderTeacher, HttpTeacher, TeacherEngine, Teaching

if TYPE_CHECKING:
    from agentrl.store.client import Store
    from agentrl.store.groups import ColumnClaim
    from agentrl.teaching.teacher import Teaching

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
"""Longest interval between looks for work while nothing waits, or while the teacher is down."""
_AT_ONCE = 16
"""Largest number of Records that are claimed together."""
_WHY_CHARS = 500


@dataclass(eq=False, kw_only=True)
class Filler:
    """Fills one column of a run from one teacher, up to ``concurrency`` Records at a time."""

    store: Store
    teaching: Teaching
    claims: ClaimConfig
    name: str = ""
    """The name by which tasks ask for this teacher (``meta.teacher``); empty: those that name none."""
    concurrency: int = 8
    filled: int = 0
    """Number of Records that this process filled."""
    _running: dict[asyncio.Task[bool], ColumnClaim] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after a change of columns."""

    def __post_init__(self) -> None:
        self._owner = owner_name()
        self._breaker = Breaker(Dependency(DependencyKind.TEACHER, self.teaching.engine.name), lambda: None)

    async def run(self, stop: asyncio.Event, *, until_empty: bool = False) -> None:
        """Fill until ``stop``, or with ``until_empty`` until no Record waits; then hand back what is held."""
        async with background(report_outages(self.store, self._down, self._owner), self._watch()):
            try:
                while not stop.is_set():
                    self._changed.clear()
                    claimed = await self._claim()
                    self._collect()
                    if not claimed and not self._running and until_empty and not await self._waiting():
                        return
                    if not claimed or len(self._running) >= self.concurrency:
                        await wait_for_any(stop, self._changed, tasks=self._running, timeout=POLL_SECONDS)
                self._collect()
            finally:
                self._breaker.close()
                held = list(self._running.values())
                await end_tasks(*self._running)
                await bounded(self._release(held))

    async def _watch(self) -> None:
        while True:
            if await self.store.wait_for_change(COLUMN, timeout=POLL_SECONDS):
                self._changed.set()

    def _down(self) -> list[Breaker]:
        return [self._breaker] if self._breaker.is_open else []

    async def _claim(self) -> bool:
        """Claim Records and start on them; one alone probes a teacher that is down."""
        free = min(self.concurrency - len(self._running), _AT_ONCE)
        if self._breaker.is_open:
            if not self._breaker.probe_is_due:
                return False
            free = min(free, 1)
        if free < 1:
            return False
        claims = await self.store.columns.claim(
            TEACHER, owner=self._owner, lease_seconds=self.claims.lease_seconds, limit=free, filler=self.name
        )
        if claims and self._breaker.is_open:
            self._breaker.begin_probe()
        for claim in claims:
            self._running[asyncio.create_task(self._fill(claim))] = claim
        return bool(claims)

    def _collect(self) -> None:
        """Count what has ended; raise the error of a Record that this process cannot fill."""
        for task in [task for task in self._running if task.done()]:
            del self._running[task]
            self.filled += task.result()

    async def _waiting(self) -> int:
        counts = await self.store.columns.waiting(TEACHER)
        return sum(counts.get(filler, 0) for filler in {"", self.name})

    async def _fill(self, claim: ColumnClaim) -> bool:
        """Fill one column under its lease; return whether it is filled. A failure hands it back."""
        seconds = self.claims.lease_seconds
        renew = partial(self.store.columns.renew, claim, seconds)
        async with renewed(renew, seconds, f"the lease of column {claim.column.id}"):
            try:
                await self._ask(claim)
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
                await self._fail(claim, error, counts=True)
                return False
        logger.info("column filled", extra={"record": claim.column.record, "by": self.teaching.engine.name})
        return True

    async def _ask(self, claim: ColumnClaim) -> None:
        column, store = claim.column, self.store
        task = await store.tasks.get(column.task)
        if task is None:
            raise StoreError(f"there is no Task {column.task}", hint="agentrl db check lists what is missing")
        calls = await store.model_calls.by_record(column.record)
        values, top = await self.teaching.values(task, calls)
        self._breaker.succeeded()
        await store.columns.fill(claim, values.tolist(), top, by=self.teaching.engine.name)

    async def _fail(self, claim: ColumnClaim, error: AgentRLError, *, counts: bool) -> None:
        why = redact_and_cut(error.message, _WHY_CHARS)
        try:
            status = await self.store.columns.fail(
                claim, why, max_attempts=self.claims.max_attempts, counts=counts,
                backoff_seconds=self.claims.retry_backoff_seconds,
            )  # fmt: skip
        except LeaseLostError as lost:
            logger.warning("%s", lost.message)
            return
        logger.warning("column not filled", extra={"record": claim.column.record, "why": why, "now": status})

    async def _release(self, claims: list[ColumnClaim]) -> None:
        for claim in claims:
            message = "a column could not be handed back; its lease runs out"
            with log_store_errors(logger, message, outages=True), suppress(LeaseLostError):
                await self.store.columns.release(claim)


_RETRY_SECONDS = 2.0
_BEGIN_SECONDS = 60.0


async def teach(configs: Configs, *, until_empty: bool) -> int:
    """Fill until a signal, or with ``until_empty`` until nothing waits; return how many were filled."""
    run, flags = configs[RunConfig], configs[TeacherConfig]
    stop = stop_on_signals()
    if configs[ModelConfig].model_name_or_path is None:
        raise ConfigError("--model_name_or_path is missing", hint="give the folder of the student's model")
    engine = await asyncio.to_thread(_open, flags)
    try:
        with retry_outages(run.db_wait_seconds, stop):
            async with await _open_begun(run, stop) as store:
                teaching = await _teaching(engine, configs[ModelConfig], flags)
                filler = Filler(
                    store=store, teaching=teaching, claims=configs[ClaimConfig], name=flags.teacher_name,
                    concurrency=flags.teacher_concurrency,
                )  # fmt: skip
                await filler.run(stop, until_empty=until_empty)
                return filler.filled
    finally:
        await engine.close()


async def _open_begun(run: RunConfig, stop: asyncio.Event) -> Store:
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
    if flags.teacher_tokenizer is not None and not folder.is_dir():
        raise ConfigError(f"--teacher_tokenizer {folder} is not a folder", hint="one with a tokenizer.json")
    if not folder.is_dir():
        raise ConfigError(
            f"teacher {engine.name} serves {folder}, which is not a folder here: its tokenizer cannot be"
            " compared with the student's",
            hint="give --teacher_tokenizer, a folder with its tokenizer.json",
        )
    student, own = read_chat_files(str(model.model_name_or_path)), read_chat_files(folder)
    is_same = student.tokenizer.get_vocab() == own.tokenizer.get_vocab()
    prompt = None if flags.teacher_prompt is None else _read(Path(flags.teacher_prompt))
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


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
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
