"""Read the images of a conversation in a file: paths relative to it, or ``data:`` URLs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.chat.chat_format import Message
from agentrl.documents.images import MARKER, Image
from agentrl.documents.task_messages import MAX_TASK_IMAGES, kind_of, read_images

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
            for place, piece in enumerate(text.split(MARKER) if images else [text]):
                if place:
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
    found = next((part[key] for key in _IMAGE_KEYS if part.get(key)), None)
    source = found.get("url") if isinstance(found, Mapping) else found
    if source is not None and not isinstance(source, str):
        raise ValueError(f"an image is {type(source).__name__}; give a path or a data: URL")
    return source
