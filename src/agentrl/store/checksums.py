"""Checksums of what people audit, written together with it; ``agentrl db check`` names a later change.

They detect a change of a document, not a writer who computes the checksum anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import bson

from agentrl.documents.task import CONTENT
from agentrl.store.connection import Json
from agentrl.store.names import MODEL_CALL, RECORD, STEP, TASK

CHECKSUMS: Final = "checksums"
"""Field of a document: {part: SHA-256}."""

PARTS: Final[Mapping[str, Mapping[str, tuple[str, ...] | None]]] = {
    TASK: {"content": CONTENT},
    RECORD: {
        "sampled": ("query", "answer", "final_answer", "stop_reason", "tool_rewards", "agent_score"),
        "score": ("score", "score_details"),
    },
    MODEL_CALL: {"all": None},
    STEP: {"metrics": ("metrics",)},
}
"""Collection → part → its fields; None: every field of the document."""


def checksum(collection: str, part: str, document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a part of a document, over its fields as BSON."""
    fields = PARTS[collection][part]
    names = [name for name in document if name != CHECKSUMS] if fields is None else fields
    content = {name: document[name] for name in names if name in document}
    return hashlib.sha256(bson.encode(content)).hexdigest()


def sealed(collection: str, document: Json, *parts: str) -> Json:
    """Return the document with the checksums of ``parts``."""
    return {**document, CHECKSUMS: {part: checksum(collection, part, document) for part in parts}}


def seal(collection: str, part: str, fields: Mapping[str, Any]) -> Json:
    """Return the fields of an update that store the checksum of a part, whose new values are ``fields``."""
    return {f"{CHECKSUMS}.{part}": checksum(collection, part, fields)}


def changed_parts(collection: str, document: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (part, stored checksum, checksum now) of each part that has changed since it was written."""
    for part, stored in document.get(CHECKSUMS, {}).items():
        now = checksum(collection, part, document) if part in PARTS[collection] else "no such part"
        if now != stored:
            yield part, str(stored), now
