"""Carry images through a TokenForest: which tokens stand for which image, and where they lie in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from agentrl.documents.images import ImageSpan

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForestImage:
    """One image: ``grid`` is (1, rows, columns) in patches; the model merges neighbours to a token."""

    sha256: str
    grid: tuple[int, ...]
    tokens: int
    pixels: Floats | None = None
    """float32[patches, values]: the model's input; None until ``with_pixels``."""

    @property
    def columns(self) -> int:
        """Return the number of tokens in a row of the image."""
        return self.grid[2] // self.merge

    @property
    def extent(self) -> int:
        """Return how far the position advances over the image: its longer side in tokens."""
        return int(max(self.grid[1], self.grid[2])) // self.merge

    @property
    def merge(self) -> int:
        """Return how many patches along each side become one token."""
        return merge_of(self.grid, self.tokens)


def merge_of(grid: Sequence[int], tokens: int) -> int:
    """Return how many patches along each side of an image become one token."""
    return math.isqrt(grid[1] * grid[2] // tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForestImages:
    """The images of a forest of N tokens."""

    image: Ints
    """int64[N], index into ``images``; −1: text."""
    offset: Ints
    """int64[N], index among the tokens of its image; 0 for text."""
    images: tuple[ForestImage, ...]

    def select(self, tokens: NDArray[np.int64] | NDArray[np.bool_]) -> ForestImages | None:
        """Return the images of chosen tokens, in their order; None if none of them belongs to an image."""
        image, offset = self.image[tokens], self.offset[tokens]
        used = np.unique(image[image >= 0])
        if not used.size:
            return None
        number = np.full(len(self.images) + 1, -1)
        number[used] = np.arange(len(used))
        kept = tuple(self.images[index] for index in used.tolist())
        return ForestImages(image=number[image], offset=offset, images=kept)

    def keys(self) -> Ints:
        """Return int64[N], equal for tokens of equal images at equal offsets; 0 for text."""
        longest = max(image.tokens for image in self.images)
        return np.where(self.image < 0, 0, 1 + self.image * longest + self.offset)

    def with_pixels(self, pixels: Mapping[str, Floats]) -> ForestImages:
        """Return the images with the model's input of each, by hash."""
        images = (replace(image, pixels=pixels[image.sha256]) for image in self.images)
        return replace(self, images=tuple(images))


def concatenate_images(parts: Sequence[ForestImages | None], tokens: Sequence[int]) -> ForestImages | None:
    """Return the images of concatenated forests, equal images once; ``tokens`` are the forests' lengths."""
    if all(part is None for part in parts):
        return None
    numbers: dict[str, int] = {}
    images: list[ForestImage] = []
    columns: list[Ints] = []
    offsets: list[Ints] = []
    for part, length in zip(parts, tokens, strict=True):
        if part is None:
            columns.append(np.full(length, -1))
            offsets.append(np.zeros(length, np.int64))
            continue
        for image in part.images:
            if image.sha256 not in numbers:
                numbers[image.sha256] = len(images)
                images.append(image)
        renumbered = np.array([*(numbers[image.sha256] for image in part.images), -1])
        columns.append(renumbered[part.image])
        offsets.append(part.offset)
    return ForestImages(image=np.concatenate(columns), offset=np.concatenate(offsets), images=tuple(images))


def images_of_spans(spans: Sequence[ImageSpan], tokens: int, index: Ints) -> ForestImages | None:
    """Return the images of one trajectory of ``tokens`` tokens; token i lies at ``index[i]`` of the forest.

    Raises ValueError for spans that overlap, lie outside, or do not have the tokens of their grid.
    """
    if not spans:
        return None
    image, inside = np.full(tokens, -1), np.zeros(tokens, np.int64)
    numbers: dict[str, int] = {}
    images: list[ForestImage] = []
    for span in spans:
        _check(span, tokens)
        here = slice(span.start, span.start + span.tokens)
        if np.any(image[here] >= 0):
            raise ValueError(f"images overlap at token {span.start}")
        if span.sha256 not in numbers:
            numbers[span.sha256] = len(images)
            images.append(ForestImage(sha256=span.sha256, grid=tuple(span.grid), tokens=span.tokens))
        elif images[numbers[span.sha256]].grid != tuple(span.grid):
            raise ValueError(f"the image {span.sha256[:12]}… has two sizes")
        image[here], inside[here] = numbers[span.sha256], np.arange(span.tokens)
    laid_out, laid_inside = np.empty_like(image), np.empty_like(inside)
    laid_out[index], laid_inside[index] = image, inside
    return ForestImages(image=laid_out, offset=laid_inside, images=tuple(images))


def rope_positions(images: ForestImages, depth: Ints, subtree_end: Ints) -> Ints:
    """Return int64[3, N], the positions of M-RoPE along each path: temporal, row, column.

    An image of r × c tokens that begins at position p has (p, p + row, p + column); the text behind it goes
    on at p + max(r, c), whatever its number of tokens. ``depth`` counts the tokens before each token.
    """
    tokens = len(depth)
    last = np.flatnonzero(images.image >= 0)
    sizes = np.array([image.tokens for image in images.images])
    extents = np.array([image.extent for image in images.images])
    columns = np.array([image.columns for image in images.images])
    last = last[images.offset[last] == sizes[images.image[last]] - 1]
    saved = sizes[images.image[last]] - extents[images.image[last]]
    change = np.zeros(tokens + 1, np.int64)
    np.add.at(change, last + 1, saved)
    np.add.at(change, subtree_end[last], -saved)
    text = depth - np.cumsum(change[:-1])
    begin = text - images.offset
    is_image = images.image >= 0
    width = np.where(is_image, columns[images.image], 1)
    return np.stack([
        begin * is_image + text * ~is_image,
        np.where(is_image, begin + images.offset // width, text),
        np.where(is_image, begin + images.offset % width, text),
    ])  # fmt: skip


def _check(span: ImageSpan, tokens: int) -> None:
    if not 0 <= span.start < span.start + span.tokens <= tokens:
        raise ValueError(f"an image [{span.start}, {span.start + span.tokens}) is outside {tokens} tokens")
    grid = tuple(span.grid)
    merge = merge_of(grid, span.tokens) if len(grid) == 3 else 0
    sides = [side % merge for side in grid[1:]] if merge else [1]
    if any(sides) or grid[0] != 1 or span.tokens * merge**2 != grid[1] * grid[2]:
        raise ValueError(f"an image of {span.tokens} tokens has the grid {grid}")
