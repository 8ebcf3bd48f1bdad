"""Read the images that a task of a file names: paths relative to the file, or ``data:`` URLs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from agentrl.documents.bad_task import BadTaskError
from agentrl.documents.images import Image, ImageRef
from agentrl.documents.read_image import image_of_file, image_of_url
from agentrl.errors import ImageError

MAX_TASK_IMAGES: Final = 64
"""Images of one task."""


def image_refs_of(sources: Sequence[str], folder: Path | None) -> tuple[ImageRef, ...]:
    """Return the images of a task's field ``images``, after decoding each. Raises BadTaskError."""
    return tuple(_ref(source, folder, f"images[{place}]") for place, source in enumerate(sources))


def read_images(sources: Sequence[str], folder: Path | None) -> list[Image]:
    """Return the same images with their bytes. Raises BadTaskError."""
    return [_read(source, folder, f"images[{place}]") for place, source in enumerate(sources)]


def _read(source: str, folder: Path | None, where: str) -> Image:
    try:
        if source[:5].lower() == "data:" or "://" in source[:10]:
            return image_of_url(source, where=where)
        return image_of_file(_path(source, folder, where))
    except ImageError as error:
        raise BadTaskError(f"{error.message} ({error.hint})" if error.hint else error.message) from error


def _ref(source: str, folder: Path | None, where: str) -> ImageRef:
    if source[:5].lower() == "data:" or "://" in source[:10]:
        return _read(source, folder, where).ref
    path = _path(source, folder, where)
    try:
        state = path.stat()
    except OSError:
        return _read(source, folder, where).ref
    return _ref_of_file(source, folder, where, (state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=65536)
def _ref_of_file(source: str, folder: Path | None, where: str, state: tuple[int, int]) -> ImageRef:
    """Return the reference of a file, which is read again if its time or size has changed."""
    return _read(source, folder, where).ref


def _path(source: str, folder: Path | None, where: str) -> Path:
    if folder is None and not Path(source).is_absolute():
        raise BadTaskError(f"{where} is a path, and these tasks come from no file: give a data: URL")
    return (folder or Path()) / source
