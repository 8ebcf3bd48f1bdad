"""What a step reports of sampling: rewards, abandoned groups, lengths."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fake_store import FakeStore
from model_calls import TASK
from training_data import group

from agentrl.data.stream import Window, step_window, trajectory_means, window_metrics


@pytest.fixture
def store() -> Any:
    return FakeStore()


def summary(mean: float, scored: int, minute: int, task: str = "t") -> dict[str, Any]:
    return {
        "task": task, "mean_score": mean, "pass_rate": mean, "scored": scored,
        "finalized_at": datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minute),
        "trained": scored if 0 < mean < 1 else 0,
    }  # fmt: skip


def finalized(store: FakeStore, task: str, mean: float, scored: int, minute: int) -> None:
    store.summaries.append(summary(mean, scored, minute, task))
    group = {key: value for key, value in store.summaries[-1].items() if key != "task"}
    store.group_tasks[task] = replace(TASK, id=task, task_id=task, group=group)


async def test_a_step_reports_on_all_groups_since_the_last_step_up_to_its_own(store: Any) -> None:
    finalized(store, "a", 1.0, 6, 1)
    finalized(store, "abandoned", 0.0, 2, 2)
    finalized(store, "b", 0.5, 4, 3)
    finalized(store, "later", 0.5, 4, 4)
    first = await step_window(store, "train", ["b"])
    assert first.tasks == ["a", "abandoned", "b"]
    metrics = await window_metrics(store, first, [])
    assert metrics["reward"] == pytest.approx(8 / 12)
    store.counted = {"a": 1}
    second = await step_window(store, "train", ["b"])
    assert second.tasks == ["abandoned", "b"]
    store.counted = dict.fromkeys(("a", "abandoned", "b"), 1)
    third = await step_window(store, "train", ["a"])
    assert third.tasks == ["a"]


async def test_the_length_bias_compares_what_is_trained_with_all_that_was_sampled(store: Any) -> None:
    store.data = {
        item.id: replace(item, trainable_tokens=length, task="a")
        for item, length in zip(group("a", size=3), (10, 20, 90), strict=True)
    }
    finalized(store, "a", 0.5, 3, 1)
    window = await step_window(store, "train", ["a"])
    metrics = await window_metrics(store, window, ["a/0/1", "a/1/1"])
    assert metrics["length_bias"] == pytest.approx(15 / 40)
    assert "length_bias" not in await window_metrics(store, window, [])


async def test_a_step_counts_the_calls_that_were_not_trained(store: Any) -> None:
    masked = [{"because": "top_p 0.9", "calls": 3}, {"because": "temperature 0", "calls": 1}]
    window = Window(groups=[summary(0.5, 2, 1, "a") | {"masked_calls": masked}, summary(0.5, 2, 2, "b")])
    metrics = await window_metrics(store, window, [])
    assert metrics["masked_calls"] == 4


def test_groups_without_a_score_have_no_reward() -> None:
    failed = {"mean_score": None, "pass_rate": None, "scored": 0, "trained": 0}
    assert trajectory_means([failed]) == {}
    means = trajectory_means([failed, summary(0.5, 2, 0)])
    assert (means["reward"], means["pass_rate"]) == (0.5, 0.5)


def test_a_step_reports_what_was_abandoned() -> None:
    agreed, filtered = summary(1.0, 8, 0), {**summary(0.5, 8, 0), "trained": 6}
    means = trajectory_means([agreed, filtered, summary(0.5, 4, 0)])
    assert means["abandoned_fraction"] == pytest.approx(10 / 20)
    assert means["abandoned_groups"] == pytest.approx(1 / 3)
