"""Images in a forest: their pixels, their features in place of image tokens, and M-RoPE positions.

The tower computes each image of a micro-batch once, however many trajectories show it. Attention among the
tokens is that of any forest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.data.forest import ForestImages, TokenForest, rope_positions
from agentrl.documents.images import Image, picture_of
from agentrl.errors import ForestError, ModelError

VISION_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
"""``model_type`` of the models whose images can be trained."""
_CACHED_BYTES = 512 * 2**20
"""Pixels that stay in memory: the trajectories of a group show the same images."""


def forest_inputs(model: Any, forest: TokenForest) -> dict[str, Any]:
    """Return the decoder's inputs for all tokens of ``forest`` in one row.

    Without images they are ``input_ids`` and ``position_ids`` [1, N]. Raises ModelError for a model that
    reads text only, and ForestError for images without pixels.
    """
    device = model.device
    ids = torch.from_numpy(forest.input_ids).to(device)[None]
    if forest.images is None:
        return {"input_ids": ids, "position_ids": torch.from_numpy(forest.position_ids).to(device)[None]}
    if not reads_images(model.config):
        raise ModelError(
            f"{type(model).__name__} reads text only, and the data hold {len(forest.images.images)} images",
            hint="train a Qwen-VL model, or sample without images",
        )
    positions = rope_positions(forest.images, forest.position_ids, forest.subtree_end)
    return {
        "position_ids": torch.from_numpy(positions).to(device)[:, None],
        **_embeddings(model, ids, forest.images),
    }


def _embeddings(model: Any, ids: Tensor, images: ForestImages) -> dict[str, Any]:
    """Return ``inputs_embeds`` [1, N, H], and what Qwen3-VL adds to its first layers."""
    device = ids.device
    features, deep = image_features(model, images)
    starts = np.concatenate([[0], np.cumsum([image.tokens for image in images.images])])
    tokens = np.flatnonzero(images.image >= 0)
    rows = torch.from_numpy(starts[images.image[tokens]] + images.offset[tokens]).to(device)
    # Place the features here: the model itself wants each image's tokens once, and trajectories share images.
    embeds = model.get_input_embeddings()(ids)
    indices = torch.from_numpy(tokens).to(device)
    embeds = embeds[0].index_copy(0, indices, features[rows].to(embeds.dtype))[None]
    inputs: dict[str, Any] = {"inputs_embeds": embeds}
    if deep is not None:
        mask = torch.zeros(ids.shape, dtype=torch.bool, device=device)
        mask[0, indices] = True
        inputs |= {"visual_pos_masks": mask, "deepstack_visual_embeds": [layer[rows] for layer in deep]}
    return inputs


def image_features(model: Any, images: ForestImages) -> tuple[Tensor, list[Tensor] | None]:
    """Return the features [tokens of all images, H] with gradient, and those of Qwen3-VL's further layers."""
    pixels = [image.pixels for image in images.images if image.pixels is not None]
    if len(pixels) < len(images.images):
        raise ForestError("images without pixels", hint="attach them by ForestImages.with_pixels")
    grids = torch.tensor([image.grid for image in images.images], device=model.device)
    output = model.get_image_features(
        torch.from_numpy(np.concatenate(pixels)).to(model.device), grids, return_dict=True
    )
    pooled = output.pooler_output
    features = torch.cat(list(pooled)) if isinstance(pooled, (tuple, list)) else pooled
    deep = getattr(output, "deepstack_features", None)
    if deep is None:
        return features, None
    return features, [torch.cat(list(layer)) if isinstance(layer, (tuple, list)) else layer for layer in deep]


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
            # Ask for Pillow's: with torchvision installed transformers takes that one, whose pixels differ.
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


def reads_images(config: object) -> bool:
    """Return whether a model with this configuration is one of those whose images can be trained."""
    return getattr(config, "model_type", None) in VISION_TYPES
