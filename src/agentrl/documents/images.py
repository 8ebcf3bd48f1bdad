"""Define images: the part of a message, the tokens and the bytes of one; read the bytes of others safely."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import stat
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentrl.documents.document import Document, Root, now
from agentrl.errors import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


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


def joined(pieces: Sequence[str | Part], between: str = "") -> Any:
    """Return texts as one text, or as parts if there are images among them."""
    if all(isinstance(piece, str) for piece in pieces):
        return between.join(str(piece) for piece in pieces)
    content: Any = ""
    for piece in pieces:
        content = appended(content, piece if isinstance(piece, str) else [piece], between)
    return content


def appended(content: Any, more: Any, between: str) -> Any:
    """Return two contents as one; texts that meet have ``between`` between them."""
    if isinstance(content, str) and isinstance(more, str):
        return f"{content}{between}{more}"
    parts = [*_as_parts(content)]
    for part in _as_parts(more):
        if parts and parts[-1]["type"] == part["type"] == "text":
            parts[-1] = {"type": "text", "text": f"{parts[-1]['text']}{between}{part['text']}"}
        else:
            parts.append(part)
    return parts


def _as_parts(content: Any) -> list[Part]:
    return content if isinstance(content, list) else _text_parts(content)


MARKER = "<image>"
"""Where an image of a task's question belongs, if the question has one for each image."""


def _parts(message: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else ()


def _text_parts(text: str) -> list[Part]:
    return [{"type": "text", "text": text}] if text else []


MAX_IMAGE_BYTES: Final = 10 * 2**20
"""Largest image, in bytes as it is sent."""

MAX_IMAGE_PIXELS: Final = 16 * 2**20
"""Largest image, in pixels; a larger one is not decoded. Models scale images down further."""

MAX_ASPECT: Final = 200
"""Largest ratio of the longer to the shorter side that Qwen-VL models take."""

_FORMATS: Final = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif",
                   "BMP": "image/bmp"}  # fmt: skip
_KEPT: Final = ("image/png", "image/jpeg", "image/webp")
_DATA_URL: Final = re.compile(r"data:(image/[\w.+-]+)?(;[\w=.+-]+)*;base64,", re.IGNORECASE)
_ORIENTATION: Final = 0x0112
_SHOWN: Final = 60


def image_of_url(url: str, *, where: str = "the image") -> Image:
    """Return the image of a ``data:`` URL. Raises ImageError for other URLs and other data."""
    header = _DATA_URL.match(url)
    if header is None:
        raise ImageError(
            f"{where} is at {url[:_SHOWN]!r}, and images are not fetched from anywhere",
            hint="send its bytes: a URL data:image/png;base64,…",
        )
    return image_of_base64(url[header.end() :], where=where)


def image_of_base64(text: str, *, where: str = "the image") -> Image:
    """Return the image whose bytes are base64 in ``text``. Raises ImageError."""
    # Measure the text first: decoding copies it, and whoever sends it chose its length.
    if len(text) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise _too_large(where, len(text) * 3 // 4)
    try:
        # Take white space out: MIME encoders break lines, which validate refuses.
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"{where} is not base64: {error}", hint="encode the file's bytes") from error
    return image_of_bytes(data, where=where)


def image_of_file(path: Path) -> Image:
    """Return the image of a file. Raises ImageError."""
    try:
        state = path.stat()
        # Ask before reading: a pipe without a writer never answers, and /dev/zero never ends.
        if not stat.S_ISREG(state.st_mode):
            raise ImageError(f"the image {path} is not a file", hint="name a PNG, JPEG or WebP file")
        if state.st_size > MAX_IMAGE_BYTES:
            raise _too_large(str(path), state.st_size)
        data = path.read_bytes()
    except OSError as error:
        raise ImageError(
            f"the image {path} cannot be read: {error.strerror}", hint="paths are relative to the task file"
        ) from error
    return image_of_bytes(data, where=str(path))


