"""Quantized rollouts get the recommended correction, unless one is given or it could not act."""

from __future__ import annotations

import pytest
from parsed_flags import parsed

from agentrl.losses.settings import LossSettings, check_loss


def correction(*flags: str) -> tuple[str, str]:
    configs = parsed(*flags)
    check_loss(configs)
    settings = LossSettings.of_run(configs)
    return settings.old_logprobs, settings.importance_correction


FP8 = ("--rollout_quantization", "fp8")


def test_the_default_correction_is_for_quantized_rollouts_only() -> None:
    assert correction() == ("behavior", "")
    assert correction(*FP8) == ("recompute", "tis:2")
    assert correction(*FP8, "--loss_calculater", "MINIRL") == ("recompute", "tis:2")


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        (["--importance_correction", "token_mask"], ("behavior", "token_mask")),
        (["--importance_correction", ""], ("behavior", "")),
        (["--old_logprobs", "recompute"], ("recompute", "")),
        (["--epsilon", "0.3"], ("behavior", "")),
        (["--loss_calculater", "DPPO"], ("behavior", "")),
        (["--loss_calculater", "CrossEntropy"], ("behavior", "")),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_is_given_stays(flags: list[str], kept: tuple[str, str]) -> None:
    assert correction(*FP8, *flags) == kept


def test_a_clip_that_several_updates_read_goes_with_the_correction() -> None:
    assert correction(*FP8, "--epsilon", "0.3", "--mini_batches", "2") == ("recompute", "tis:2")
