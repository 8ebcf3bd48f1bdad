"""The pieces that the pipelines of views are made of."""

from __future__ import annotations

from typing import Any

from agentrl.documents.status import STEPPED, VersionStatus, values
from agentrl.store.connection import Json
from agentrl.store.names import STEP, VERSION


def as_is(*fields: str) -> Json:
    """Fields that a $project passes on; a filter on them goes straight to the collection."""
    return dict.fromkeys(fields, 1)


def seconds(start: str, end: str) -> Json:
    """The time from ``start`` to ``end``, null while one of them is."""
    return {"$divide": [{"$subtract": [end, start]}, 1000]}


def ratio(part: Any, whole: Any) -> Json:
    """``part / whole``, null where there is no whole."""
    return {"$cond": [{"$gt": [whole, 0]}, {"$divide": [part, whole]}, None]}


def join(collection: str, local: str, foreign: str, name: str, *pipeline: Json) -> Json:
    """A $lookup by equality; ``pipeline`` trims what it brings."""
    lookup = {"from": collection, "localField": local, "foreignField": foreign, "as": name}
    return {"$lookup": {**lookup, "pipeline": list(pipeline)}}


def first(*names: str) -> Json:
    """What a join found, not in a list."""
    return {"$set": {name: {"$first": f"${name}"} for name in names}}


def oldest_step(*versions: str) -> list[Json]:
    """Stages that set ``oldest_step``: the lowest step at which one of the ``versions`` was published.

    Ages count from it: the numbers of versions jump where a trainer resumes.
    """
    named = [{"$cond": [{"$isArray": field}, field, [field]]} for field in versions]
    return [
        {"$set": {"sampled_by": {"$concatArrays": named}}},
        join(VERSION, "sampled_by", "_id", "published", {"$project": as_is("step")}),
        {"$set": {"oldest_step": {"$min": "$published.step"}}},
    ]


def age(trained: Json | str) -> Json:
    """Optimizer steps from ``oldest_step`` to weights of ``trained`` steps; null where one is unknown."""
    known = {"$and": [{"$isNumber": trained}, {"$isNumber": "$oldest_step"}]}
    return {"$cond": [known, {"$max": [0, {"$subtract": [trained, "$oldest_step"]}]}, None]}


NEWEST_FIRST: Json = {"$sort": {"created_at": -1}}
"""The order of an index: a page of a view of Records costs what its rows cost. Filters go before it."""

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
"""The same for every document, so that the server asks for it once."""

LAST_STEP: Json = {
    "$lookup": {
        "from": STEP,
        "pipeline": [
            {"$match": {"status": {"$in": values(STEPPED)}}},
            {"$sort": {"step": -1}},
            {"$limit": 1},
            {"$project": {"step": 1}},
        ],
        "as": "last_step",
    }
}
"""The last step that counts, also the same for every document."""
