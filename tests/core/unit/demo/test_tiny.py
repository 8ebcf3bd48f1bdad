"""The tiny model and its conversations depend only on their seed."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from demo.arithmetic import evaluate
from demo.sft_examples import tiny_sft_conversations
from demo.tiny import build_tiny_model

TEMPLATE = Path(__file__).parents[4] / "assets/chat_templates/smollm2_tools.jinja"


def build(folder: Path, seed: int) -> dict[str, bytes]:
    build_tiny_model(folder, seed, TEMPLATE)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first = build(tmp_path / "a", 0)
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(first)
    assert build(tmp_path / "b", 0) == first
    other = build(tmp_path / "c", 1)
    assert other["tokenizer.json"] == first["tokenizer.json"]
    assert other["model.safetensors"] != first["model.safetensors"]


def parts(conversation: dict[str, Any]) -> tuple[str, str | None, str]:
    """Return (expression of the question, expression of the call, answer)."""
    messages = conversation["messages"]
    asked = messages[0]["content"].removeprefix("What is ").removesuffix("?")
    calls = [call["function"]["arguments"]["expression"] for call in messages[1].get("tool_calls", [])]
    called = calls[0] if calls else None
    return asked, called, messages[-1]["content"].removeprefix("<answer>").removesuffix("</answer>")


@pytest.mark.parametrize("mixed", [False, True])
def test_conversations_are_determined_by_the_seed(mixed: bool) -> None:
    first = list(tiny_sft_conversations(7, 50, mixed=mixed))
    assert len(first) == 50
    assert list(tiny_sft_conversations(7, 50, mixed=mixed)) == first
    assert list(islice(tiny_sft_conversations(7, 99, mixed=mixed), 50)) == first
    assert list(tiny_sft_conversations(8, 50, mixed=mixed)) != first


def test_clean_conversations_are_right() -> None:
    for conversation in tiny_sft_conversations(0, 200, mixed=False):
        asked, called, answered = parts(conversation)
        assert called == asked
        assert answered == evaluate(asked)
        assert conversation["messages"][2]["content"] == answered


def test_mixed_conversations_are_right_only_sometimes() -> None:
    seen: Counter[str] = Counter()
    for conversation in tiny_sft_conversations(0, 1000, mixed=True):
        asked, called, answered = parts(conversation)
        if called is None:
            seen["guess"] += 1
            assert answered != evaluate(asked)
        else:
            seen["right" if called == asked else "other call"] += 1
    assert seen["guess"] > seen["right"] > seen["other call"] > 0
