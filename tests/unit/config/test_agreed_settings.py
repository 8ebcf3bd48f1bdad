"""What the processes of a run agree on: the loss's settings as they act, not as they were given."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agentrl.config.agreement import trainer_settings
from agentrl.config.load import parse
from agentrl.config.schema import LossConfig
from agentrl.errors import ConfigError
from agentrl.losses.settings import LossSettings


def loss_facts(*flags: str) -> dict[str, object]:
    configs = parse(flags, command="agentrl train", description="", shown=[])
    return trainer_settings(configs, LossSettings.of(configs[LossConfig]))["loss"]


def test_a_value_given_and_the_same_by_default_agree() -> None:
    assert loss_facts("--epsilon", "0.2", "--token_level_loss", "false") == loss_facts()
    assert loss_facts("--loss_calculater", "GSPO")["epsilon"] == 3e-4
    assert loss_facts("--loss_calculater", "GSPO") != loss_facts()
    assert None not in {name: loss_facts()[name] for name in ("epsilon", "strict_in_bound")}.values()


def test_a_loss_that_cannot_act_has_no_facts() -> None:
    with pytest.raises(ConfigError, match="--importance_correction is tis"):
        loss_facts("--importance_correction", "tis")


def test_settings_are_resolved_without_torch() -> None:
    modules = "agentrl.config.agreement, agentrl.config.agreement"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
