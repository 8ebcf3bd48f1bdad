"""GAE over tokens and turns: the textbook's recursion, context between calls, branches, rewards of turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from tiny_models import chains, trajectory, tree

from agentrl.data.gae import Estimate, estimate
from agentrl.documents.training import DBRecordData

PAIRS = [(1.0, 1.0), (0.97, 0.9), (1.0, 0.0), (0.0, 1.0)]


def textbook(
    rewards: list[float], values: list[float], gamma: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    """Schulman et al., backwards: δ_t = r_t + γ·V_(t+1) − V_t and A_t = δ_t + γλ·A_(t+1)."""
    advantages, after, last = [0.0] * len(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        last = rewards[t] + gamma * after - values[t] + gamma * gae_lambda * last
        advantages[t], after = last, values[t]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def values_of(item: DBRecordData) -> np.ndarray:
    return np.random.default_rng(1).normal(size=item.trainable_tokens)


def estimated(
    item: DBRecordData, gamma: float = 1.0, decay: float = 1.0, over: Literal["tokens", "turns"] = "tokens"
) -> Estimate:
    return estimate(item, values_of(item), gamma=gamma, gae_lambda=decay, over=over)


def scored(item: DBRecordData, score: float, *turns: float) -> DBRecordData:
    return replace(item, advantage=score, turn_advantages=turns)


@pytest.mark.parametrize(("gamma", "gae_lambda"), PAIRS)
def test_a_chain_is_the_textbook_and_context_takes_no_time(gamma: float, gae_lambda: float) -> None:
    """Two calls with an observation between them are one episode of their trained tokens alone."""
    for item in chains():
        found = estimated(scored(item, 2.0), gamma, gae_lambda)
        count = item.trainable_tokens
        expected = textbook([0.0] * (count - 1) + [2.0], values_of(item).tolist(), gamma, gae_lambda)
        np.testing.assert_allclose((found.advantage, found.target), expected, atol=1e-12)


def test_a_long_episode_is_summed_as_exactly_as_a_short_one() -> None:
    item = trajectory(np.random.default_rng(0), [(0, 5001, -1)], [(1, 5001)])
    found = estimated(scored(item, 1.0), 0.999, 0.99)
    expected = textbook([0.0] * 4999 + [1.0], values_of(item).tolist(), 0.999, 0.99)
    np.testing.assert_allclose(found.advantage, expected[0], atol=1e-10)


@pytest.mark.parametrize(("gamma", "gae_lambda"), PAIRS)
def test_the_calls_of_branches_follow_one_another_in_time(gamma: float, gae_lambda: float) -> None:
    """Each token has one successor, however the tree branches; spans may lie in another order than calls."""
    item = scored(tree(), 1.0, 0.5, 0.0, -0.25)
    order = [2, 0, 3, 1]  # the call of each span, as the tree has them
    item = replace(
        item, spans=tuple(replace(span, call=call) for span, call in zip(item.spans, order, strict=True))
    )
    spans = np.split(np.arange(item.trainable_tokens), np.cumsum([s.end - s.start for s in item.spans])[:-1])
    in_time = [spans[order.index(call)] for call in range(4)]
    rewards = np.zeros(item.trainable_tokens)
    rewards[[part[-1] for part in in_time]] = (0.5, 0.0, -0.25, 1.0)
    places = np.concatenate(in_time)
    expected = textbook(rewards[places].tolist(), values_of(item)[places].tolist(), gamma, gae_lambda)
    found = estimated(item, gamma, gae_lambda)
    np.testing.assert_allclose(found.advantage[places], expected[0], atol=1e-12)
    np.testing.assert_allclose(found.target[places], expected[1], atol=1e-12)


@pytest.mark.parametrize(("gamma", "gae_lambda"), PAIRS)
def test_a_turn_is_one_action(gamma: float, gae_lambda: float) -> None:
    item = scored(tree(), 1.0, 0.5)
    first = np.cumsum([0] + [span.end - span.start for span in item.spans])
    own = values_of(item)[first[:-1]].tolist()
    advantages, targets = textbook([0.5, 0.0, 0.0, 1.0], own, gamma, gae_lambda)
    found = estimated(item, gamma, gae_lambda, "turns")
    np.testing.assert_allclose(found.advantage, np.repeat(advantages, np.diff(first)), atol=1e-12)
    assert np.flatnonzero(~np.isnan(found.target)).tolist() == first[:-1].tolist()
    np.testing.assert_allclose(found.target[first[:-1]], targets, atol=1e-12)


def test_a_call_that_two_versions_sampled_is_one_turn() -> None:
    item = scored(chains(count=1)[0], 1.0)
    head, *others = item.spans
    middle = (head.start + head.end) // 2
    parts = (replace(head, end=middle), replace(head, start=middle, version=1), *others)
    kinds: tuple[Literal["tokens", "turns"], ...] = ("tokens", "turns")
    for over in kinds:
        whole, split = (estimated(each, 0.9, 0.9, over) for each in (item, replace(item, spans=parts)))
        np.testing.assert_array_equal(whole.advantage, split.advantage)
        np.testing.assert_array_equal(whole.target, split.target)


def test_the_reward_of_an_untrained_call_belongs_to_the_trained_token_before_it() -> None:
    item = chains(count=1)[0]
    item = replace(item, spans=(replace(item.spans[0], call=1), replace(item.spans[1], call=4)))
    first = item.spans[0].end - item.spans[0].start
    zero: Any = np.zeros(item.trainable_tokens)
    found = estimate(
        scored(item, 1.0, 9.0, 0.0, 0.25, 0.5, 0.0), zero, gamma=1.0, gae_lambda=1.0, over="tokens"
    )
    # 9 came before any trained token, 0.25 and 0.5 after the first call.
    assert found.advantage.tolist() == [1.75] * first + [1.0] * (item.trainable_tokens - first)


def test_data_without_a_trained_token_have_no_estimate() -> None:
    item = replace(chains(count=1)[0], spans=(), trainable_tokens=0)
    assert len(estimated(item).advantage) == 0
