"""Retry database calls while the server is unavailable: one time limit and one loop for the process."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from bson.errors import BSONError
from pymongo.errors import (
    BulkWriteError,
    ConfigurationError,
    ConnectionFailure,
    ExecutionTimeout,
    OperationFailure,
    PyMongoError,
)  # fmt: skip

from agentrl.base.concurrency import Backoff
from agentrl.errors import RunMissingError, StoreDeniedError, StoreError, StoreUnavailableError

ENCODING_ERRORS = (BSONError, OverflowError, UnicodeEncodeError, RecursionError)
"""What the BSON encoder raises for a value that no document can hold."""

_AUTHENTICATION_CODES = (13, 18)
_DISK_FULL_CODES = (14031, 17)
_DISK_FULL = "No space left on device"
"""The text of the operating system's error, which the storage engine passes on under other codes."""
_TRANSIENT_CODES = (24, 112, 211, 251, 290)
"""A transaction that the server ended (a lock, a conflict, an election, its lifetime): not always labeled so.
And a newly elected primary that cannot yet verify timestamps that the previous primary signed."""
_NO_SESSIONS = "Sessions are not supported"
"""The driver's message for a server without sessions; also for a replica-set member that has just started."""
_TRANSIENT_LABELS = ("TransientTransactionError", "UnknownTransactionCommitResult", "RetryableWriteError")
_VALIDATION_FAILED = 121


def is_outage(error: BaseException) -> bool:
    """Return whether the error means that the server is unavailable, not that it refused the operation."""
    if isinstance(error, PyMongoError):
        return isinstance(error, ConnectionFailure) or error.timeout
    return isinstance(error, StoreUnavailableError)


def store_error(doing: str, error: PyMongoError, host: str, timeout: float) -> StoreError:
    """Return the StoreError for a driver error: a StoreUnavailableError if a later call may succeed."""
    code = error.code if isinstance(error, OperationFailure) else None
    if code in _AUTHENTICATION_CODES and isinstance(error, OperationFailure):
        return StoreDeniedError(
            f"{doing}: MongoDB at {host} refused the user: {error.details or error}",
            hint="check user, password and authSource in --db_connection_string",
        )
    # Test for a full disk first: it is an outage, though the server answers as if it refused the write.
    if code in _DISK_FULL_CODES or _DISK_FULL in str(error):
        return StoreUnavailableError(
            f"{doing}: the disk of MongoDB at {host} is full", hint="free some disk space"
        )
    if code in _TRANSIENT_CODES:
        return StoreUnavailableError(
            f"{doing}: MongoDB at {host} gave it up: {error}",
            hint="it is overloaded, or elects a primary; --db_wait_seconds sets how long a process retries",
        )
    if _is_transient(error):
        return StoreUnavailableError(
            f"{doing}: MongoDB at {host} did not answer within {timeout:g} s ({type(error).__name__})",
            hint="start it (the embedded server: agentrl mongo up), or check --db_connection_string;"
            " --db_wait_seconds sets how long a process retries",
        )
    refused = validation_error(error)
    if refused is not None:
        return StoreError(f"{doing}: {refused}", hint="is another version of AgentRL writing to this run?")
    return StoreError(f"{doing}: MongoDB at {host} refused: {error}")


def validation_error(error: PyMongoError) -> str | None:
    """Describe the field that a validator refused and what it expects; None for other errors."""
    details: Mapping[str, Any] | None = None
    if isinstance(error, BulkWriteError):
        failures = error.details.get("writeErrors", [])
        details = next((each for each in failures if each.get("code") == _VALIDATION_FAILED), None)
    elif isinstance(error, OperationFailure) and error.code == _VALIDATION_FAILED:
        details = error.details
    if details is None:
        return None
    info = details.get("errInfo", {})
    rules = info.get("details", {}).get("schemaRulesNotSatisfied", [])
    reasons = "; ".join(_describe_rules(rules)) or "it does not match the schema of this collection"
    return f"document {info.get('failingDocumentId')!r} is refused: {reasons}"


def _is_transient(error: PyMongoError) -> bool:
    if isinstance(error, (ExecutionTimeout, ConnectionFailure)):
        return True
    if error.timeout or any(error.has_error_label(label) for label in _TRANSIENT_LABELS):
        return True
    return isinstance(error, ConfigurationError) and _NO_SESSIONS in str(error)


def _describe_rules(rules: Sequence[Mapping[str, Any]], prefix: str = "") -> list[str]:
    """Return one reason per broken rule; ``prefix`` is the path of the enclosing field, with a final dot."""
    reasons: list[str] = []
    for rule in rules:
        reasons += [f"{prefix}{name} is missing" for name in rule.get("missingProperties", ())]
        reasons += [f"{prefix}{name} is not a field of it" for name in rule.get("additionalProperties", ())]
        for field in rule.get("propertiesNotSatisfied", ()):
            nested = _describe_rules(field.get("details", ()), f"{prefix}{field['propertyName']}.")
            reasons += nested or [_describe_field(field, prefix)]
        reasons += _describe_rules(rule.get("details", ()), f"{prefix}{rule.get('itemIndex', '')}.")
    return reasons


def _describe_field(field: Mapping[str, Any], prefix: str) -> str:
    values = [repr(rule["consideredValue"]) for rule in field["details"] if "consideredValue" in rule]
    shown = f" (found {values[0]:.80})" if values else ""
    return f"{prefix}{field['propertyName']}: {field.get('description', 'has another type')}{shown}"


