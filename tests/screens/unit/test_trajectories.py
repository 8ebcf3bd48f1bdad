"""The filter of trajectories: what it refuses and which MongoDB query it becomes."""

from __future__ import annotations

import base64

import pytest

from agentrl.documents.status import RecordStatus
from agentrl.errors import ConfigError
from agentrl.screens.views.read import Bounds, TrajectoryFilter, TrajectoryOrder, _decode


def test_a_filter_becomes_a_query() -> None:
    wanted = TrajectoryFilter(
        status=RecordStatus.READY, score=Bounds(0.5), tokens=Bounds(None, 10), turns=Bounds(1, 2),
        split="train", failure="tool", version=3, text="a(b", step=7,
    )  # fmt: skip
    assert wanted.query == {
        "status": "ready", "trained_count": 0, "score": {"$gte": 0.5}, "generated_tokens": {"$lte": 10},
        "turns": {"$gte": 1, "$lte": 2}, "split": "train", "failure.kind": "tool",
        "min_version": {"$lte": 3}, "max_version": {"$gte": 3},
    }  # fmt: skip
    failed = TrajectoryFilter(failure="engine").query
    assert failed == {"status": "failed", "failure.kind": "engine"}, "an index begins with the status"
    assert TrajectoryFilter(failure="engine", status=RecordStatus.READY).query["status"] == "ready"
    assert TrajectoryFilter().query == {}


@pytest.mark.parametrize("bounds", [(2.0, 1.0), (float("nan"), None), (None, float("inf"))])
def test_a_range_without_numbers_is_refused(bounds: tuple[float | None, float | None]) -> None:
    with pytest.raises(ConfigError, match=r"range from 2 to 1|a bound is"):
        Bounds(*bounds)


@pytest.mark.parametrize("text", ["", "x" * 201, "a\x00b"])
def test_a_text_that_cannot_be_searched_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="text to search"):
        TrajectoryFilter(text=text)


@pytest.mark.parametrize(
    "content", ["[" * 30_000, '["highest_score", 1, "\\ud800"]', f'["highest_score", {"9" * 311}, "id"]', "7"]
)
def test_a_cursor_that_no_page_gave_is_refused(content: str) -> None:
    with pytest.raises(ConfigError, match="which no page of this order gave"):
        _decode(base64.urlsafe_b64encode(content.encode()).decode(), TrajectoryOrder("highest_score"))
