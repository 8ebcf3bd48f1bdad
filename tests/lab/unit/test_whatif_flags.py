"""The flags of a what-if: the parent's as its trainer resolved them, and those of this process."""

from __future__ import annotations

import os

import pytest
from parsed_flags import parsed

from agentrl.config.agreement import public_flags
from agentrl.config.schema import RunConfig, TrainConfig
from agentrl.errors import ConfigError
from agentrl.lab.flags import WhatIfConfig, check_flags, child_configs, parent_configs
from agentrl.lab.whatif_run import _require_usable


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


def test_a_what_if_refuses_an_age_that_drops_nothing() -> None:
    child = parsed("--max_staleness", "3")
    _require_usable(child, {"learning_rate"})
    with pytest.raises(ConfigError, match="--max_staleness with --staleness_policy drop"):
        _require_usable(child, {"max_staleness"})
    _require_usable(parsed("--max_staleness", "3", "--staleness_policy", "mask"), {"max_staleness"})
