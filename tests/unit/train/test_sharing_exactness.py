"""Sharing prefixes across trajectories changes neither the loss of a step nor a gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny_models import packed, tiny_model, trajectory, tree

from agentrl.batching.sharing import share_prefixes
from agentrl.documents.packing import pack_ids, unpack_ids
from agentrl.losses.registry import LOSSES
from agentrl.losses.settings import LossSettings
from agentrl.train.step import ForwardOptions, forward_backward


@pytest.mark.exactness
@pytest.mark.parametrize("executor", ["varlen", "sdpa"])
@pytest.mark.parametrize("loss", LOSSES)
def test_shared_prefixes_change_neither_loss_nor_gradient(loss: str, executor: str) -> None:
    rng = np.random.default_rng(7)
    prompt = rng.integers(0, 61, 12).tolist()
    data = [trajectory(rng, [(0, 20, -1)], [(10, 14), (17, 20)], name=f"q{i}") for i in range(5)]
    data = [
        replace(item, input_ids=pack_ids(prompt + unpack_ids(item.input_ids)[12:].tolist())) for item in data
    ]
    forest = packed([*data, tree(3), data[0]])
    shared = share_prefixes(forest)
    assert shared.tokens == forest.tokens - 4 * 12 - 20
    settings = LossSettings(loss_calculater=loss, token_level_loss=False)
    reports, gradients = [], []
    model = tiny_model("qwen3", tied=True)
    for batch, name in ((forest, "sdpa"), (shared, executor)):
        model.zero_grad()
        options = ForwardOptions(executor=name)
        reports.append(forward_backward(model, [batch], settings, current_version=1, options=options))
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, value in reports[0].items():
        if name != "tokens":
            assert reports[1][name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    for name, expected in gradients[0].items():
        assert (gradients[1][name] - expected).norm() <= 1e-5 * expected.norm(), name
