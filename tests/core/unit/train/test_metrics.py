"""What a step reports: speed, tokens saved by merging prefixes, joined updates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_models import packed, tiny_model, trajectory, tree

from agentrl.data.forest import merge_prefixes
from agentrl.model.flops import Backward, DevicePeak, ModelShape, attention_pairs
from agentrl.train.step import (
    call_tokens,
    join_metrics,
    merging_metrics,
    speed_metrics,
)

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
    options: Any = {"backward": Backward(), "step_tokens": shared.tokens}
    metrics = speed_metrics([shared], SECONDS, shape, DevicePeak(1e9), **options, ranks=1)
    assert metrics["tokens_per_second"] == pytest.approx(shared.tokens / 4)
    flops = shape.step_flops(shared.tokens, shared.trainable_tokens, attention_pairs(shared))
    assert metrics["mfu"] == pytest.approx(flops / 4 / 1e9)
    halved = speed_metrics([shared], SECONDS, shape, DevicePeak(1e9), **options, ranks=2)
    assert halved["mfu"] == pytest.approx(metrics["mfu"] / 2)
    assert "mfu" not in speed_metrics([shared], SECONDS, shape, DevicePeak(None), **options, ranks=1)
    assert metrics["seconds_forward_backward"] == 3.0
    saved = merging_metrics(metrics | {"tokens": shared.tokens}, call_tokens(data))
    assert saved["unique_tokens"] == shared.tokens < 52
    assert saved["total_tokens"] == 96
    assert saved["sharing_ratio"] == pytest.approx(96 / shared.tokens)
    assert saved["total_tokens_per_second"] == pytest.approx(24)


def test_a_metric_that_the_first_update_lacks_is_not_lost() -> None:
    untaught = {"trainable_tokens": 8, "taught_fraction": 0.0}
    taught = {"trainable_tokens": 4, "taught_fraction": 0.5, "kl_teacher": 0.25}
    assert join_metrics([untaught, taught], 2)["kl_teacher"] == pytest.approx(0.25)


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
