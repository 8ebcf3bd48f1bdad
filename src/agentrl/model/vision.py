"""Run a forest with images: the vision tower's features in place of the image tokens, and M-RoPE positions.

The tower computes each image of a micro-batch once, however many trajectories show it. Attention among the
tokens is that of any forest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.data.forest import TokenForest
from agentrl.data.forest_images import ForestImages, rope_positions
from agentrl.errors import ForestError, ModelError
from agentrl.model.load import reads_images


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
    rows = torch.from_numpy(starts[images.image[tokens]] + images.place[tokens]).to(device)
    embeds = model.get_input_embeddings()(ids)
    places = torch.from_numpy(tokens).to(device)
    embeds = embeds[0].index_copy(0, places, features[rows].to(embeds.dtype))[None]
    inputs: dict[str, Any] = {"inputs_embeds": embeds}
    if deep is not None:
        mask = torch.zeros(ids.shape, dtype=torch.bool, device=device)
        mask[0, places] = True
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
