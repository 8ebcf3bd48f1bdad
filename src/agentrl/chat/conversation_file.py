"""Read a JSONL file of conversations as token ids, with a mask of the tokens that the assistant says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.chat.renderer import ChatRenderer, Message
from agentrl.errors import TaskFileError, TrajectoryError

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which files hold a message's reasoning; templates read one of the first two."""


@dataclass(frozen=True)
class TokenizedConversation:
    """``input_ids`` int64[n]; ``is_trainable`` bool[n] marks the tokens of assistant messages."""

    input_ids: NDArray[np.int64]
    is_trainable: NDArray[np.bool_]


def read_conversations(path: Path, renderer: ChatRenderer) -> list[TokenizedConversation]:
    """Render the ``messages`` (and ``tools``) of every line.

    Raises TaskFileError with file, line and reason: not JSON, no messages, no assistant message, or a
    template that does not render the start of a conversation as a prefix of the whole.
    """
    conversations = []
    for number, line in _lines(path):
        try:
            item = json.loads(line)
            conversations.append(_tokenize(renderer, _messages(item), item.get("tools")))
        except (ValueError, TrajectoryError) as error:
            raise TaskFileError(
                f"{path}:{number}: {error}", hint='a line is {"messages": [{"role": …, "content": …}, …]}'
            ) from error
    if not conversations:
        raise TaskFileError(f"{path} holds no conversation", hint="give a JSONL file with one on each line")
    return conversations


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskFileError(f"{path} cannot be read: {error}", hint="give a JSONL file in UTF-8") from error
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _messages(item: Any) -> list[Message]:
    messages = item.get("messages") if isinstance(item, dict) else None
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError("it has no list of messages with roles")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("it has no assistant message: there is nothing to learn")
    return [_with_reasoning(message) for message in messages]


def _with_reasoning(message: Message) -> Message:
    reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _tokenize(
    renderer: ChatRenderer, messages: Sequence[Message], tools: list[Any] | None
) -> TokenizedConversation:
    if renderer.marks_assistant:
        ids, mask = renderer.encode_marked(*renderer.render_marked(messages, tools))
    else:
        ids, mask = _mask_by_prefixes(renderer, messages, tools)
    return TokenizedConversation(np.asarray(ids, np.int64), np.asarray(mask, np.bool_))


def _mask_by_prefixes(
    renderer: ChatRenderer, messages: Sequence[Message], tools: list[Any] | None
) -> tuple[list[int], list[bool]]:
    """Mark what each assistant message adds to the prompt before it, up to its last closing token."""
    whole = renderer.encode(renderer.render(messages, tools, add_generation_prompt=False))
    mask = [False] * len(whole)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = renderer.encode(renderer.render(messages[:index], tools, add_generation_prompt=True))
        spoken = renderer.encode(renderer.render(messages[: index + 1], tools, add_generation_prompt=False))
        if whole[: len(spoken)] != spoken or spoken[: len(prompt)] != prompt:
            raise ValueError(
                f"the chat template does not render messages up to {index} as a prefix of the conversation"
            )
        start, end = len(prompt), len(spoken)
        closings = [place for place in range(start, end) if spoken[place] in renderer.eos_ids]
        if closings:
            end = closings[-1] + 1
        mask[start:end] = [True] * (end - start)
    return whole, mask
