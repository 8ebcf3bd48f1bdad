"""Define images: the part of a message that names one, its bytes, and its tokens in a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from agentrl.documents.base import Document, Root, now

Part = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRef(Document):
    """An image by its hash, as tasks, messages and tool results name it."""

    sha256: str
    media_type: str
    width: int
    height: int

    def part(self) -> Part:
        """Return the part of a message that shows this image."""
        return {"type": "image", **self.to_document()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Image(Root):
    """The bytes of an image. ``id`` is their SHA-256 hash, so that each image is stored once."""

    id: str
    media_type: str
    width: int
    height: int
    data: bytes
    created_at: datetime = field(default_factory=now)
    used_at: datetime = field(default_factory=now)
    """When it was last put; images in use are kept (``agentrl db prune``)."""

    @property
    def ref(self) -> ImageRef:
        """Return what messages name it by."""
        return ImageRef(sha256=self.id, media_type=self.media_type, width=self.width, height=self.height)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan(Document):
    """The tokens ``[start, start + tokens)`` of a sequence that stand for one image; never trained."""

    sha256: str
    start: int
    tokens: int
    grid: tuple[int, ...]
    """Patches of the image: (1, rows, columns), before the model merges neighbours to a token."""

    def moved(self, by: int) -> ImageSpan:
        """Return the span ``by`` tokens later."""
        return ImageSpan(sha256=self.sha256, start=self.start + by, tokens=self.tokens, grid=self.grid)


def image_refs(messages: Iterable[Mapping[str, Any]]) -> list[ImageRef]:
    """Return the images in the contents of messages, in order."""
    return [
        ImageRef.from_document(part)
        for message in messages
        for part in _parts(message)
        if part.get("type") == "image"
    ]


def has_images(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a message shows an image."""
    return any(part.get("type") == "image" for message in messages for part in _parts(message))


def text_of(content: Any) -> str:
    """Return the text of a message's content, without its images."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if part.get("type") == "text")
    return content or ""


def content_with(text: str, images: Sequence[ImageRef]) -> str | list[Part]:
    """Return a message's content: the images before the text, or in the place of each ``<image>`` in it."""
    if not images:
        return text
    pieces = text.split(MARKER)
    if len(pieces) - 1 != len(images):
        return [*(image.part() for image in images), *_text_parts(text)]
    content = _text_parts(pieces[0])
    for image, piece in zip(images, pieces[1:], strict=True):
        content += [image.part(), *_text_parts(piece)]
    return content


MARKER = "<image>"
"""Where an image of a task's question belongs, if the question has one for each image."""


def _parts(message: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else ()


def _text_parts(text: str) -> list[Part]:
    return [{"type": "text", "text": text}] if text else []
