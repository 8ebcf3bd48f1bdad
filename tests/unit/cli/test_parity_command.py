"""``agentrl parity``: its prompts and its flags."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.cli import parity
from agentrl.cli.parity import encode_prompts
from agentrl.errors import ConfigError


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
