"""``agentrl parity``: its prompts and flags, what is compared, and what counts as within."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from agentrl.errors import ConfigError
from agentrl.local import parity
from agentrl.local.parity import BFLOAT16_LIMIT, MEAN_LIMIT, ParityDifference, encode_prompts, render


def test_the_difference_is_absolute_over_all_tokens() -> None:
    ours = np.array([-1.0, -2.0, -3.0], np.float32)
    theirs = np.array([-1.0, -2.5, -2.0])
    difference = ParityDifference.of("local", "varlen", ours, theirs)
    assert (difference.tokens, difference.mean, difference.max) == (3, 0.5, 1.0)
    assert difference.p99 == pytest.approx(0.99)
    ratios = np.exp(np.array([0.0, 0.5, -1.0]))
    assert difference.kl == pytest.approx(np.mean(ratios - 1 - np.log(ratios)))
    assert not difference.within


@pytest.mark.parametrize(("mean", "within"), [(MEAN_LIMIT / 2, True), (MEAN_LIMIT, False), (np.nan, False)])
def test_the_mean_decides_and_a_nan_is_above(mean: float, within: bool) -> None:
    difference = ParityDifference.of("e", "x", np.array([mean]), np.array([0.0]))
    assert difference.within is within
    out = io.StringIO()
    Console(file=out, width=120).print(render([difference], "folder"))
    assert ("within" if within else "above") in out.getvalue()


def test_products_in_bfloat16_have_a_wider_limit() -> None:
    ours, theirs = np.array([BFLOAT16_LIMIT / 2]), np.array([0.0])
    assert not ParityDifference.of("e", "x", ours, theirs).within
    assert ParityDifference.of("e", "x", ours, theirs, BFLOAT16_LIMIT).within


def test_a_mixture_has_a_row_without_and_with_replayed_routing() -> None:
    ours, theirs = np.array([0.5]), np.array([0.0])
    rows = [
        ParityDifference.of("e", "varlen", ours, theirs, MEAN_LIMIT, kind) for kind in ("own", "replayed")
    ]
    out = io.StringIO()
    Console(file=out, width=120).print(render(rows, "folder"))
    assert "varlen, own routing" in out.getvalue()
    assert "varlen, replayed routing" in out.getvalue()


class _Tokenizer:
    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return messages[0]["content"]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


class _Policy:
    tokenizer = _Tokenizer()


def test_prompts_are_as_many_as_asked_and_all_different() -> None:
    policy: Any = _Policy()
    prompts = encode_prompts(policy, 20)
    assert len(set(prompts)) == 20
    assert all(prompts)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--model_name_or_path", "x", "--prompts", "0"],
        ["--model_name_or_path", "x", "--dtype", "int8"],
        ["--model_name_or_path", "x", "--prompt", "3"],
    ],
)
def test_wrong_flags_are_config_errors(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        parity.main(argv)
