"""The weight of each token in a loss, from stored values."""

from __future__ import annotations

import numpy as np
import pytest
from training_data import group

from agentrl.data.stream import StepData
from agentrl.documents.model_call import pack_halves
from agentrl.documents.training import TokenSpan, TokenStatistics, statistics_key
from agentrl.lab.whatif_run import token_weights
from agentrl.losses.settings import LossSettings


def test_weights_are_those_of_the_reduced_loss_and_clipped_tokens_have_none() -> None:
    """GRPO on two trajectories: A·r / (tokens of the trajectory · trajectories), 0 where it clips."""
    data = group("a")
    ratios = np.zeros(data[0].trainable_tokens, np.float32)
    ratios[0] = 0.5 if data[0].advantage > 0 else -0.5
    stored = {
        item.id: TokenStatistics(
            id=statistics_key(item.id, "1/1"), record=item.id, train_step="1/1", step=1,
            spans=tuple(TokenSpan(start=span.start, end=span.end) for span in item.spans),
            log_ratios=pack_halves(ratios if item is data[0] else np.zeros_like(ratios)),
            entropies=pack_halves(np.zeros_like(ratios)),
        )
        for item in data
    }  # fmt: skip
    ages = dict.fromkeys({span.version for item in data for span in item.spans}, 0)
    batch = StepData(("a",), tuple(data), ages, is_rest=False)
    found = token_weights(batch, stored, LossSettings(), 1000)
    assert found.keys() == {item.id for item in data}
    first, second = (found[item.id] for item in data)
    assert first[0] == 0, "clipped"
    share = len(first) * len(data)
    assert first[1:] == pytest.approx(data[0].spans[0].advantage / share)
    assert second == pytest.approx(data[1].spans[0].advantage / share)
    assert token_weights(batch, {}, LossSettings(), 1000) == {}
