"""A loss in a user's own module: found by its path, with its own parameters, and nothing of ours changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from parsed_flags import parsed
from token_batches import three_tokens

from agentrl.cli.services import check_training_flags
from agentrl.config.schema import LossConfig
from agentrl.errors import ConfigError
from agentrl.losses.compute import token_losses
from agentrl.losses.loss import LOSSES
from agentrl.losses.settings import LossSettings, check_loss

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
