"""Limits that are not given follow the model's context, the memory, and those that are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from parsed_flags import parsed

from agentrl.config.agreement import require_trainable
from agentrl.config.schema import AgentConfig
from agentrl.errors import ConfigError
from agentrl.local.launch import fitted_limits


def limits(tmp_path: Path, own: int, *words: str, longest: int = 161536) -> dict[str, int]:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": own}))
    configs = parsed("--fit_turns", "200", *words, command="agentrl launch")
    found = fitted_limits(configs, str(tmp_path), longest)
    require_trainable(configs.with_flags(found))
    return found


def shown(found: Mapping[str, int]) -> list[int | None]:
    return [found.get(name) for name in ("max_prompt_tokens", "max_new_tokens", "max_tokens", "max_turns")]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (262144, [128768, 32768, 161536, 200]),
        (40960, [30720, 10240, 40960, 120]),
        (8192, [6144, 2048, 8192, 24]),
        (2048, [1536, 512, 2048, 6]),
        (64, [48, 16, 64, 1]),
    ],
)
def test_prompt_and_output_fit_the_model(tmp_path: Path, own: int, expected: list[int]) -> None:
    found = limits(tmp_path, own)
    assert shown(found) == expected
    assert found["prompt_reserve_tokens"] == min(1024, expected[0] // 8)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--max_new_tokens 1024", [7168, None, 8192, 28]),
        ("--max_prompt_tokens 7000", [None, 1192, 8192, 27]),
        ("--max_tokens 4096", [3072, 1024, None, 12]),
        ("--max_prompt_tokens 3000 --max_new_tokens 1000 --max_turns 9", [None, None, 4000, None]),
        ("--max_model_len 1024", [768, 256, 1024, 3]),
    ],
)
def test_a_limit_that_is_given_moves_the_others(
    tmp_path: Path, words: str, expected: list[int | None]
) -> None:
    assert shown(limits(tmp_path, 8192, *words.split())) == expected


def test_memory_limits_a_long_context(tmp_path: Path) -> None:
    assert shown(limits(tmp_path, 262144, longest=16384)) == [12288, 4096, 16384, 48]


def test_a_limit_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max_prompt_tokens is 9000, and prompt and output have 8192"):
        limits(tmp_path, 8192, "--max_prompt_tokens", "9000")


def test_the_reserve_fits_a_short_prompt_that_is_given() -> None:
    assert AgentConfig(max_prompt_tokens=1024).prompt_reserve_tokens == 128
    assert AgentConfig(max_prompt_tokens=1025).prompt_reserve_tokens == 1024
    with pytest.raises(ConfigError, match="leaves nothing beside --prompt_reserve_tokens 600"):
        AgentConfig(max_prompt_tokens=512, prompt_reserve_tokens=600)
