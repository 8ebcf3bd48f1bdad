"""Test batch whitening of advantages against the formulas, and its place in a step."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_store import FakeStore
from model_calls import record
from training_data import group

from agentrl.config.schema import GroupConfig
from agentrl.data.forest import forest_from_data
from agentrl.data.stream import DataStream, Freshness, StepData, StreamSettings, whiten
from agentrl.documents.model_call import pack_floats, pack_ids
from agentrl.documents.training import DBRecordData, Node
from agentrl.scoring.groups import decide_group
from agentrl.train.step import split_updates

LENGTHS = (3, 1, 5, 2, 4, 7)
"""Trainable tokens of six trajectories, in two groups."""
SCORES = (1.0, 0.0, 1.0, 0.0, 0.0, 0.0)


def trajectory(name: str, place: int, tokens: int, advantage: float, version: int = 0) -> DBRecordData:
    """Two context tokens and ``tokens`` trainable ones, all with one advantage."""
    record = f"{name}/{place}/1"
    first = group(name)[0]
    return replace(
        first, id=record, record=record, advantage=advantage, tokens=tokens + 2, trainable_tokens=tokens,
        nodes=(Node(start=0, end=tokens + 2),), min_version=version, max_version=version,
        spans=(replace(first.spans[0], start=2, end=tokens + 2, advantage=advantage, version=version),),
        input_ids=pack_ids(list(range(tokens + 2))), behavior_logprobs=pack_floats([-1.0] * tokens),
    )  # fmt: skip


def step(advantages: Sequence[float] = SCORES) -> list[DBRecordData]:
    return [
        trajectory("ab"[place // 3], place, tokens, advantage)
        for place, (tokens, advantage) in enumerate(zip(LENGTHS, advantages, strict=True))
    ]


def per_token(data: Sequence[DBRecordData]) -> np.ndarray:
    """float64[N], the advantage of every trainable token, in the order of ``data``."""
    spans = [span for item in data for span in item.spans]
    return np.repeat([span.advantage for span in spans], [span.end - span.start for span in spans])


def group_advantages(estimator: str) -> list[float]:
    """What samplers give the trajectories of ``SCORES`` in their two groups."""
    config = GroupConfig(advantage=estimator, min_score_spread=0.0)  # type: ignore[arg-type]
    records = [record(place, score) for place, score in enumerate(SCORES)]
    decided = [d for part in (records[:3], records[3:]) for d in decide_group(part, config, random.Random(0))]
    return [d.advantage for d in decided if d.advantage is not None]


@pytest.mark.parametrize("estimator", ["reward", "dr_grpo"])
def test_advantages_are_whitened_over_the_steps_tokens(estimator: str) -> None:
    """``reward``: REINFORCE++; ``dr_grpo``: REINFORCE++-baseline."""
    advantages = group_advantages(estimator)
    raw = per_token(step(advantages))
    found = per_token(whiten(step(advantages)))
    assert found == pytest.approx((raw - raw.mean()) / raw.std())
    assert found.mean() == pytest.approx(0.0, abs=1e-12)
    assert found.std() == pytest.approx(1.0)
    openrlhf = (raw - raw.mean()) / math.sqrt(max(((raw - raw.mean()) ** 2).sum() / raw.size, 1e-8))
    assert found == pytest.approx(openrlhf)
    verl = (raw - raw.mean()) / math.sqrt(raw.var(ddof=1) + 1e-8)  # the sample's variance
    assert found == pytest.approx(verl * math.sqrt(raw.size / (raw.size - 1)))


def test_long_trajectories_count_with_their_tokens() -> None:
    data = whiten([trajectory("a", 0, 9, 1.0), trajectory("a", 1, 1, 0.0)])
    assert [item.spans[0].advantage for item in data] == pytest.approx([1 / 3, -3.0])


def test_a_faulty_call_gets_no_positive_advantage_and_changes_no_other() -> None:
    """Scores 1, 1, 0, 0 under ``dr_grpo``; a malformed call in the first, and one in the last trajectory."""
    rows = ((2, 0.5), (2, 0.5), (8, -0.5), (8, -0.5))
    data = [trajectory("a", place, tokens, value) for place, (tokens, value) in enumerate(rows)]
    clean = [item.spans[0].advantage for item in whiten(data)]
    capped = replace(data[0], faulty_calls=(0,), spans=(replace(data[0].spans[0], advantage=0.0),))
    found = whiten([capped, *data[1:3], replace(data[3], faulty_calls=(0,))])
    assert [item.spans[0].advantage for item in found] == [0.0, *clean[1:]]


def test_only_spans_change_and_the_forest_holds_the_new_advantages() -> None:
    before, after = step(), whiten(step())
    assert [replace(item, spans=()) for item in after] == [
        replace(item, spans=(), created_at=same.created_at) for item, same in zip(before, after, strict=True)
    ]
    assert forest_from_data(after).advantage == pytest.approx(per_token(after).astype(np.float32))


@pytest.mark.parametrize("value", [0.0, 0.1, -1e6])
def test_equal_advantages_whiten_to_zero(value: float) -> None:
    assert per_token(whiten(step([value] * 6))).tolist() == [0.0] * sum(LENGTHS)
    rounded = [value * (1 + 1e-15 * (place % 2)) for place in range(6)]
    assert per_token(whiten(step(rounded))).tolist() == [0.0] * sum(LENGTHS)


def test_a_step_without_a_token_stays_as_it_is() -> None:
    empty = [replace(item, spans=()) for item in step()]
    assert whiten(empty) == tuple(empty)
    assert whiten([]) == ()


def test_the_order_of_the_data_changes_no_value() -> None:
    generator = random.Random(3)
    data = [trajectory("a", place, 1 + place % 7, generator.gauss(0, 3)) for place in range(40)]
    values = {item.id: item.spans[0].advantage for item in whiten(data)}
    generator.shuffle(data)
    assert {item.id: item.spans[0].advantage for item in whiten(data)} == values


async def take(data: Sequence[DBRecordData], replay: Any = None, step: int = 1, **freshness: Any) -> StepData:
    """A step that whitens the advantages of ``data``."""
    store: Any = FakeStore()
    store.publish({version: version for version in range(6)})
    store.add(*data)
    settings = StreamSettings(
        groups_per_step=2, num_epochs=1, freshness=Freshness(**{"max_staleness": 2, **freshness}),
        whitening="batch", wait_seconds=30.0,
    )  # fmt: skip
    found = await DataStream(store, settings, replay).take(step)
    assert found is not None
    return found


async def test_a_step_is_whitened_once_over_all_of_its_groups() -> None:
    batch = await take(step())
    assert batch.data == whiten(
        [replace(i, created_at=b.created_at) for i, b in zip(step(), batch.data, strict=True)]
    )
    parts = split_updates(batch.data, 2)
    assert len(parts) == 2
    assert sorted(np.concatenate([per_token(part) for part in parts])) == sorted(per_token(batch.data))
    assert all(abs(per_token(part).mean()) > 0.1 for part in parts)


async def test_a_replayed_step_has_the_same_advantages() -> None:
    first = await take(step())
    others = [trajectory("0", place, 3, 5.0) for place in range(3)]
    again = await take([*others, *step()], {1: tuple(item.id for item in first.data)})
    assert per_token(again.data).tolist() == per_token(first.data).tolist()


def of_two_versions() -> list[DBRecordData]:
    old = replace(trajectory("a", 0, 4, 1.0), max_version=5)
    first = replace(old.spans[0], end=4)
    spans = (first, replace(first, start=4, end=6, version=5))
    return [replace(old, spans=spans), *(trajectory("b", place, 2, 0.0, 5) for place in range(2))]


async def test_masked_tokens_are_in_no_mean() -> None:
    batch = await take(of_two_versions(), step=6, policy="mask")
    assert per_token(batch.data) == pytest.approx([2**0.5] * 2 + [-(0.5**0.5)] * 4)


async def test_decay_comes_after_whitening() -> None:
    batch = await take(of_two_versions(), step=6, policy="decay", decay=0.5)
    decayed = math.exp(-0.5 * 3)
    assert per_token(batch.data) == pytest.approx([decayed, decayed, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
