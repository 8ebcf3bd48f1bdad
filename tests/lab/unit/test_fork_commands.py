"""The command lines that ``agentrl fork`` prints: the parent's flags, under the child's name."""

from __future__ import annotations

from datetime import UTC, datetime

from agentrl.documents.run import RunSettings
from agentrl.lab.cli import command_of


def flags_of(*given: str) -> RunSettings:
    """The stored flags of a role whose trainer computes in bfloat16."""
    values = {"run_name": "math", "autocast_bf16": "true", "learning_rate": 1e-5, "seed": 3}
    return RunSettings(id="flags/train", values=values, by="b", at=datetime.now(UTC), given=given)


def test_a_trainer_gets_what_the_parents_has_measured_and_a_sampler_does_not() -> None:
    flags = flags_of("run_name", "learning_rate")
    trainer = "agentrl train --run_name child --autocast_bf16 true --learning_rate 1e-05"
    assert command_of(flags, "train", "child") == trainer
    assert command_of(flags_of("seed"), "sample", "child") == "agentrl sample --run_name child --seed 3"


def test_a_precision_that_was_given_is_there_once() -> None:
    command = command_of(flags_of("seed", "autocast_bf16"), "train", "child")
    assert command == "agentrl train --run_name child --autocast_bf16 true --seed 3"
