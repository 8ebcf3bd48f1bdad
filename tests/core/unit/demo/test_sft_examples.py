"""assets/sft contains what its script writes: conversations with the tool."""

from __future__ import annotations

import json
from pathlib import Path

from demo.sft_examples import COUNTS, SFT_DIR, example_files, main
from demo.tasks import CALCULATOR_TOOLS

ROOT = Path(__file__).parents[4]


def test_the_files_are_those_that_the_script_writes(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == set(COUNTS) == {path.name for path in (ROOT / SFT_DIR).iterdir()}
    for name in names:
        assert (tmp_path / name).read_bytes() == (ROOT / SFT_DIR / name).read_bytes()


def test_every_line_is_a_conversation_with_the_tool() -> None:
    for name, lines in example_files().items():
        assert len(lines) == COUNTS[name]
        conversations = [json.loads(line) for line in lines]
        assert all(item["tools"] == CALCULATOR_TOOLS for item in conversations)
        calls = [any("tool_calls" in message for message in item["messages"]) for item in conversations]
        assert all(calls) is (name != "tiny_mixed.jsonl")
        assert 0.2 < sum(calls) / len(calls) <= 1.0
