"""Turn images of messages into tokens: how many a model gives each image, and where they lie in a prompt.

A template writes one placeholder for an image; it becomes as many as the image has tokens. Needs no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.chat.renderer import Message
from agentrl.documents.images import ImageRef, ImageSpan, has_images, image_refs
from agentrl.errors import ImageError, ModelError, TrajectoryError

_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """How a Qwen-VL model reads images."""

    image_token: int
    """The id of the placeholder."""
    patch: int
    """Pixels along each side of a patch."""
    merge: int
    """Patches along each side of a token."""
    min_pixels: int
    max_pixels: int

    def grid(self, image: ImageRef) -> tuple[int, int, int]:
        """Return (1, rows, columns) in patches of the image, scaled as the model's processor scales it."""
        factor = self.patch * self.merge
        height, width = (max(factor, round(side / factor) * factor) for side in (image.height, image.width))
        if height * width > self.max_pixels:
            scale = math.sqrt(image.height * image.width / self.max_pixels)
            height, width = (
                max(factor, math.floor(side / scale / factor) * factor)
                for side in (image.height, image.width)
            )
        elif height * width < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (image.height * image.width))
            height, width = (
                math.ceil(side * scale / factor) * factor for side in (image.height, image.width)
            )
        return 1, height // self.patch, width // self.patch

    def tokens(self, image: ImageRef) -> int:
        """Return the number of tokens of an image."""
        _, rows, columns = self.grid(image)
        return rows * columns // self.merge**2

    def expand(self, ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return rendered ``ids`` with as many placeholders for each image of ``messages`` as it has tokens.

        Raises TrajectoryError if the template does not write one placeholder for each image.
        """
        counts = self.repeats(ids, messages)
        return [token for token, count in zip(ids, counts, strict=True) for _ in range(count)]

    def repeats(self, ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return how many tokens each of the rendered ``ids`` stands for; see ``expand``."""
        refs = image_refs(messages)
        written = sum(token == self.image_token for token in ids)
        if written != len(refs):
            raise TrajectoryError(
                f"the chat template writes {written} images, and the messages have {len(refs)}",
                hint="give a template that shows images in these roles by --chat_template FILE",
            )
        images = iter(refs)
        return [self.tokens(next(images)) if token == self.image_token else 1 for token in ids]

    def locate(self, ids: Sequence[int], messages: Sequence[Message]) -> tuple[ImageSpan, ...]:
        """Return the tokens of each image of ``messages`` in ``ids``, which ``expand`` returned."""
        spans = []
        index = 0
        for ref in image_refs(messages):
            index = next((i for i in range(index, len(ids)) if ids[i] == self.image_token), len(ids))
            span = ImageSpan(sha256=ref.sha256, start=index, tokens=self.tokens(ref), grid=self.grid(ref))
            index += span.tokens
            if index > len(ids):
                raise TrajectoryError("a prompt has fewer image tokens than its images")
            spans.append(span)
        return tuple(spans)


def read_vision(folder: str | Path, config: Mapping[str, Any]) -> Vision | None:
    """Return how the model in ``folder`` reads images; None for a model that reads text only.

    Raises ModelError for a vision model without the configuration of its image processor.
    """
    if config.get("model_type") not in _TYPES or "vision_config" not in config:
        return None
    for name in _FILES:
        path = Path(folder) / name
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            return _vision(content.get("image_processor", content), config)
    raise ModelError(
        f"{folder} is a vision model without {_FILES[0]}",
        hint="copy the model's folder again, with all files",
    )


def _vision(settings: Mapping[str, Any], config: Mapping[str, Any]) -> Vision:
    size = settings.get("size") or {}
    return Vision(
        image_token=int(config.get("image_token_id", 151655)),
        patch=int(settings.get("patch_size", 14)),
        merge=int(settings.get("merge_size", 2)),
        min_pixels=int(settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56),
        max_pixels=int(settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280),
    )


def require_text_only(messages: Sequence[Message], what: str) -> None:
    """Raise ImageError if messages show an image; ``what`` reads text only."""
    if has_images(messages):
        raise ImageError(
            f"a message shows an image, and {what} reads text only",
            hint="use a vision model (Qwen-VL) with its own chat template, or leave out the images",
        )
