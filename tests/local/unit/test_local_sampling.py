"""Sampling in the local engine: distributions, truncation, penalties, seeds, logprobs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.documents.sampling import SamplingParams
from agentrl.local.engine.scheduler import RowSampler, sample


def sampler(seed: int = 0, **params: float) -> RowSampler:
    return RowSampler(SamplingParams(**params), np.random.default_rng(seed))  # type: ignore[arg-type]


def logits(rows: int, vocab: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def frequencies(row: torch.Tensor, one: RowSampler, draws: int) -> torch.Tensor:
    batch = 500
    drawn = [sample(row.repeat(batch, 1), [one] * batch)[0] for _ in range(draws // batch)]
    return torch.bincount(torch.tensor(drawn).flatten(), minlength=row.numel()) / draws


@pytest.mark.parametrize("vocab", [7, 256, 1000])
def test_tokens_are_drawn_in_proportion_to_their_probability(vocab: int) -> None:
    row = logits(1, vocab)[0]
    draws = 40_000
    expected = (row / 0.8).softmax(-1)
    found = frequencies(row, sampler(temperature=0.8), draws)
    sigma = (expected * (1 - expected) / draws).sqrt()
    assert ((found - expected).abs() <= 5 * sigma + 2 / draws).all()


CUTS: list[dict[str, float]] = [
    {}, {"top_k": 1}, {"top_k": 3}, {"top_p": 0.4}, {"top_p": 0.9999}, {"min_p": 0.2},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.05},
]  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
def test_logprobs_are_those_of_the_sampled_distribution(cut: dict[str, float]) -> None:
    batch = logits(1, 300).repeat(400, 1)
    tokens, logprobs = sample(batch.clone(), [sampler(seed, temperature=0.7, **cut) for seed in range(400)])
    probs = (batch[0].double() / 0.7).softmax(-1)
    ordered, order = probs.sort(descending=True)
    keep = torch.arange(300) < cut.get("top_k", 300)
    keep &= ordered.cumsum(-1) - ordered <= cut.get("top_p", 1.0)
    keep &= ordered >= cut.get("min_p", 0.0) * ordered[0]
    kept = probs[order[keep]].sum()
    for token, logprob in zip(tokens, logprobs, strict=True):
        assert token in order[keep]
        assert logprob == pytest.approx(float((probs[token] / kept).log()), abs=1e-5)


def test_temperature_zero_is_greedy_with_logprobs_at_temperature_one() -> None:
    batch = logits(3, 500)
    tokens, logprobs = sample(batch.clone(), [sampler(temperature=0.0)] * 3)
    assert tokens == batch.argmax(-1).tolist()
    assert logprobs == pytest.approx(batch.log_softmax(-1).max(-1).values.tolist(), abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    top_k=st.sampled_from([-1, 1, 2, 40, 70, 5000]),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    vocab=st.sampled_from([3, 64, 65, 3000]),
    scale=st.sampled_from([0.01, 1.0, 8.0]),
    seed=st.integers(0, 1000),
)
def test_sampled_tokens_respect_every_limit(
    top_k: int, top_p: float, min_p: float, vocab: int, scale: float, seed: int
) -> None:
    row = logits(1, vocab, seed, scale)
    token = sample(row.clone(), [sampler(seed, top_k=top_k, top_p=top_p, min_p=min_p)])[0][0]
    probs = row[0].double().softmax(-1)
    larger = probs > probs[token]
    assert top_k < 0 or int(larger.sum()) < top_k
    assert top_p == 1.0 or float(probs[larger].sum()) <= top_p + 1e-5
    assert float(probs[token]) >= min_p * float(probs.max()) * (1 - 1e-5)


def test_top_p_over_a_flat_vocabulary_reaches_beyond_the_first_candidates() -> None:
    found = frequencies(torch.zeros(3000), sampler(top_p=0.6), 3000)
    assert 1100 < int((found > 0).sum()) <= 1802


def test_a_row_depends_only_on_its_own_seed() -> None:
    batch = logits(3, 400)
    alone = [sample(batch[row : row + 1].clone(), [sampler(row)])[0][0] for row in range(3)]
    mixed = [sampler(0), sampler(1), sampler(2)]
    assert sample(batch.clone(), mixed)[0] == alone


def test_penalties_follow_their_definitions() -> None:
    one = sampler(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    for token in (1, 1, 2):
        one.record(token)
    row = torch.tensor([[0.0, 5.0, -1.0, 1.9]])
    _, logprobs = sample(row.clone(), [one])
    penalized = torch.tensor([0.0, (5.0 - 0.5 - 0.5) / 2, (-1.0 - 0.5 - 0.25) * 2, 1.9])
    assert logprobs[0] == pytest.approx(float(penalized.log_softmax(-1)[1]), abs=1e-6)


def test_a_token_without_probability_is_never_drawn() -> None:
    row = torch.full((600,), float("-inf"))
    row[[3, 300, 599]] = 0.0
    found = frequencies(row, sampler(), 3000)
    assert found.nonzero()[:, 0].tolist() == [3, 300, 599]
