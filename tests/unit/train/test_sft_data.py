"""Conversations as training data: the assistant's tokens are spans of one chain."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_policy import MARKED_TEMPLATE, TEMPLATE, tiny_format

from agentrl.chat.conversation_file import read_conversations
from agentrl.data.forest import forest_from_data
from agentrl.train.sft import from_conversations

MESSAGES = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "call"},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "four"},
]


@pytest.mark.parametrize("template", [TEMPLATE, MARKED_TEMPLATE])
def test_what_the_assistant_says_becomes_spans(tmp_path: Path, template: str) -> None:
    chat_format = tiny_format(template)
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in (MESSAGES, MESSAGES[:2])))
    data, _ = from_conversations(path, chat_format)
    assert [(item.id, len(item.spans)) for item in data] == [("c.jsonl:1", 2), ("c.jsonl:2", 1)]
    forest = forest_from_data(data, vocab_size=259)
    expected, _ = read_conversations(path, chat_format)
    assert np.array_equal(forest.input_ids, np.concatenate([item.input_ids for item in expected]))
    assert np.array_equal(forest.target, np.flatnonzero(np.concatenate([c.is_trainable for c in expected])))
    assert forest.trajectories == 2
