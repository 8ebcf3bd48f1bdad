"""Turn stored images into the input of a vision tower, by the image processor of the model's folder."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.data.forest import TokenForest
from agentrl.documents.images import Image, picture_of
from agentrl.errors import ForestError, ModelError

_CACHED_BYTES = 512 * 2**20
"""Pixels that stay in memory: the trajectories of a group show the same images."""


def attach_pixels(
    forest: TokenForest, reader: PixelReader | None, images: Mapping[str, Image]
) -> TokenForest:
    """Return the forest with the pixels of its images.

    Raises ForestError for an image that is missing, or whose grid is not that of its tokens.
    """
    if forest.images is None:
        return forest
    if reader is None:
        raise ForestError(
            f"the data hold {len(forest.images.images)} images, and the model reads text only",
            hint="train the model that the trajectories were sampled with",
        )
    pixels = {}
    for item in forest.images.images:
        if item.sha256 not in images:
            raise ForestError(
                f"the image {item.sha256[:12]}… of the data is not stored", hint="load the tasks again"
            )
        pixels[item.sha256], grid = reader.read(images[item.sha256])
        if grid != item.grid:
            raise ForestError(
                f"the image {item.sha256[:12]}… has the grid {grid}, and was sampled with {item.grid}",
                hint="sample and train with the same preprocessor_config.json",
            )
    return replace(forest, images=forest.images.with_pixels(pixels))


class PixelReader:
    """Computes and caches the patches of images, float32[patches, values]."""

    def __init__(self, folder: str | Path) -> None:
        """Load the image processor. Raises ModelError for a folder without one."""
        from transformers import AutoImageProcessor

        loader: Any = AutoImageProcessor
        try:
            self._processor: Any = loader.from_pretrained(str(folder), backend="pil")
        except (OSError, ValueError, ImportError) as error:
            raise ModelError(
                f"{folder} has no image processor that can be loaded: {error}",
                hint="copy preprocessor_config.json of the model into the folder",
            ) from error
        self._cached: OrderedDict[str, tuple[NDArray[np.float32], tuple[int, ...]]] = OrderedDict()
        self._bytes = 0

    def read(self, image: Image) -> tuple[NDArray[np.float32], tuple[int, ...]]:
        """Return the patches of an image and its grid (1, rows, columns). Raises ImageError."""
        found = self._cached.get(image.id)
        if found is not None:
            self._cached.move_to_end(image.id)
            return found
        made = self._processor(images=[picture_of(image)], return_tensors="np")
        pixels = np.asarray(made["pixel_values"], np.float32)
        found = pixels, tuple(int(side) for side in made["image_grid_thw"][0])
        self._cached[image.id] = found
        self._bytes += pixels.nbytes
        while self._bytes > _CACHED_BYTES and len(self._cached) > 1:
            _, (old, _) = self._cached.popitem(last=False)
            self._bytes -= old.nbytes
        return found