logger = logging.getLogger(__name__)

R = TypeVar("R")

_FIRST_DELAY, _LONGEST_DELAY = 1.0, 5.0
_STOPPING_SECONDS = 2.0
"""How long calls are still retried after the process was asked to stop."""

_REMINDER_SECONDS = 60.0
_KEPT_OUTAGES = 16


@dataclass(frozen=True, slots=True)
class _RetryPolicy:
    seconds: float = 0.0
    stop: asyncio.Event | None = None


_NO_RETRY = _RetryPolicy()
_policy: ContextVar[_RetryPolicy] = ContextVar("agentrl_store_retry_policy", default=_NO_RETRY)


@contextmanager
def retry_outages(seconds: float, stop: asyncio.Event | None = None) -> Iterator[None]:
    """Retry each database call in the block for up to ``seconds`` while the server is unavailable (0: never).

    The policy also applies to tasks that are created in the block. After ``stop`` is set, calls are retried
    for two more seconds. A call may run more than once; each call documents what a repetition does.
    """
    token = _policy.set(_RetryPolicy(seconds, stop))
    try:
        yield
    finally:
        _policy.reset(token)


@contextmanager
def log_store_errors(log: logging.Logger, message: str, *, outages: bool = False) -> Iterator[None]:
    """Log a StoreError of a periodic task as a warning, so that the next round tries again.

    A RunMissingError is raised: the process has nothing left to work on. Without ``outages``, so is a
    StoreUnavailableError: ``retry_outages`` has already retried the call.
    """
    try:
        yield
    except RunMissingError:
        raise
    except StoreError as error:
        if isinstance(error, StoreUnavailableError) and not outages:
            raise
        log.warning(message, extra={"why": error.message})


@dataclass(frozen=True, slots=True)
class PastOutage:
    """An outage of the database that this process has seen; times are ``time.monotonic``."""

    why: str
    began: float
    ended: float


class OutageLog:
    """Logs the start of an outage, a reminder every minute, and its end; never one line per call."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._ended = float("-inf")
        self._why = ""
        self._past: deque[PastOutage] = deque(maxlen=_KEPT_OUTAGES)
        self._next_line = 0.0
        self._announced = False

    def call_failed(self, why: str, retry_seconds: float, called_at: float = math.inf) -> None:
        """Record a call that failed because the server is unavailable.

        A call of ``called_at`` (``time.monotonic``) that fails after an outage is over belongs to it.
        """
        now = time.monotonic()
        if self._began is None and called_at < self._ended:
            return
        if self._began is None:
            self._began, self._why = now, why
        # Keep the pause over several outages: a server that flaps would otherwise log each one.
        if now < self._next_line:
            return
        self._next_line = now + _REMINDER_SECONDS
        if self._announced:
            logger.warning("the database is still unavailable after %.0f s: %s", now - self._began, why)
        else:
            self._announced = True
            logger.warning(
                "the database is unavailable: %s; retrying each call for up to %g s (--db_wait_seconds)",
                why, retry_seconds,
            )  # fmt: skip

    def call_succeeded(self) -> None:
        """Record a call that succeeded."""
        if self._began is None:
            return
        if self._announced:
            logger.warning("the database is back after %.0f s", time.monotonic() - self._began)
        self._ended = time.monotonic()
        self._past.append(PastOutage(self._why, self._began, self._ended))
        self._began, self._announced = None, False

    def take_past(self) -> list[PastOutage]:
        """Return the outages that have ended since the last call."""
        past = list(self._past)
        self._past.clear()
        return past

    @property
    def seconds_since(self) -> float:
        """Return the seconds since the last outage ended; 0 during one, infinite if there was none."""
        return 0.0 if self._began is not None else time.monotonic() - self._ended


async def retry_while_unavailable(
    operation: Callable[[], Awaitable[R]], to_store_error: Callable[[Exception], StoreError], log: OutageLog
) -> R:
    """Call ``operation`` until it succeeds or the time limit of ``retry_outages`` has passed.

    ``to_store_error`` converts an exception to a StoreError, or raises it again. Only a StoreUnavailableError
    is retried. Half of each delay is random, so that processes do not return to a restarted server all at
    once.
    """
    policy = _policy.get()
    deadline = time.monotonic() + policy.seconds
    backoff = Backoff("the database", _FIRST_DELAY, _LONGEST_DELAY, jitter=0.5)
    stopping = False
    while True:
        called_at = time.monotonic()
        try:
            result = await operation()
            raise_if_cancelled()
        except Exception as error:
            raise_if_cancelled()
            failure = to_store_error(error)
            if policy.stop is not None and policy.stop.is_set() and not stopping:
                stopping = True
                deadline = min(deadline, time.monotonic() + _STOPPING_SECONDS)
            left = deadline - time.monotonic()
            if not isinstance(failure, StoreUnavailableError) or left <= 0:
                raise failure from error
        else:
            log.call_succeeded()
            return result
        log.call_failed(failure.message, policy.seconds, called_at)
        delay = min(backoff.next(), left)
        if policy.stop is None or stopping:
            await asyncio.sleep(delay)
        else:
            with suppress(TimeoutError):
                # Wake at the stop: its two seconds begin with the next try, not behind a delay of up to 5.
                await asyncio.wait_for(policy.stop.wait(), delay)


def raise_if_cancelled() -> None:
    """Raise CancelledError if the current task has been cancelled.

    The driver may report a cancelled operation as a network error or as a success. Without this check the
    task would go on, and the task that cancelled it would wait forever.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
