"""Compute how a loss weighs each token that a step trained, from stored values and without the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.data.planner import build_micro_batches
from agentrl.data.step_source import StepData
from agentrl.documents.model_call import unpack_floats, unpack_halves
from agentrl.documents.training import TokenStatistics
from agentrl.losses.compute import Denominators
from agentrl.losses.settings import LossSettings
from agentrl.train.step_loss import StepLoss

Floats = NDArray[np.float32]


def token_weights(
    batch: StepData, stored: Mapping[str, TokenStatistics], settings: LossSettings, vocab_size: int
) -> dict[str, Floats]:
    """Return {record: −∂loss/∂log πθ} of the tokens that a step trained, float32[T] in the order of spans.

    Above 0, the update makes the token more likely. ``stored`` are the step's statistics by record;
    trajectories without some are left out. The KL to a reference and the entropy bonus are not counted.
    Empty for a loss that compares trajectories, whose tokens have no weight of their own.
    """
    if settings.loss.compares:
        return {}
    settings = replace(settings, kl_coef=0.0, kl_estimator="weighted_k3", entropy_coef=0.0)
    data = [
        item
        for item in batch.data
        if item.id in stored and len(stored[item.id].log_ratios) == 2 * item.trainable_tokens
    ]
    if not data:
        return {}
    whole = Denominators(sum(item.trainable_tokens for item in batch.data), float(len(batch.data)))
    loss = StepLoss(settings, whole, sum(item.tokens for item in batch.data))
    logprobs = [
        unpack_floats(item.behavior_logprobs) + unpack_halves(stored[item.id].log_ratios) for item in data
    ]
    weights = {item.id: np.zeros(item.trainable_tokens, np.float32) for item in data}
    forests = build_micro_batches(
        data, sum(item.tokens for item in data), vocab_size=vocab_size, merging="trajectory", ages=batch.ages
    )
    for forest in forests:
        places = list(zip(forest.trajectory[forest.row].tolist(), forest.label.tolist(), strict=True))
        values = torch.tensor([logprobs[number][label] for number, label in places], requires_grad=True)
        loss.add(forest, values, torch.zeros(len(places))).backward()  # type: ignore[no-untyped-call]
        assert values.grad is not None
        for (number, label), gradient in zip(places, values.grad.tolist(), strict=True):
            weights[data[number].id][label] = -gradient
    return weights