def image_of_bytes(data: bytes, *, where: str = "the image") -> Image:
    """Return the image that ``data`` encodes. Raises ImageError for what is too large or no image.

    PNG, JPEG and WebP keep their bytes. An image that readers may decode differently (rotated by its EXIF
    data, animated, with transparency or a palette) is encoded again: upright RGB, its first frame, as PNG.
    """
    if len(data) > MAX_IMAGE_BYTES:
        raise _too_large(where, len(data))
    picture = _opened(data, where)
    media_type = _FORMATS[str(picture.format)]
    # Look now: the decoded picture below is upright RGB and has lost format, frames and EXIF data.
    is_plain = (
        media_type in _KEPT
        and picture.mode in ("RGB", "L")
        and getattr(picture, "n_frames", 1) == 1
        and picture.getexif().get(_ORIENTATION, 1) == 1
    )
    # Decode it even where its bytes are kept: a file that was cut has a sound header.
    picture = decoded(picture, where)
    if not is_plain:
        stream = io.BytesIO()
        picture.save(stream, format="PNG")
        # Measure it again below: the pixels of a small file may be a PNG beyond the limit.
        data, media_type = stream.getvalue(), "image/png"
        if len(data) > MAX_IMAGE_BYTES:
            raise _too_large(f"{where}, encoded as PNG,", len(data))
    return Image(
        id=hashlib.sha256(data).hexdigest(),
        media_type=media_type,
        width=picture.width,
        height=picture.height,
        data=data,
    )


def picture_of(image: Image) -> Picture:
    """Return the decoded image, upright RGB. Raises ImageError if its bytes are damaged."""
    if hashlib.sha256(image.data).hexdigest() != image.id:
        raise ImageError(
            f"the stored image {image.id[:12]}… has other bytes than its hash says",
            hint="it was altered: load the tasks again",
        )
    return decoded(_opened(image.data, f"the image {image.id[:12]}…"), f"the image {image.id[:12]}…")


def data_url(image: Image) -> str:
    """Return the ``data:`` URL of an image."""
    return f"data:{image.media_type};base64,{base64.b64encode(image.data).decode('ascii')}"


def decoded(picture: Picture, where: str) -> Picture:
    """Return the pixels: the first frame, turned by its EXIF orientation, on white, as RGB."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    _silence_pillow()
    try:
        picture.seek(0)
        picture.load()
        upright = ImageOps.exif_transpose(picture)
        if upright.has_transparency_data:
            upright = upright.convert("RGBA")
            white = Pillow.new("RGBA", upright.size, "white")
            upright = Pillow.alpha_composite(white, upright)
        return upright.convert("RGB")
    # Catch everything: for damaged files Pillow raises SyntaxError, struct.error and others beside OSError.
    except Exception as error:
        raise ImageError(
            f"{where} cannot be decoded: {type(error).__name__}: {str(error)[:_SHOWN]}",
            hint="check that the file is complete",
        ) from error


def _opened(data: bytes, where: str) -> Picture:
    """Return the image with its header read; its pixels are not decoded yet."""
    try:
        from PIL import Image as Pillow
    except ImportError as error:
        raise ImageError("images need Pillow", hint="pip install 'pillow>=11'") from error
    _silence_pillow()  # the limit below is stricter than Pillow's
    try:
        # Name the formats: Pillow has more, and for EPS it starts Ghostscript on what others sent.
        picture = Pillow.open(io.BytesIO(data), formats=tuple(_FORMATS))
    except Exception as error:
        raise ImageError(
            f"{where} is not an image that can be read ({len(data):,} bytes)",
            hint=f"use one of {', '.join(_FORMATS)}",
        ) from error
    width, height = picture.size
    if width * height > MAX_IMAGE_PIXELS:
        raise ImageError(
            f"{where} has {width} × {height} pixels; at most {MAX_IMAGE_PIXELS:,} are decoded",
            hint="scale it down: models do so anyway",
        )
    if min(width, height) < 1 or max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageError(
            f"{where} has {width} × {height} pixels: one side is more than {MAX_ASPECT} times the other",
            hint="cut it into several images",
        )
    return picture


def _silence_pillow() -> None:
    """Ignore the warnings of Pillow, and of nothing else, for the rest of the process.

    Images are decoded in threads, and of two blocks of ``catch_warnings`` that overlap the second one would
    leave all warnings of the process ignored.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")


def _too_large(where: str, size: int) -> ImageError:
    return ImageError(
        f"{where} has {size:,} bytes; the limit is {MAX_IMAGE_BYTES:,}", hint="scale it down, or send a JPEG"
    )
