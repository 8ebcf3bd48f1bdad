"""What a validator refused, in words: the document, the field, and what the field should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pymongo.errors import BulkWriteError, OperationFailure, PyMongoError

_REFUSED = 121


def refusal(error: PyMongoError) -> str | None:
    """Which field of which document a validator refused, and what it should be; None for other errors."""
    details: Mapping[str, Any] | None = None
    if isinstance(error, BulkWriteError):
        failures = error.details.get("writeErrors", [])
        details = next((failure for failure in failures if failure.get("code") == _REFUSED), None)
    elif isinstance(error, OperationFailure) and error.code == _REFUSED:
        details = error.details
    if details is None:
        return None
    info = details.get("errInfo", {})
    rules = info.get("details", {}).get("schemaRulesNotSatisfied", [])
    reasons = "; ".join(_reasons(rules)) or "it does not have the shape of this collection"
    return f"document {info.get('failingDocumentId')!r} is refused: {reasons}"


def _reasons(rules: Sequence[Mapping[str, Any]], within: str = "") -> list[str]:
    found: list[str] = []
    for rule in rules:
        found += [f"{within}{name} is missing" for name in rule.get("missingProperties", ())]
        found += [f"{within}{name} is no field of it" for name in rule.get("additionalProperties", ())]
        for field in rule.get("propertiesNotSatisfied", ()):
            inner = _reasons(field.get("details", ()), f"{within}{field['propertyName']}.")
            found += inner or [_reason(field, within)]
        inner = _reasons(rule.get("details", ()), f"{within}{rule.get('itemIndex', '')}.")
        found += inner
    return found


def _reason(field: Mapping[str, Any], within: str) -> str:
    values = [repr(rule["consideredValue"]) for rule in field["details"] if "consideredValue" in rule]
    shown = f" (found {values[0]:.80})" if values else ""
    return f"{within}{field['propertyName']}: {field.get('description', 'has another type')}{shown}"
