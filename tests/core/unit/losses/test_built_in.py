"""A built-in loss is one file: its name, its flags and their help are found there, without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from parsed_flags import parsed

import agentrl
from agentrl.config.schema import LossConfig
from agentrl.losses import loss as loss_module
from agentrl.losses.loss import built_in_losses

SOURCE = '''
"""Soft: a loss for a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from agentrl.config.flags import flag
from agentrl.losses.loss import TokenBatch, TokenLosses, loss

if TYPE_CHECKING:
    from agentrl.losses.settings import LossSettings


@loss("SOFT", token_level_loss=True)
def soft(
    batch: TokenBatch,
    settings: LossSettings,
    *,
    softness: Annotated[float, flag(None, "softness of the loss", within="[0, 1)")] = 0.25,
) -> TokenLosses:
    return TokenLosses(losses=-softness * batch.advantages * batch.logprobs)
'''
PROGRAM = """
import sys
import agentrl.config.agreement
import agentrl.losses.loss
from agentrl.config.schema import flags_page
from agentrl.config.load import parse
from agentrl.config.schema import LossConfig
from agentrl.errors import ConfigError
print(next(line for line in flags_page().splitlines() if "softness" in line))
print(LossConfig.__dataclass_fields__["loss_calculater"].metadata["help"])
print("torch" in sys.modules)
from agentrl.losses.settings import LossSettings
read = lambda *flags: LossSettings.of(parse(flags, command="", description="", shown=[])[LossConfig])
print([read("--loss_calculater", "SOFT", *flags).softness for flags in ((), ("--softness", "0"))])
try:
    read("--softness", "0.5")
except ConfigError as error:
    print(error.hint)
"""


def test_a_file_is_all_that_a_loss_and_its_flag_need(tmp_path: Path) -> None:
    copy = tmp_path / "agentrl"
    shutil.copytree(Path(agentrl.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "losses/built_in/soft.py").write_text(SOURCE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        "| `--softness` | float in [0, 1) |  | SOFT: softness of the loss |",
        "the loss: CISPO, CrossEntropy, DPO, DPPO, GRPO, GSPO, KTO, MINIRL, OPD, SAPO, SOFT, or one of"
        " your own as module:function",
        "False",
        "[0.25, 0.0]",
        "leave it out, or use --loss_calculater SOFT",
    ], done.stderr


def test_a_flag_is_declared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grpo = built_in_losses()["GRPO"]
    monkeypatch.setattr(loss_module, "built_in_losses", lambda: {"one": grpo, "two": grpo})
    with pytest.raises(ValueError, match="two losses declare --dual_clip"):
        loss_module.loss_flags.__wrapped__()


def test_a_flag_that_two_losses_read_names_both() -> None:
    field = LossConfig.__dataclass_fields__["dual_clip"]
    assert field.metadata["help"].startswith("GRPO, GSPO, OPD: for A < 0")
    assert parsed("--dual_clip", "4")[LossConfig].dual_clip == 4.0
