"""Aggregation stages and expressions that several views share."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from agentrl.documents.base import Root
from agentrl.documents.status import APPLIED_STEPS, VersionStatus, values
from agentrl.store.mechanics.connection import Json
from agentrl.store.names import STEP, VERSION


def as_is(*names: str) -> Json:
    """Return a $project of fields to pass on unchanged; a filter on them can use an index."""
    return dict.fromkeys(names, 1)


def row_of(row: type[Root], **computed: Any) -> Json:
    """Return the $project of the fields of ``row``: the ``computed`` ones, and the others as they are."""
    names = [field.name for field in fields(row) if field.name != "id"]  # type: ignore[arg-type]
    return {"$project": {name: computed.get(name, 1) for name in names}}


def fields_of(part: str, *names: str) -> Json:
    """Return a $project of fields of ``part``, each under its own name."""
    return {name: f"${part}.{name}" for name in names}


def seconds(start: str, end: str) -> Json:
    """Return the expression of the seconds from ``start`` to ``end``; null if one of them is null."""
    return {"$divide": [{"$subtract": [end, start]}, 1000]}


def ratio(part: Any, whole: Any) -> Json:
    """Return the expression of ``part / whole``; null if ``whole`` is not above 0."""
    return {"$cond": [{"$gt": [whole, 0]}, {"$divide": [part, whole]}, None]}


def join(collection: str, local: str, foreign: str, name: str, *pipeline: Json) -> Json:
    """Return a $lookup by equality; ``pipeline`` runs on the documents that it finds."""
    lookup = {"from": collection, "localField": local, "foreignField": foreign, "as": name}
    return {"$lookup": {**lookup, "pipeline": list(pipeline)}}


def first(*names: str) -> Json:
    """Return a $set that replaces each joined list by its first element."""
    return {"$set": {name: {"$first": f"${name}"} for name in names}}


def oldest_step(*versions: str) -> list[Json]:
    """Return stages that set ``oldest_step``: the lowest step at which one of ``versions`` was published.

    Ages are counted in steps, since the numbers of versions jump where a trainer resumes.
    """
    named = [{"$cond": [{"$isArray": field}, field, [field]]} for field in versions]
    return [
        {"$set": {"sampled_by": {"$concatArrays": named}}},
        join(VERSION, "sampled_by", "_id", "published", {"$project": as_is("step")}),
        {"$set": {"oldest_step": {"$min": "$published.step"}}},
    ]


def excerpt(name: str, characters: int, otherwise: Any = None) -> Json:
    """Return the expression of the beginning of a text field; ``otherwise`` if it is not text."""
    is_text = {"$eq": [{"$type": f"${name}"}, "string"]}
    return {"$cond": [is_text, {"$substrCP": [f"${name}", 0, characters]}, otherwise]}


def age(trained: Json | str) -> Json:
    """Return the expression of the optimizer steps from ``oldest_step`` to ``trained``; null if unknown."""
    known = {"$and": [{"$isNumber": trained}, {"$isNumber": "$oldest_step"}]}
    return {"$cond": [known, {"$max": [0, {"$subtract": [trained, "$oldest_step"]}]}, None]}


NEWEST_FIRST: Json = {"$sort": {"created_at": -1}}
"""Sorts in the order of an index, so that a page costs no more than its rows. Filters go before it."""

NEWEST_VERSION: Json = {
    "$lookup": {
        "from": VERSION,
        "pipeline": [
            {"$match": {"status": VersionStatus.PUBLISHED.value}},
            {"$sort": {"_id": -1}},
            {"$limit": 1},
            {"$project": {"_id": 1}},
        ],
        "as": "newest",
    }
}
"""Independent of the document, so that the server runs it once."""

LAST_STEP: Json = {
    "$lookup": {
        "from": STEP,
        "pipeline": [
            {"$match": {"status": {"$in": values(APPLIED_STEPS)}}},
            {"$sort": {"step": -1}},
            {"$limit": 1},
            {"$project": {"step": 1}},
        ],
        "as": "last_step",
    }
}
"""The last committed or committing step; also independent of the document."""
