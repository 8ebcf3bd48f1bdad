"""Read a JSONL file of conversations, with images, as token ids and a mask of what the assistant says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.chat.chat_format import TRAIN, ChatFormat, Message, TokenizedConversation, split_train
from agentrl.documents.images import MARKER, Image
from agentrl.documents.task_messages import MAX_TASK_IMAGES, kind_of, read_images
from agentrl.errors import ImageError, TaskFileError, TrajectoryError

_IMAGE_KEYS = ("image", "image_url", "url", "path")
"""Keys under which an image part of other systems names its source."""


def show_images(messages: list[Message], images: Any, folder: Path) -> tuple[list[Message], list[Image]]:
    """Return messages whose image parts name stored images, and those images, in order.

    An image part has its own source (``image``, ``image_url``); one without, and each ``<image>`` in a text
    if the line has ``images``, shows the next of them. Raises ValueError and BadTaskError.
    """
    listed = iter(read_images(_sources(images), folder))
    shown: list[Image] = []

    def part_of(image: Image) -> dict[str, Any]:
        shown.append(image)
        return image.ref.part()

    def next_part() -> dict[str, Any]:
        image = next(listed, None)
        if image is None:
            raise ValueError("it shows more images than its 'images' has")
        return part_of(image)

    def parts_of(item: Any) -> Iterator[dict[str, Any]]:
        if isinstance(item, str) or item.get("type") in ("text", "input_text"):
            text = item if isinstance(item, str) else str(item.get("text", ""))
            for index, piece in enumerate(text.split(MARKER) if images else [text]):
                if index:
                    yield next_part()
                if piece:
                    yield {"type": "text", "text": piece}
        elif item.get("type") in ("image", "image_url", "input_image"):
            source = _source(item)
            yield next_part() if source is None else part_of(read_images([source], folder)[0])
        else:
            raise ValueError(f"a part of a message has the type {item.get('type')!r}")

    prepared = []
    for message in messages:
        content = message.get("content")
        items = content if isinstance(content, list) else [content] if images and content else []
        parts = [part for item in items for part in parts_of(item)]
        has_images = any(part["type"] == "image" for part in parts)
        prepared.append({**message, "content": parts} if has_images else message)
    if next(listed, None) is not None:
        raise ValueError(f"its 'images' has more images than its messages show ({len(shown)})")
    return prepared, shown


def _sources(images: Any) -> list[str]:
    """Return a line's field ``images``. Raises ValueError."""
    if images is None:
        return []
    if not isinstance(images, list) or not all(isinstance(source, str) and source for source in images):
        raise ValueError(f"'images' is {kind_of(images)}; give a list of paths or data: URLs")
    if len(images) > MAX_TASK_IMAGES:
        raise ValueError(f"'images' has {len(images)} images; at most {MAX_TASK_IMAGES} are allowed")
    return images


def _source(part: Mapping[str, Any]) -> str | None:
    named = next((part[key] for key in _IMAGE_KEYS if part.get(key)), None)
    source = named.get("url") if isinstance(named, Mapping) else named
    if source is not None and not isinstance(source, str):
        raise ValueError(f"an image is {type(source).__name__}; give a path or a data: URL")
    return source


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
