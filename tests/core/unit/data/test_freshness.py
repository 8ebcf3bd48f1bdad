"""Test the weight of old tokens under each policy, and the order in which groups are trained."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from token_batches import step_loss
from training_data import group

from agentrl.data.forest import forest_from_data
from agentrl.data.stream import Freshness, choose_groups
from agentrl.documents.model_call import SamplingMask, pack_floats, unpack_ids
from agentrl.documents.training import DBRecordData, TrainableSpan
from agentrl.errors import ConfigError
from agentrl.losses.settings import LossSettings
from agentrl.train.step import count_step, token_batch


def trajectory() -> DBRecordData:
    """Ten tokens, seven of them trainable, from the versions 1, 2 and 4."""
    spans = (
        TrainableSpan(start=start, end=end, call=call, version=version, advantage=2.0, temperature=1.0)
        for call, (start, end, version) in enumerate(((2, 4, 1), (4, 7, 2), (8, 10, 4)))
    )
    return replace(
        group("a")[0], min_version=1, max_version=4, trainable_tokens=7, spans=tuple(spans),
        behavior_logprobs=pack_floats([-0.1 * n for n in range(1, 8)]),
    )  # fmt: skip


def ages(step: int) -> dict[int, int]:
    """Of the versions, each of which was published at the step of its number."""
    return {version: max(0, step - version) for version in (1, 2, 4)}


def fresh(policy: Any, max_staleness: int = 2, decay: float | None = 0.5) -> Freshness:
    return Freshness(max_staleness=max_staleness, policy=policy, decay=decay)


@pytest.mark.parametrize("policy", ["drop", "decay", "mask"])
def test_data_without_an_old_token_are_trained_as_they_are(policy: str) -> None:
    for data in (trajectory(), *group("b", version=4)):
        assert fresh(policy).weigh(data, ages(3)) is data


def test_masked_tokens_are_context() -> None:
    masked = fresh("mask").weigh(trajectory(), ages(4))
    assert [(span.start, span.end, span.version) for span in masked.spans] == [(4, 7, 2), (8, 10, 4)]
    forest = forest_from_data([masked])
    assert (forest.tokens, forest.trainable_tokens) == (10, 5)
    assert forest.behavior_logprob.tolist() == pytest.approx([-0.3, -0.4, -0.5, -0.6, -0.7])
    assert count_step([forest]).tokens == 5
    ids = unpack_ids(trajectory().input_ids)[[2, 3, 4, 5, 6, 8, 9]]
    truncated = replace(trajectory(), sampling_mask=SamplingMask.of([[int(id)] for id in ids]).pack())
    mask = forest_from_data([fresh("mask").weigh(truncated, ages(4))]).sampling_mask
    assert mask.ids.tolist() == ids[2:].tolist()
    assert set(forest.version.tolist()) == {2, 4}


def test_decayed_tokens_lose_weight_with_every_step_beyond_the_limit() -> None:
    decayed = fresh("decay").weigh(trajectory(), ages(5))
    expected = [2.0 * math.exp(-0.5 * 2)] * 2 + [2.0 * math.exp(-0.5)] * 3 + [2.0] * 2
    assert forest_from_data([decayed]).advantage.tolist() == pytest.approx(expected)
    assert decayed.behavior_logprobs == trajectory().behavior_logprobs


def test_the_age_counts_and_not_the_number_of_the_version() -> None:
    """Version 4 was published at step 1, after a resume."""
    masked = fresh("mask").weigh(trajectory(), {1: 1, 2: 0, 4: 3})
    assert [span.version for span in masked.spans] == [1, 2]
    decayed = fresh("decay").weigh(trajectory(), {1: 1, 2: 0, 4: 4})
    assert [span.advantage for span in decayed.spans] == [2.0, 2.0, 2.0 * math.exp(-0.5 * 2)]


@pytest.mark.parametrize(("policy", "spans"), [("drop", "any"), ("mask", "all"), ("decay", None)])
def test_what_makes_data_stale(policy: str, spans: str | None) -> None:
    assert fresh(policy).stale_spans == spans


def test_a_decay_needs_its_rate() -> None:
    with pytest.raises(ConfigError, match="decay needs the rate"):
        fresh("decay", decay=None)
    assert fresh("drop", decay=None).policy == "drop"


def test_a_loss_is_linear_in_the_weight_of_a_decayed_token() -> None:
    old = group("b", version=1)[0]
    whole, decayed = loss_of(old), loss_of(fresh("decay").weigh(old, ages(5)))
    assert decayed == pytest.approx(whole * math.exp(-0.5 * 2))


def loss_of(item: DBRecordData) -> float:
    forest = forest_from_data([item], ages=ages(5))
    settings = LossSettings(importance_weight_cap_ratio=math.inf)
    logprobs = torch.linspace(-0.9, -0.2, forest.trainable_tokens, requires_grad=True)
    return step_loss(token_batch(forest, logprobs, settings), settings)[0].item()


def test_groups_are_trained_in_the_order_they_were_begun() -> None:
    finished_last = group("long")
    members = [*group("b"), *group("c"), *finished_last]
    places = {"long": (0, 0), "b": (0, 1), "c": (0, 2)}
    assert list(choose_groups(members, 2, places)) == ["long", "b"]


def test_groups_that_have_been_trained_come_behind_those_that_have_not() -> None:
    members = [*(replace(item, trained_count=1) for item in group("a")), *group("b")]
    assert list(choose_groups(members, 2, {"a": (0, 0), "b": (0, 1)})) == ["b", "a"]


def test_an_epoch_is_trained_before_the_next() -> None:
    members = [*group("next"), *group("last")]
    assert list(choose_groups(members, 1, {"next": (1, 0), "last": (0, 7)})) == ["last"]


def test_a_choice_among_the_same_data_is_always_the_same() -> None:
    members = [*group("a", size=3), *group("b", size=3)]
    places = {"a": (0, 0), "b": (0, 1)}
    chosen = choose_groups(members, 2, places)
    again = choose_groups(members[::-1], 2, places)
    assert list(again.items()) == list(chosen.items())
