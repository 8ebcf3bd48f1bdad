"""What a step reports: speed, tokens saved by merging prefixes, joined updates, rewards of sampling."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from fake_store import FakeStore
from tiny_models import packed, tiny_model, trajectory, tree
from training_data import group

from agentrl.data.forest_cuts import merge_prefixes
from agentrl.documents.task import Task
from agentrl.model.flops import DevicePeak, ModelShape, attention_pairs
from agentrl.train.metrics import (
    Window,
    call_tokens,
    join_metrics,
    merging_metrics,
    speed_metrics,
    step_window,
    trajectory_means,
    window_metrics,
)

if TYPE_CHECKING:
    from agentrl.store.client import Store

SECONDS = {"forward": 1.0, "backward": 2.0, "optimizer": 1.0}


def test_calls_as_rows_of_their_own() -> None:
    rng = np.random.default_rng(0)
    chain = trajectory(rng, [(0, 20, -1)], [(4, 8), (11, 20)])
    assert call_tokens([chain]) == 8 + 20
    assert call_tokens([tree()]) == 6 + (10 + 5) + (10 + 4) + (6 + 7)
    two_versions = replace(chain, spans=tuple(replace(span, call=0) for span in chain.spans))
    assert call_tokens([two_versions]) == 20


def test_a_step() -> None:
    data = [tree(0), tree(0)]
    shared = merge_prefixes(packed(data))
    shape = ModelShape.of(tiny_model("llama").config)
    metrics = speed_metrics([shared], SECONDS, shape, DevicePeak(1e9), positions=2 * shared.tokens)
    assert metrics["tokens_per_second"] == pytest.approx(shared.tokens / 4)
    assert metrics["padding_efficiency"] == 0.5
    flops = shape.step_flops(shared.tokens, shared.trainable_tokens, attention_pairs(shared))
    assert metrics["mfu"] == pytest.approx(flops / 4 / 1e9)
    halved = speed_metrics([shared], SECONDS, shape, DevicePeak(1e9), ranks=2)
    assert halved["mfu"] == pytest.approx(metrics["mfu"] / 2)
    assert "mfu" not in speed_metrics([shared], SECONDS, shape, DevicePeak(None))
    assert metrics["seconds_forward_backward"] == 3.0
    saved = merging_metrics(metrics | {"tokens": shared.tokens}, call_tokens(data))
    assert saved["unique_tokens"] == shared.tokens < 52
    assert saved["total_tokens"] == 96
    assert saved["sharing_ratio"] == pytest.approx(96 / shared.tokens)
    assert saved["total_tokens_per_second"] == pytest.approx(24)


def test_metrics_of_updates_are_joined() -> None:
    one = {
        "loss": 1.0, "tokens": 10, "trainable_tokens": 4, "trajectories": 2, "ratio_max": 1.5, "lr": 0.1,
        "seconds_optimizer": 1.0, "staleness_histogram": {"0": 4.0}, "version_fractions": {"3": 1.0},
    }  # fmt: skip
    two = {
        **one, "loss": 4.0, "trainable_tokens": 8, "ratio_max": 1.2,
        "staleness_histogram": {"0": 2.0, "1": 6.0}, "version_fractions": {"2": 0.5, "3": 0.5},
    }  # fmt: skip
    joined = join_metrics([one, two, one, two], 2)
    assert joined["loss"] == pytest.approx(3.0)
    assert (joined["tokens"], joined["trainable_tokens"], joined["trajectories"]) == (20, 12, 4)
    assert (joined["ratio_max"], joined["seconds_optimizer"], joined["lr"]) == (1.5, 4.0, pytest.approx(0.1))
    assert joined["staleness_histogram"] == {"0": 6.0, "1": 6.0}
    assert joined["version_fractions"] == pytest.approx({"2": 1 / 3, "3": 2 / 3})


def moment(minute: int) -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minute)


def summary(mean: float, scored: int, minute: int, task: str = "t") -> dict[str, Any]:
    return {
        "task": task, "mean_score": mean, "pass_rate": mean, "scored": scored, "finalized_at": moment(minute),
        "trained": scored if 0 < mean < 1 else 0,
    }  # fmt: skip


def finalized(store: FakeStore, task: str, mean: float, scored: int, minute: int) -> None:
    store.summaries.append(summary(mean, scored, minute, task))
    group = {key: value for key, value in store.summaries[-1].items() if key != "task"}
    store.group_tasks[task] = Task(
        id=task, task_id=task, split="train", epoch=0, order=0, query="q", group=group
    )  # fmt: skip


async def test_a_step_reports_on_all_groups_since_the_last_step_up_to_its_own(store: FakeStore) -> None:
    finalized(store, "a", 1.0, 6, 1)
    finalized(store, "abandoned", 0.0, 2, 2)
    finalized(store, "b", 0.5, 4, 3)
    finalized(store, "later", 0.5, 4, 4)
    first = await step_window(cast("Store", store), "train", ["b"])
    assert first.tasks == ["a", "abandoned", "b"]
    metrics = await window_metrics(cast("Store", store), first, [])
    assert metrics["reward"] == pytest.approx(8 / 12)
    store.counted = {"a": 1}
    second = await step_window(cast("Store", store), "train", ["b"])
    assert second.tasks == ["abandoned", "b"]
    store.counted = dict.fromkeys(("a", "abandoned", "b"), 1)
    third = await step_window(cast("Store", store), "train", ["a"])
    assert third.tasks == ["a"]


async def test_the_length_bias_compares_what_is_trained_with_all_that_was_sampled(store: FakeStore) -> None:
    store.data = {
        item.id: replace(item, trainable_tokens=length, task="a")
        for item, length in zip(group("a", size=3), (10, 20, 90), strict=True)
    }
    finalized(store, "a", 0.5, 3, 1)
    window = await step_window(cast("Store", store), "train", ["a"])
    metrics = await window_metrics(cast("Store", store), window, ["a/0/1", "a/1/1"])
    assert metrics["length_bias"] == pytest.approx(15 / 40)
    assert "length_bias" not in await window_metrics(cast("Store", store), window, [])


async def test_a_step_counts_the_calls_that_were_not_trained(store: FakeStore) -> None:
    masked = [{"because": "top_p 0.9", "calls": 3}, {"because": "temperature 0", "calls": 1}]
    window = Window(groups=[summary(0.5, 2, 1, "a") | {"masked_calls": masked}, summary(0.5, 2, 2, "b")])
    metrics = await window_metrics(cast("Store", store), window, [])
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
