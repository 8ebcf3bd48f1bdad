"""Filters select the documents that their Python counterparts do, in a MongoDB that is made up in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import mongomock
import pytest

from agentrl.store.claims import GroupLimit, Needs
from agentrl.store.steps import Spans, StaleVersions

VERSIONS = range(6)


def found(documents: Sequence[Mapping[str, Any]], query: Mapping[str, Any]) -> list[Any]:
    """Return the ids of the documents that ``query`` selects."""
    collection = mongomock.MongoClient().db.documents
    collection.insert_many([dict(document) for document in documents])
    return [document["_id"] for document in collection.find(dict(query)).sort("_id")]


@pytest.mark.parametrize("spans", ["any", "all"])
@pytest.mark.parametrize("ranges", [((0, 2),), ((0, 1), (4, 4)), ((2, 3),), ((0, 0), (2, 2), (4, 5))])
def test_data_are_stale_if_any_or_all_of_their_versions_are(
    spans: Spans, ranges: tuple[tuple[int, int], ...]
) -> None:
    """After a resume, versions of reverted steps are stale although higher ones are not."""
    documents = [
        {"_id": number, "min_version": min(pair), "max_version": max(pair),
         "spans": [{"version": version} for version in pair]}
        for number, pair in enumerate(product(VERSIONS, VERSIONS))
    ]  # fmt: skip
    decide = any if spans == "any" else all
    stale = [
        document["_id"]
        for document in documents
        if decide(any(low <= span["version"] <= high for low, high in ranges) for span in document["spans"])  # type: ignore[attr-defined]
    ]
    assert found(documents, StaleVersions(ranges, spans).query) == stale


def test_tasks_that_need_what_is_down_are_left_out() -> None:
    tasks = [
        {"_id": "none", "tools": [], "scorer": "exact"},
        {"_id": "any", "tools": None, "scorer": "exact"},
        {"_id": "search", "tools": ["search"], "scorer": "exact"},
        {"_id": "both", "tools": ["search", "files"], "scorer": "judge"},
        {"_id": "files", "tools": ["files"], "scorer": "judge"},
    ]
    assert found(tasks, Needs().excluded) == ["any", "both", "files", "none", "search"]
    assert found(tasks, Needs(servers=frozenset({"search"})).excluded) == ["files", "none"]
    assert found(tasks, Needs(scorers=frozenset({"judge"})).excluded) == ["any", "none", "search"]
    assert found(tasks, Needs(known=frozenset({"search"})).excluded) == ["any", "none", "search"]


def test_tasks_of_an_environment_that_is_down_or_full_are_left_out() -> None:
    tasks: list[dict[str, object]] = [
        {"_id": "none", "environment": None, "meta": {}},
        {"_id": "game", "environment": "game", "meta": {}},
        {"_id": "a", "environment": "openenv", "meta": {"server": "http://a"}},
        {"_id": "b", "environment": "openenv", "meta": {"server": "http://b"}},
    ]
    assert found(tasks, Needs(environments=frozenset({"http://a"})).excluded) == ["b", "game", "none"]
    assert found(tasks, Needs(environments=frozenset({"game", "http://b"})).excluded) == ["a", "none"]


@pytest.mark.parametrize("limit", [GroupLimit(2), GroupLimit(2, after_step=3), GroupLimit(0)])
def test_a_limit_of_groups_allows_what_its_query_does(limit: GroupLimit) -> None:
    tasks = [
        {"_id": f"{rank}/{step}", "admission": {"rank": rank, "after_step": step}}
        for rank, step in product(range(1, 5), range(5))
    ]
    allowed = [task["_id"] for task in tasks if limit.allows(task["admission"])]  # type: ignore[arg-type]
    assert found(tasks, limit.query) == sorted(allowed)
