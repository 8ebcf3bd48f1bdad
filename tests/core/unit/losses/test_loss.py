"""A loss of AgentRL is one file, and one of a user's own is found by its path: both declare their flags."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parsed_flags import parsed
from token_batches import three_tokens

import agentrl
from agentrl.cli.services import check_training_flags
from agentrl.config.schema import LossConfig
from agentrl.errors import ConfigError
from agentrl.losses import loss as loss_module
from agentrl.losses.compute import token_losses
from agentrl.losses.loss import LOSSES, built_in_losses
from agentrl.losses.settings import LossSettings, check_loss

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
        "the loss: CISPO, CrossEntropy, DPO, DPPO, GRPO, GSPO, IPO, KTO, M2PO, MINIRL, OPD, SAPO, SOFT,"
        " VESPO, or one of your own as module:function",
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


OWN = Path(__file__).with_name("own_losses.py")


def settings_of(*flags: str) -> LossSettings:
    configs = parsed("--loss_calculater", *flags)
    check_loss(configs)
    return LossSettings.of(configs[LossConfig])


def test_its_declaration_and_its_parameters_are_used() -> None:
    settings = settings_of("own_losses:soft", "--loss_args", '{"power": 2}')
    assert settings.token_level_loss is True
    assert settings.bounds_staleness
    assert settings.narrows_bounds
    assert json.loads(settings.loss_args) == {"beta": 0.1, "power": 2}
    batch = three_tokens((0.0, 0.0, 0.0), (1.0, 3.0, -1.0))
    result = token_losses(batch, settings)
    torch.testing.assert_close(result.losses, -0.1 * torch.tensor([1.0, 9.0, 1.0]) * batch.logprobs)
    assert not result.clipped.any()


def test_a_parameter_with_the_name_of_a_flag_is_the_flag() -> None:
    settings = settings_of("own_losses:clipped", "--dual_clip", "3")
    batch = three_tokens((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    torch.testing.assert_close(token_losses(batch, settings).losses, 3 * batch.logprobs)


def test_a_plain_function_is_a_loss_with_the_usual_defaults() -> None:
    settings = settings_of("own_losses:plain")
    assert (settings.token_level_loss, settings.epsilon) == (False, 0.2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["own_losses:soft"], ["needs a value of power", "--loss_args"]),
        (["own_losses:soft", "--loss_args", '{"power": 2, "gamma": 1}'], ["'gamma'", "beta, power"]),
        (["own_losses:soft", "--loss_args", '{"power": 2, "beta": "x"}'], ["'beta'", "of type float"]),
        (["own_losses:soft", "--loss_args", "[2]"], ["--loss_args is '[2]'", "JSON object"]),
        (["own_losses:soft", "--loss_args", '{"power": 2}', "--dual_clip", "3"], ["GRPO or GSPO"]),
        (["own_losses:clipped", "--loss_args", '{"dual_clip": 3}'], ["give it as --dual_clip"]),
        (["own_losses:missing"], ["own_losses:missing", "cannot be imported"]),
        (["own_losses:number"], ["own_losses:number", "not a function"]),
        (["GRPO", "--loss_args", '{"beta": 1}'], ["'beta'", "no parameters"]),
        (["GRPPO"], ["unknown loss 'GRPPO'", "choose one of", "did you mean 'GRPO'"]),
    ],
)
def test_what_is_wrong_is_named_with_a_hint(flags: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        settings_of(*flags)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_trainer_finds_a_loss_that_an_imported_module_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_names.py").write_text(OWN.read_text().replace("@loss()", '@loss("named")'))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(LOSSES, "_registered", dict(LOSSES._registered))
    flags = ["--import_modules", "own_names", "--loss_calculater", "named"]
    configs = parsed(*flags, validate=check_training_flags)
    assert LossSettings.of_run(configs).loss.function.__name__ == "clipped"
