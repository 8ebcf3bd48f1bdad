"""Read an image from outside: check its size and format, normalize what readers decode differently."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agentrl.documents.images import Image
from agentrl.errors import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

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
    found = _DATA_URL.match(url)
    if found is None:
        raise ImageError(
            f"{where} is at {url[:_SHOWN]!r}, and images are not fetched from anywhere",
            hint="send its bytes: a URL data:image/png;base64,…",
        )
    return image_of_base64(url[found.end() :], where=where)


def image_of_base64(text: str, *, where: str = "the image") -> Image:
    """Return the image whose bytes are base64 in ``text``. Raises ImageError."""
    if len(text) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise _too_large(where, len(text) * 3 // 4)
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"{where} is not base64: {error}", hint="encode the file's bytes") from error
    return image_of_bytes(data, where=where)


def image_of_file(path: Path) -> Image:
    """Return the image of a file. Raises ImageError."""
    try:
        size = path.stat().st_size
        if size > MAX_IMAGE_BYTES:
            raise _too_large(str(path), size)
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
    is_plain = (
        media_type in _KEPT
        and picture.mode in ("RGB", "L")
        and getattr(picture, "n_frames", 1) == 1
        and picture.getexif().get(_ORIENTATION, 1) == 1
    )
    picture = decoded(picture, where)
    if not is_plain:
        stream = io.BytesIO()
        picture.save(stream, format="PNG")
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

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            picture.seek(0)
            picture.load()
            upright = ImageOps.exif_transpose(picture)
            if upright.has_transparency_data:
                upright = upright.convert("RGBA")
                white = Pillow.new("RGBA", upright.size, "white")
                upright = Pillow.alpha_composite(white, upright)
            return upright.convert("RGB")
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
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the limit below is stricter than Pillow's
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


def _too_large(where: str, size: int) -> ImageError:
    return ImageError(
        f"{where} has {size:,} bytes; the limit is {MAX_IMAGE_BYTES:,}", hint="scale it down, or send a JPEG"
    )
