"""Convert the driver's errors to StoreErrors that name what is wrong, and tell an outage from a refusal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bson.errors import BSONError
from pymongo.errors import (
    BulkWriteError,
    ConfigurationError,
    ConnectionFailure,
    ExecutionTimeout,
    OperationFailure,
    PyMongoError,
)  # fmt: skip

from agentrl.errors import StoreDeniedError, StoreError, StoreUnavailableError

ENCODING_ERRORS = (BSONError, OverflowError, UnicodeEncodeError, RecursionError)
"""What the BSON encoder raises for a value that no document can hold."""

_AUTHENTICATION_CODES = (13, 18)
_DISK_FULL_CODES = (14031, 17)
_DISK_FULL = "No space left on device"
"""The text of the operating system's error, which the storage engine passes on under other codes."""
_KEY_NOT_FOUND = 211
"""A newly elected primary cannot yet verify timestamps that the previous primary signed."""
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
    if code in _DISK_FULL_CODES or _DISK_FULL in str(error):
        return StoreUnavailableError(
            f"{doing}: the disk of MongoDB at {host} is full", hint="free some disk space"
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
    if isinstance(error, OperationFailure):
        return error.code == _KEY_NOT_FOUND
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
