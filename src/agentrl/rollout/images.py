"""Keep the images of trajectories: the store's part that rollouts and gateways need, and one in memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from agentrl.documents.images import Image, ImageSpan
from agentrl.errors import ImageError


class ImageStore(Protocol):
    """Stores images by hash: ``Store.images``."""

    async def put(self, *images: Image) -> None:
        """Store images. Idempotent."""
        ...

    async def get(self, hashes: Collection[str]) -> dict[str, Image]:
        """Return images by hash. Raises ImageError for one that is not stored."""
        ...


class MemoryImages:
    """Images of a process without a database."""

    def __init__(self) -> None:
        self._images: dict[str, Image] = {}

    async def put(self, *images: Image) -> None:
        """Keep images."""
        self._images |= {image.id: image for image in images}

    async def get(self, hashes: Collection[str]) -> dict[str, Image]:
        """Return images by hash. Raises ImageError for an unknown one."""
        unknown = [key for key in hashes if key not in self._images]
        if unknown:
            raise ImageError(f"the image {unknown[0][:12]}… is not stored", hint="load the tasks again")
        return {key: self._images[key] for key in hashes}


async def images_of(store: ImageStore, spans: Sequence[ImageSpan]) -> list[Image]:
    """Return the images of a prompt, in order."""
    if not spans:
        return []
    found = await store.get({span.sha256 for span in spans})
    return [found[span.sha256] for span in spans]
