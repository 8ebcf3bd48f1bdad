"""The flags of a what-if: the parent's as its trainer resolved them, and those of this process."""

from __future__ import annotations

import pytest

from agentrl.config.agreement import public_flags
from agentrl.config.load import parse
from agentrl.config.schema import RunConfig, TrainConfig
from agentrl.config.whatif import child_configs, parent_configs


@pytest.mark.parametrize("measured", ["true", "false"])
def test_what_the_parents_trainer_measured_is_not_measured_again(measured: str) -> None:
    parent = parse([], command="agentrl train", description="", shown=[])
    here = parse(["--log_level", "ERROR"], command="agentrl whatif", description="", shown=[])
    stored = public_flags(parent) | {"autocast_bf16": measured}
    child = child_configs(parent_configs(stored, parent.given, here), here)
    assert child[TrainConfig].autocast_bf16 == measured
    assert child[RunConfig].log_level == "ERROR"
