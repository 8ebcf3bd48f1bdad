"""Merged and packed steps against each model call run by itself: loss and every gradient, within 1e-5."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from agentrl.config.training import OldLogprobs
from agentrl.data.planner import PrefixMerging
from agentrl.documents.training import DBRecordData
from agentrl.errors import ConfigError
from agentrl.losses.loss import LOSSES
from agentrl.losses.settings import LossSettings
from agentrl.model.logprobs import ForwardOptions
from exactness.corrections import cases_of
from exactness.models import MODELS, tiny_model
from exactness.reference import (
    Computed,
    longest_sequence,
    plain_step,
    trainer_step,
)
from exactness.steps import Shape, Turn, make_step

PER_TRAJECTORY = [
    name for name in LOSSES.names() if not (LOSSES.get(name).compares or LOSSES.get(name).ignores_score)
]
"""Losses of a trajectory by itself; ``test_preference_exactness.py`` has those that compare some."""

pytestmark = [pytest.mark.exactness, pytest.mark.timeout(300)]

LIMIT = 1e-5

TURNS = st.builds(
    Turn,
    context=st.integers(0, 6),
    output=st.integers(1, 6),
    reset=st.booleans(),
    is_failed=st.sampled_from([False, False, False, True]),
)
SHAPES = st.builds(
    Shape,
    groups=st.lists(
        st.lists(st.lists(TURNS, min_size=1, max_size=4), min_size=1, max_size=3), min_size=1, max_size=3
    ),
    system=st.integers(1, 6),
    question=st.integers(0, 6),
    kinds=st.sampled_from([2, 61]),
)
STEPS = st.builds(make_step, SHAPES, st.integers(0, 2**16)).filter(bool)
MERGING = st.sampled_from(["off", "trajectory", "group"])
EXECUTORS = st.sampled_from(["auto", "sdpa", "varlen", "per_sequence", "per_sequence_padded"])


@st.composite
def loss_settings(draw: st.DrawFn, loss: str) -> LossSettings:
    """Draw any reduction, bonus, old policy and correction that the loss takes; bounds may mask tokens."""
    declared = LOSSES.get(loss)
    token_level, divisor = draw(st.sampled_from([(True, None), (False, None), (False, 9)]))
    reduction: dict[str, Any] = {
        "token_level_loss": token_level,
        "skip_length_normalization": not token_level and (divisor is not None or draw(st.booleans())),
        "loss_length_divisor": divisor,
    }
    if not declared.from_policy:
        return LossSettings(loss_calculater=loss, **reduction)
    old, correction = draw(st.sampled_from(cases_of(loss)))
    keeps = "ce_grpo_beta_1" in declared.parameters and draw(st.booleans())
    dual_clip = draw(st.sampled_from([math.inf, 3.0])) if "dual_clip" in declared.parameters else None
    own: dict[str, Any] = {
        "dual_clip": dual_clip,
        **({"ce_grpo_beta_1": 0.5, "ce_grpo_beta_2": 0.7} if keeps else {}),
    }
    return LossSettings(
        loss_calculater=loss,
        **reduction,
        **own,
        epsilon=0.2,
        epsilon_higher=0.1 if declared.clips else 0.0,
        old_logprobs=old,
        importance_correction=correction,
        strict_in_bound=False,
        importance_weight_cap_ratio=draw(st.sampled_from([4.0, math.inf])),
        out_of_date_decay=draw(st.sampled_from([None, 0.3])),
        entropy_coef=draw(st.sampled_from([0.0, 0.1])),
    )


@cache
def model_called(name: str) -> PreTrainedModel:
    return tiny_model(name)


def budget_of(data: list[DBRecordData], room: float) -> int:
    """Return ``max_tokens`` between the smallest possible and one that holds the whole step."""
    least = longest_sequence(data)
    return least + int(room * sum(item.tokens for item in data))


_TURNS = [Turn(context=2, output=3), Turn(context=3, output=2, reset=True), Turn(context=1, output=4)]
SPLIT = make_step(Shape(groups=[[_TURNS] * 4]), 5)
"""Four trajectories with a reset: at the smallest budget, each is spread over micro-batches."""


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("loss", PER_TRAJECTORY)
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=STEPS, choice=st.data(), merging=MERGING, room=st.floats(0, 1), executor=EXECUTORS)
def test_a_step_equals_one_call_at_a_time(
    loss: str,
    model_name: str,
    data: list[DBRecordData],
    choice: st.DataObject,
    merging: PrefixMerging,
    room: float,
    executor: str,
) -> None:
    model, options = model_called(model_name), choice.draw(loss_settings(loss))
    forward = ForwardOptions(chunk_size=5)
    expected = plain_step(model, data, options)
    computed = trainer_step(
        model, data, options, merging=merging, max_tokens=budget_of(data, room), executor=executor,
        options=forward,
    )  # fmt: skip
    assert computed.deviation(expected) <= LIMIT


@pytest.mark.parametrize("merging", ["off", "trajectory"])
def test_trajectories_spread_over_micro_batches_equal_whole_ones(merging: PrefixMerging) -> None:
    options = LossSettings(
        loss_calculater="GSPO", old_logprobs="loglinear", strict_in_bound=True, epsilon=0.2
    )
    model, expected = model_called("qwen3 gqa, tied"), plain(options)
    computed = trainer_step(model, SPLIT, options, merging=merging, max_tokens=longest_sequence(SPLIT))
    assert computed.deviation(expected) <= LIMIT


@pytest.mark.parametrize(("old", "correction"), cases_of("MINIRL"))
@pytest.mark.parametrize("loss", ["GRPO", "MINIRL"])
def test_corrections_act_and_are_exact_under_every_old_policy(
    loss: str, old: OldLogprobs, correction: str
) -> None:
    if (old, correction) not in cases_of(loss):
        with pytest.raises(ConfigError, match="would count it twice"):
            LossSettings(loss_calculater=loss, old_logprobs=old, importance_correction=correction)
        return
    without = LossSettings(loss_calculater=loss, old_logprobs=old)
    options = replace(without, importance_correction=correction)
    expected = plain(options)
    model, least = model_called("qwen3 gqa, tied"), longest_sequence(SPLIT)
    computed = trainer_step(model, SPLIT, options, merging="group", max_tokens=least)
    assert computed.deviation(expected) <= LIMIT
    assert not correction or expected.deviation(plain(without)) > 0.01


@cache
def plain(options: LossSettings) -> Computed:
    return plain_step(model_called("qwen3 gqa, tied"), SPLIT, options)
