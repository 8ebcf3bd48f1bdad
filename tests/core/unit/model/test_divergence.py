"""The reverse KL over a teacher's likeliest ids: the whole KL with all ids, a lower bound with some."""

from __future__ import annotations

import pytest
import torch

from agentrl.documents.model_call import SamplingMask
from agentrl.documents.record import TopLogprobs
from agentrl.model.logprobs import KeptIds, OutputHead, reverse_kl, token_logprobs

VOCABULARY, TOKENS, HIDDEN = 13, 5, 4
PARENT = torch.tensor([0, 1, 1, 2, 4])
TARGET = torch.tensor([3, 0, 12, 7, 5])
TEMPERATURE = torch.tensor([1.0, 1.0, 0.7, 1.3, 1.0])


def setting() -> tuple[torch.Tensor, OutputHead, torch.Tensor]:
    """Hidden states, a head with a bias and a cap, and a teacher's logprobs [T, V]."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, HIDDEN, generator=generator), torch.randn(13, HIDDEN, generator=generator)
    head = OutputHead(
        weight.requires_grad_(), torch.randn(13, generator=generator).requires_grad_(), 1.5, softcap=9.0
    )
    teacher = torch.randn(TOKENS, VOCABULARY, generator=generator).log_softmax(-1).half().float()
    return hidden.requires_grad_(), head, teacher


def logits_of(hidden: torch.Tensor, head: OutputHead) -> torch.Tensor:
    logits = (hidden[PARENT] @ head.weight.T + head.bias) * head.scale
    return 9.0 * (logits / 9.0).tanh() / TEMPERATURE[:, None]


def kl_of(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """The whole KL, from all logits."""
    policy = logits.log_softmax(-1)
    return (policy.exp() * (policy - teacher)).sum(-1)


def ours(hidden: torch.Tensor, head: OutputHead, teacher: torch.Tensor, count: int) -> torch.Tensor:
    values, ids = (part.tolist() for part in teacher.topk(count, -1))
    rows = [dict(zip(*row, strict=True)) for row in zip(ids, values, strict=True)]
    logprobs, _ = token_logprobs(hidden, head, PARENT, TARGET, temperature=TEMPERATURE)
    return reverse_kl(hidden, head, PARENT, TARGET, TEMPERATURE, logprobs, TopLogprobs.of(rows))


def assert_same(found: torch.Tensor, expected: torch.Tensor, *inputs: torch.Tensor) -> None:
    """Values and gradients are equal."""
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
    gradients = (torch.autograd.grad(values.sum(), inputs) for values in (found, expected))
    torch.testing.assert_close(*gradients, atol=5e-3, rtol=5e-3)


def test_with_every_id_it_is_the_kl_over_the_vocabulary_and_has_its_gradient() -> None:
    hidden, head, teacher = setting()
    found, expected = ours(hidden, head, teacher, VOCABULARY), kl_of(logits_of(hidden, head), teacher)
    assert_same(found, expected, hidden, head.weight)


@pytest.mark.parametrize("count", [1, 4, 8])
def test_with_some_ids_it_is_a_lower_bound(count: int) -> None:
    hidden, head, teacher = setting()
    found = ours(hidden, head, teacher, count)
    assert bool((found >= -1e-5).all())
    assert bool((found <= kl_of(logits_of(hidden, head), teacher) + 1e-3).all())


def test_a_token_that_was_sampled_from_some_ids_is_compared_over_them() -> None:
    """Of each token by itself: the others' terms stay as they are."""
    hidden, head, teacher = setting()
    ids = [[3, 5], [], [12, 0, 1], [], [5, 6, 7]]
    kept = SamplingMask.of(ids)
    logprobs, _ = token_logprobs(
        hidden, head, PARENT, TARGET, temperature=TEMPERATURE, kept=KeptIds.of(kept, hidden.device)
    )
    excluded = torch.tensor([[bool(row) and id not in row for id in range(VOCABULARY)] for row in ids])
    expected = kl_of(logits_of(hidden, head).masked_fill(excluded, -1e30), teacher)
    everything = TopLogprobs.of([dict(enumerate(row)) for row in teacher.tolist()])
    found = reverse_kl(hidden, head, PARENT, TARGET, TEMPERATURE, logprobs, everything, kept)
    assert_same(found, expected, hidden, head.weight, head.bias)


def test_a_token_without_ids_has_none() -> None:
    hidden, head, teacher = setting()
    assert ours(hidden, head, teacher, 0).tolist() == [0.0] * TOKENS


def test_an_id_that_the_student_has_no_row_for_is_one_of_the_others() -> None:
    hidden, head, _ = setting()
    logprobs, _ = token_logprobs(hidden, head, PARENT, TARGET, temperature=TEMPERATURE)
    found = [
        reverse_kl(
            hidden, head, PARENT, TARGET, TEMPERATURE, logprobs, TopLogprobs.of([{2: -0.5, **more}] * TOKENS)
        )
        for more in ({}, {VOCABULARY: -1.5, VOCABULARY + 4: -3.0})
    ]
    assert torch.equal(*found)
