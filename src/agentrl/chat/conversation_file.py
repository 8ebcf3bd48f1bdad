"""Read a JSONL file of conversations as token ids, with a mask of the tokens that the assistant says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.chat.chat_format import TRAIN, ChatFormat, Message, TokenizedConversation, split_train
from agentrl.chat.conversation_images import show_images
from agentrl.documents.images import Image
from agentrl.errors import ImageError, TaskFileError, TrajectoryError

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which files hold a message's reasoning; templates read one of the first two."""


_WEIGHT = "weight"


def read_conversations(
    path: Path, chat_format: ChatFormat
) -> tuple[list[TokenizedConversation], dict[str, Image]]:
    """Render the ``messages`` (and ``tools``) of every line; return them, and their images by hash.

    An assistant message with ``train: false`` or ``weight: 0`` is context: it is not in the mask. Raises
    TaskFileError with file, line and reason: not JSON, no messages, no assistant message to train, or a
    template that does not render the start of a conversation as a prefix of the whole.
    """
    conversations: list[TokenizedConversation] = []
    images: dict[str, Image] = {}
    for number, line in _lines(path):
        try:
            item = json.loads(line)
            messages, shown = show_images(_messages(item), item.get("images"), path.parent)
            conversations.append(chat_format.tokenize(messages, item.get("tools")))
        except (ValueError, TrajectoryError, ImageError) as error:
            raise TaskFileError(
                f"{path}:{number}: {error}", hint='a line is {"messages": [{"role": …, "content": …}, …]}'
            ) from error
        images |= {image.id: image for image in shown}
    if not conversations:
        raise TaskFileError(f"{path} holds no conversation", hint="give a JSONL file with one on each line")
    return conversations, images


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
    prepared = [_with_reasoning(_with_train(message)) for message in messages]
    if not any(split_train(prepared)[1]):
        raise ValueError("it has no assistant message that is trained: there is nothing to learn")
    return prepared


def _with_train(message: Message) -> Message:
    """Return the message with ``train: false`` if it is not trained; ``weight: 0`` says the same."""
    train = message.get(TRAIN, True)
    weight = message.get(_WEIGHT, 1)
    if not isinstance(train, bool):
        raise ValueError(f"train is {train!r}; it must be true or false")
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ValueError(f"weight is {weight!r}; it must be 0 or 1")
    rest = {key: value for key, value in message.items() if key != _WEIGHT}
    return rest if train and weight else {**rest, TRAIN: False}


def _with_reasoning(message: Message) -> Message:
    reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
