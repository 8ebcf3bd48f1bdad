"""Parts of a what-if: its flags, and the weight of each token in a loss."""

from __future__ import annotations

import os

import numpy as np
import pytest
from parsed_flags import parsed
from training_data import group

from agentrl.config.agreement import public_flags
from agentrl.config.schema import GroupConfig, LossConfig, RunConfig, TrainConfig
from agentrl.data.stream import StepData
from agentrl.documents.model_call import pack_halves
from agentrl.documents.training import TokenSpan, TokenStatistics, statistics_key
from agentrl.errors import ConfigError
from agentrl.lab.flags import WhatIfConfig, check_flags, child_configs, of_steps, parent_configs
from agentrl.lab.whatif_run import Stretch, _require_usable, token_weights
from agentrl.losses.settings import LossSettings


@pytest.mark.parametrize("measured", ["true", "false"])
def test_what_the_parents_trainer_measured_is_not_measured_again(measured: str) -> None:
    parent, here = parsed(), parsed("--log_level", "ERROR", command="agentrl whatif")
    stored = public_flags(parent) | {"autocast_bf16": measured}
    child = child_configs(parent_configs(stored, parent.given, here), here)
    assert child[TrainConfig].autocast_bf16 == measured
    assert child[RunConfig].log_level == "ERROR"


def test_the_ids_of_without_may_come_from_a_pipe() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"train/0/a/0/1\n\ntrain/0/b/0/1\n")
    os.close(writing)
    configs = parsed("--without", f"/dev/fd/{reading}", command="agentrl whatif", extra=[WhatIfConfig])
    check_flags(configs)
    assert configs[WhatIfConfig].excluded == {"train/0/a/0/1", "train/0/b/0/1"}
    os.close(reading)


def test_a_what_if_takes_a_recipe_that_changes_no_data() -> None:
    here = parsed("--recipe", "dr-grpo", "--epsilon", "0.3", command="agentrl whatif", extra=[WhatIfConfig])
    check_flags(here)
    parent = parsed("--recipe", "dapo")
    child = child_configs(parent_configs(public_flags(parent), parent.given, here), here)
    loss = child[LossConfig]
    assert (loss.loss_length_divisor, loss.epsilon) == (8192, 0.3)
    assert (loss.token_level_loss, loss.epsilon_higher) == (None, None)  # the parent's were true and 0.08
    assert (child[GroupConfig].advantage, child[RunConfig].recipe) == ("dr_grpo", "dr-grpo")
    whole = parsed("--recipe", "original-grpo", command="agentrl whatif", extra=[WhatIfConfig])
    with pytest.raises(ConfigError, match="cannot differ") as refused:
        check_flags(whole)
    assert "--recipe original-grpo" in str(refused.value.hint)


def test_a_what_if_refuses_an_age_that_drops_nothing() -> None:
    child = parsed("--max_staleness", "3")
    _require_usable(child, {"learning_rate"})
    for unread in (child, parsed("--max_staleness", "3", "--staleness_policy", "drop")):
        with pytest.raises(ConfigError, match="--max_staleness without a --staleness_policy that reads it"):
            _require_usable(unread, {"max_staleness"})
    _require_usable(parsed("--max_staleness", "3", "--staleness_policy", "mask"), {"max_staleness"})


@pytest.mark.parametrize(
    ("words", "splits"),
    [
        ("--max_steps 8 --save_steps 7 --report_to none --model_name m --train_file t.jsonl", False),
        ("--max_turns 3 --max_new_tokens 9 --engine_wait_seconds 700 --inf_tp_size 2 --max_cost 4", False),
        ("--learning_rate 1e-3", True),
        ("--seed 9", True),
        ("--rollout_quantization fp8", True),
        ("--max_steps 8 --warmup_ratio 0.1", True),
        ("--advantage_whitening batch", True),
    ],
)
def test_only_flags_that_change_a_step_divide_the_steps(words: str, splits: bool) -> None:
    one, other = (
        Stretch(parent=item, child=item, threads=1, last=2) for item in (parsed(), parsed(*words.split()))
    )
    assert (one.flags != other.flags) is splits


def test_the_end_of_a_schedule_divides_the_steps_where_the_rate_falls_to_it() -> None:
    linear = [of_steps(parsed("--lr_scheduler_type", "linear", "--max_steps", end)) for end in ("8", "9")]
    assert linear[0] != linear[1]


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
