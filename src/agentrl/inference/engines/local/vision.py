"""Read the images of a request to the local engine, and make a batch's embeddings and M-RoPE positions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.chat.vision import Vision
from agentrl.data.forest_images import ForestImages, images_of_spans, rope_positions
from agentrl.documents.images import Image, ImageSpan
from agentrl.errors import ImageError
from agentrl.inference.engines.local.cache import Slot
from agentrl.model.vision import PixelReader, image_features


@dataclass(slots=True, eq=False)
class RequestImages:
    """The images of one request, and the positions of its tokens."""

    images: ForestImages
    """Of the prompt's tokens."""
    positions: NDArray[np.int64]
    """int64[3, prompt tokens]."""
    _features: tuple[Any, Tensor, list[Tensor] | None] | None = field(default=None)

    def positions_of(self, start: int, end: int) -> NDArray[np.int64]:
        """Return int64[3, end − start]; generated tokens go on behind the prompt's last position."""
        known = self.positions.shape[1]
        shift = known - 1 - int(self.positions[:, -1].max())
        behind = np.arange(max(start, known), max(end, known)) - shift
        return np.concatenate([self.positions[:, start:end], np.tile(behind, (3, 1))], axis=1)

    def rows(self, start: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which of the tokens [start, end) belong to an image, and their rows of the features."""
        image, offset = self.images.image[start:end], self.images.offset[start:end]
        begins = np.concatenate([[0], np.cumsum([item.tokens for item in self.images.images])])
        here = np.flatnonzero(image >= 0)
        return here, begins[image[here]] + offset[here]

    def features(self, model: Any) -> tuple[Tensor, list[Tensor] | None]:
        """Return the features by the weights of ``model``: they are computed again after a weight update."""
        if self._features is None or self._features[0] is not model:
            self._features = (model, *image_features(model, self.images))
        return self._features[1], self._features[2]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one sequence to compute, at positions ``start …`` of the sequence in ``slot``."""

    slot: Slot
    start: int
    token_ids: NDArray[np.int32]
    wants_logits: bool
    images: RequestImages | None = None


def read_request_images(
    ids: Sequence[int], images: Sequence[Image], vision: Vision, reader: PixelReader
) -> tuple[NDArray[np.int32], RequestImages]:
    """Return the prompt with a negative id for each image token, and its images.

    The ids differ between images, so that the KV cache reuses no prefix with another image. Raises ImageError
    unless the prompt has as many image tokens as the images.
    """
    tokens = np.asarray(ids, np.int32)
    pads = np.flatnonzero(tokens == vision.image_token)
    spans, pixels = [], {}
    offset = 0
    for image in images:
        pixels[image.id], grid = reader.read(image)
        count = vision.tokens(image.ref)
        start = int(pads[offset]) if offset < len(pads) else len(tokens)
        spans.append(ImageSpan(sha256=image.id, start=start, tokens=count, grid=grid))
        offset += count
    if offset != len(pads):
        raise ImageError(
            f"the prompt has {len(pads)} image tokens, and its {len(images)} images have {offset}"
        )
    try:
        located = images_of_spans(spans, len(tokens), np.arange(len(tokens)))
    except ValueError as error:
        raise ImageError(f"the image tokens of the prompt do not fit its images: {error}") from error
    assert located is not None
    for span in spans:
        digest = hashlib.sha256(bytes.fromhex(span.sha256)).digest()
        first = int.from_bytes(digest[:4], "big") % 2**30
        tokens[span.start : span.start + span.tokens] = -1 - first - np.arange(span.tokens)
    whole = np.full(len(tokens), len(tokens))
    positions = rope_positions(located, np.arange(len(tokens)), whole)
    return tokens, RequestImages(located.with_pixels(pixels), positions)


def vision_inputs(
    model: Any, chunks: Sequence[Chunk], ids: NDArray[np.int32], device: torch.device
) -> dict[str, Any]:
    """Return the decoder's inputs: embeddings with the features of images, and positions [3, 1, n]."""
    embeds = model.get_input_embeddings()(torch.from_numpy(ids.astype(np.int64)).to(device))
    mask = torch.zeros(len(ids), dtype=torch.bool, device=device)
    positions, deep = [], []
    begin = 0
    for chunk in chunks:
        end = chunk.start + len(chunk.token_ids)
        if chunk.images is None:
            positions.append(np.tile(np.arange(chunk.start, end), (3, 1)))
        else:
            positions.append(chunk.images.positions_of(chunk.start, end))
            here, rows = chunk.images.rows(chunk.start, end)
            features, layers = chunk.images.features(model)
            embeds[begin + here] = features[rows].to(embeds.dtype)
            mask[begin + here] = True
            deep.append([layer[rows] for layer in layers or ()])
        begin += len(chunk.token_ids)
    inputs: dict[str, Any] = {
        "inputs_embeds": embeds[None],
        "position_ids": torch.from_numpy(np.concatenate(positions, axis=1)).to(device)[:, None],
    }
    if mask.any() and deep and deep[0]:
        inputs["visual_pos_masks"] = mask[None]
        inputs["deepstack_visual_embeds"] = [torch.cat(layer) for layer in zip(*deep, strict=True)]
    return inputs
