"""Pack trajectories as a TokenForest: the batch format of rows, multi-turn chains and merged prefixes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.documents.images import ImageSpan
from agentrl.documents.model_call import (
    ExpertShape,
    Routing,
    SamplingMask,
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
    unpack_routing,
)
from agentrl.documents.record import TokenColumns
from agentrl.documents.training import DBRecordData, Node, TrainableSpan
from agentrl.errors import ConfigError, ForestError, StoreError

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
        # Add an entry for text, whose index -1 NumPy reads as the last: it stays -1.
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


_MISMATCH = "another version wrote the document, or it was altered: convert its Record again"
_VOCABULARY = "sample and train with the same model and tokenizer (--model_name_or_path)"


def require(good: bool, name: str, message: str, hint: str = _MISMATCH) -> None:
    """Raise ForestError, which names the training data ``name``, unless ``good``."""
    if not good:
        raise ForestError(f"training data {name}: {message}", hint=hint)


def ids_of(data: DBRecordData, vocab_size: int | None) -> Ints:
    """Return int64[tokens]: the stored ids. Raises ForestError for one outside [0, ``vocab_size``)."""
    ids = unpack_ids(data.input_ids).astype(np.int64)
    require(len(ids) == data.tokens > 0, data.id, f"says {data.tokens} tokens and holds {len(ids)}")
    _check_vocabulary(data.id, ids, vocab_size)
    return ids


def _check_vocabulary(name: str, ids: Ints, vocab_size: int | None) -> None:
    limit = np.iinfo(np.int64).max if vocab_size is None else vocab_size
    outside = ids[(ids < 0) | (ids >= limit)]
    if outside.size:
        size = "" if vocab_size is None else f" of {vocab_size} ids"
        require(False, name, f"token id {outside[0]} is outside the vocabulary{size}", _VOCABULARY)


def check_nodes(data: DBRecordData) -> None:
    """Raise ForestError unless the nodes tile the tokens, each behind its parent."""
    end = 0
    for index, node in enumerate(data.nodes):
        where = f"node {index} [{node.start}, {node.end})"
        require(node.start == end and node.end > node.start, data.id, f"{where} does not follow token {end}")
        require(-1 <= node.parent < index, data.id, f"{where} has parent {node.parent}, not an earlier node")
        end = node.end
    require(end == data.tokens, data.id, f"nodes cover {end} of {data.tokens} tokens")


def labels_of(data: DBRecordData, count: int, ages: Mapping[int, int] | None) -> dict[str, Any]:
    """Return the fields ``LABELS`` of a forest for the ``count`` trainable tokens, in the order of spans."""
    spans = data.spans
    lengths = np.array([span.end - span.start for span in spans], np.int64)
    advantage = np.repeat(np.array([span.advantage for span in spans], np.float32), lengths)
    temperature = np.repeat(np.array([span.temperature for span in spans], np.float32), lengths)
    behavior = unpack_floats(data.behavior_logprobs)
    require(
        len(behavior) == count == data.trainable_tokens,
        data.id,
        f"says {data.trainable_tokens} trainable tokens; spans have {count}, logprobs {len(behavior)}",
    )
    require(bool(np.isfinite(advantage).all()), data.id, "an advantage is not finite")
    require(bool(np.isfinite(behavior).all()), data.id, "a behavior logprob is not finite")
    usable = np.isfinite(temperature) & (temperature > 0)
    require(bool(usable.all()), data.id, f"temperature {temperature[~usable][:1]} is not a number above 0")
    return {
        "label": np.arange(count),
        "advantage": advantage,
        "behavior_logprob": behavior,
        "version": np.repeat(np.array([span.version for span in spans], np.int64), lengths),
        "temperature": temperature,
        "age": np.repeat(_span_ages(data, ages), lengths),
    }


def images_of(data: DBRecordData, target: Ints, index: Ints) -> ForestImages | None:
    """Return the images of a trajectory; none of their tokens is trainable."""
    try:
        images = images_of_spans(data.images, data.tokens, index)
    except ValueError as error:
        raise ForestError(f"training data {data.id}: {error}", hint=_MISMATCH) from error
    if images is not None:
        trained = target[images.image[index[target]] >= 0]
        require(trained.size == 0, data.id, f"token {trained[:1]} of an image is trainable")
    return images


def mask_of(data: DBRecordData, targets: Ints, vocab_size: int | None) -> SamplingMask | None:
    """Return the mask of a trajectory's trainable tokens, each of which is among the ids that it keeps."""
    if not data.sampling_mask:
        return None
    mask: SamplingMask = _unpack(data, SamplingMask.unpack, data.sampling_mask)
    _check_vocabulary(data.id, mask.ids, vocab_size)
    require(mask.keeps(targets), data.id, "a token is not among the ids of its sampling mask")
    return mask


def columns_of(data: DBRecordData) -> TokenColumns | None:
    """Return what other processes filled in for a trajectory's trainable tokens."""
    columns: TokenColumns | None = _unpack(data, TokenColumns.unpack, data.columns)
    for top in () if columns is None else columns.top.values():
        # An id beyond the vocabulary is a teacher's padding (``reverse_kl``).
        require(bool(np.isfinite(top.logprobs).all()), data.id, "a logprob of a likeliest id is not finite")
    return columns


def _unpack(data: DBRecordData, unpack: Callable[[bytes, int], Any], packed: bytes) -> Any:
    try:
        return unpack(packed, data.trainable_tokens)
    except StoreError as error:
        raise ForestError(f"training data {data.id}: {error.message}", hint=_MISMATCH) from error


def _span_ages(data: DBRecordData, ages: Mapping[int, int] | None) -> Ints:
    """Return int64[spans]: the age of each span's tokens."""
    if ages is None:
        return np.zeros(len(data.spans), np.int64)
    unknown = [span.version for span in data.spans if span.version not in ages]
    if unknown:
        require(False, data.id, f"policy version {unknown[0]} has no age", "give an age for every version")
    return np.array([ages[span.version] for span in data.spans], np.int64)


def targets_of(data: DBRecordData) -> Ints:
    """Return int64[T]: the stored index of each trainable token, in the order of spans."""
    pieces = [np.zeros(0, np.int64)]
    for span in data.spans:
        where = f"span [{span.start}, {span.end})"
        require(
            0 <= span.start < span.end <= data.tokens, data.id, f"{where} is outside {data.tokens} tokens"
        )
        pieces.append(np.arange(span.start, span.end))
    target = np.concatenate(pieces)
    require(len(np.unique(target)) == len(target), data.id, "spans overlap")
    return target


def depth_first(nodes: Sequence[Node]) -> tuple[Ints, Ints, Ints, Ints]:
    """Put nodes in depth-first order, children in their stored order.

    Returns the new index of each stored token, and in the new order (parent, position, subtree_end).
    """
    children: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        if node.parent >= 0:
            children[node.parent].append(index)
    stack = [index for index, node in reversed(list(enumerate(nodes))) if node.parent < 0]
    first, size = np.zeros(len(nodes), np.int64), np.array([node.end - node.start for node in nodes])
    cursor = 0
    while stack:
        index = stack.pop()
        first[index] = cursor
        cursor += size[index]
        stack.extend(reversed(children[index]))
    subtree = size.copy()
    # Go backwards: parents are stored before children, so each subtree is whole when it is added.
    for index in range(len(nodes) - 1, -1, -1):
        if nodes[index].parent >= 0:
            subtree[nodes[index].parent] += subtree[index]
    new_index = np.concatenate(
        [np.arange(start, start + length) for start, length in zip(first, size, strict=True)]
    )
    parent, position, subtree_end = (np.zeros(cursor, np.int64) for _ in range(3))
    for index, node in enumerate(nodes):
        start, length = first[index], size[index]
        before = first[node.parent] + size[node.parent] - 1 if node.parent >= 0 else -1
        depth = position[before] + 1 if before >= 0 else 0
        here = slice(start, start + length)
        parent[here] = np.arange(start - 1, start + length - 1)
        parent[start] = before
        position[here] = np.arange(depth, depth + length)
        subtree_end[here] = start + subtree[index]
    return new_index, parent, position, subtree_end


logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ForestRouting:
    """The experts that engines chose for N tokens."""

    experts: Routing
    """[N, layers, k], −1 where a token routes freely."""
    merged: int = 0
    """Tokens with experts of their own that prefix merging has replaced by an equal token."""
    differing: int = 0
    """Those of them whose experts were others."""

    @property
    def tokens(self) -> int:
        """The number of tokens with experts."""
        return int((self.experts[:, 0, 0] >= 0).sum())

    def select(self, tokens: Ints | NDArray[np.bool_]) -> ForestRouting:
        """Return the routing of ``tokens``; counts stay with the whole forest."""
        return ForestRouting(self.experts[tokens])

    def padded(self, extra: int) -> ForestRouting:
        """Return the routing with ``extra`` free tokens behind it."""
        return ForestRouting(np.pad(self.experts, ((0, extra), (0, 0), (0, 0)), constant_values=-1))

    def merge(self, source: Ints, new_index: Ints) -> ForestRouting:
        """Return the routing of a forest in which token i is ``source[i]`` of this one.

        ``new_index`` int64[N] is the new place of each token. The first token with experts at a place gives
        them: a place is computed once, and has one routing.
        """
        has_experts = self.experts[:, 0, 0] >= 0
        given = np.flatnonzero(has_experts)
        kept = source.copy()
        places, first = np.unique(new_index[given], return_index=True)
        free = ~has_experts[source[places]]
        kept[places[free]] = given[first[free]]
        experts = self.experts[kept]
        replaced = given[kept[new_index[given]] != given]
        differ = np.any(experts[new_index[replaced]] != self.experts[replaced], axis=(1, 2))
        return ForestRouting(experts, self.merged + len(replaced), self.differing + int(differ.sum()))


def routing_of(data: DBRecordData, shape: ExpertShape | None, new_index: Ints) -> ForestRouting | None:
    """Return the routing of training data whose token i becomes ``new_index[i]``; None without any.

    A routing of another shape or length is logged and left out: its tokens route freely.
    """
    if shape is None or not data.routing:
        return None
    try:
        stored = unpack_routing(data.routing, shape)
        if len(stored) != data.tokens:
            raise ValueError(f"a routing of {len(stored)} tokens for {data.tokens}")
    except ValueError as error:
        logger.warning("training data %s are trained with the trainer's own routing: %s", data.id, error)
        return None
    experts = np.empty_like(stored)
    experts[new_index] = stored
    return ForestRouting(experts)


def concatenate_routing(
    routings: Sequence[ForestRouting | None], tokens: Sequence[int]
) -> ForestRouting | None:
    """Return the routing of forests of ``tokens`` tokens in one; tokens of forests without any are free."""
    known = [routing for routing in routings if routing is not None]
    if not known:
        return None
    free = known[0].experts[:0]
    parts = [
        (ForestRouting(free).padded(count) if routing is None else routing).experts
        for routing, count in zip(routings, tokens, strict=True)
    ]
    return ForestRouting(
        np.concatenate(parts), sum(each.merged for each in known), sum(each.differing for each in known)
    )


Images = tuple[ImageSpan, ...]
LABELS = ("label", "advantage", "behavior_logprob", "version", "temperature", "age")
"""The fields of a TokenForest with a value per trainable token that packing does not renumber."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenForest:
    """N tokens in depth-first order, T of them trainable, from R trajectories or parts of trajectories.

    Labels belong to edges: the logits at ``parent[target[j]]`` predict token ``target[j]``. A token of a
    merged prefix may be the target of several rows.
    """

    input_ids: Ints
    """int64[N]."""
    position_ids: Ints
    """int64[N], depth in the token's tree."""
    parent: Ints
    """int64[N], index of the token before it; −1 at a root."""
    subtree_end: Ints
    """int64[N], one past the last descendant: query q sees key k iff k ≤ q < subtree_end[k]."""
    row: Ints
    """int64[T], trajectory in [0, R)."""
    target: Ints
    """int64[T], index of the trainable token."""
    label: Ints
    """int64[T], number of the trainable token in its whole trajectory, in the order of its spans."""
    advantage: Floats
    """float32[T]."""
    behavior_logprob: Floats
    """float32[T]."""
    version: Ints
    """int64[T], the policy version that sampled the token."""
    age: Ints
    """int64[T], optimizer steps between the weights that sampled the token and those that train it, ≥ 0."""
    temperature: Floats
    """float32[T], temperature of the token's model call; its logprobs are of logits / temperature."""
    owner: Ints
    """int64[N], the trajectory that generated the token or an ancestor of it; −1: context, may be merged."""
    trajectory: Ints
    """int64[R], each row's number in the step: forests with the same number hold parts of one trajectory."""
    row_tokens: Ints
    """int64[R], trainable tokens of each row's whole trajectory, over all forests of the step."""
    start_logprob: Floats | None = None
    """float32[T], the trainer's logprobs at the start of a step with several updates."""
    reference_logprob: Floats | None = None
    """float32[T], logprobs of the reference model."""
    start_value: Floats | None = None
    """float32[T], the critic's values before each token, at the start of the step."""
    value_target: Floats | None = None
    """float32[T], what the critic learns; NaN: nothing at the token."""
    images: ForestImages | None = None
    """The images among the tokens; None without any."""
    sampling_mask: SamplingMask | None = None
    """Of the T trainable tokens: the softmax of each is over the ids that it keeps. None without any."""
    routing: ForestRouting | None = None
    """The experts that engines chose for the tokens; None: all route freely."""
    columns: TokenColumns | None = None
    """Of the T trainable tokens: what other processes filled in, such as a teacher's logprobs."""

    @property
    def trajectories(self) -> int:
        """R."""
        return len(self.trajectory)

    @property
    def holds_parts(self) -> bool:
        """Whether a trajectory has trainable tokens in another forest of the step."""
        here = np.bincount(self.row, minlength=self.trajectories)
        return bool(np.any(here != self.row_tokens))

    @property
    def tokens(self) -> int:
        """N."""
        return len(self.input_ids)

    @property
    def trainable_tokens(self) -> int:
        """T."""
        return len(self.target)

    @cached_property
    def is_chains(self) -> bool:
        """Whether no tree branches."""
        follows = np.arange(self.tokens) - 1
        return bool(np.all((self.parent < 0) | (self.parent == follows)))

    @cached_property
    def depth(self) -> int:
        """Number of tokens on the longest path from a root to a leaf."""
        return int(self.position_ids.max(initial=-1)) + 1


def concatenate(forests: Sequence[TokenForest]) -> TokenForest:
    """Return one forest of all trees, in order; renumber rows and trajectories. Takes at least one forest."""
    tokens = np.cumsum([0] + [forest.tokens for forest in forests])
    rows = np.cumsum([0] + [forest.trajectories for forest in forests])
    placed = list(zip(forests, tokens, rows, strict=False))
    unchanged = (*LABELS, "input_ids", "position_ids", "row_tokens")
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(forest, name) for forest in forests]) for name in unchanged
    }
    return TokenForest(
        **joined,
        parent=np.concatenate(
            [np.where(forest.parent < 0, -1, forest.parent + start) for forest, start, _ in placed]
        ),
        subtree_end=np.concatenate([forest.subtree_end + start for forest, start, _ in placed]),
        row=np.concatenate([forest.row + first for forest, _, first in placed]),
        target=np.concatenate([forest.target + start for forest, start, _ in placed]),
        owner=np.concatenate(
            [np.where(forest.owner < 0, -1, forest.owner + first) for forest, _, first in placed]
        ),
        trajectory=np.concatenate([forest.trajectory + first for forest, _, first in placed]),
        images=concatenate_images([each.images for each in forests], [each.tokens for each in forests]),
        routing=concatenate_routing([each.routing for each in forests], [each.tokens for each in forests]),
        sampling_mask=_joined_masks(forests),
        columns=TokenColumns.join([(each.columns, each.trainable_tokens) for each in forests]),
    )


def _joined_masks(forests: Sequence[TokenForest]) -> SamplingMask | None:
    if all(forest.sampling_mask is None for forest in forests):
        return None
    return SamplingMask.join(
        [forest.sampling_mask or SamplingMask.unpack(b"", forest.trainable_tokens) for forest in forests]
    )


def at_or_below(chosen: Ints, subtree_end: Ints) -> NDArray[np.bool_]:
    """Return bool[N]: whether a token or one of its ancestors is in ``chosen``."""
    change = np.zeros(len(subtree_end) + 1, np.int64)
    np.add.at(change, chosen, 1)
    # Use ``add.at``: many subtrees end at one place, where ``change[ends] -= 1`` counts one.
    np.add.at(change, subtree_end[chosen], -1)
    return np.cumsum(change[:-1]) > 0


def forest_from_data(
    data: Sequence[DBRecordData],
    *,
    vocab_size: int | None = None,
    ages: Mapping[int, int] | None = None,
    experts: ExpertShape | None = None,
) -> TokenForest:
    """Pack trajectories into one forest, depth first; trajectory i is row i.

    ``ages`` maps each policy version to the age of its tokens in optimizer steps; None: all ages are 0. With
    ``experts``, tokens have the routing of that shape. Raises ForestError, with the document's id, for nodes
    that do not tile the tokens or whose parent does not come first, spans that overlap or lie outside, a
    trainable root, lengths that disagree, values that are not finite, ids outside [0, ``vocab_size``), and
    versions without an age.
    """
    if not data:
        raise ForestError("a forest needs at least one trajectory; none was given", hint="give at least one")
    return concatenate([_one_trajectory(item, vocab_size, ages, experts) for item in data])


def forest_from_sequences(
    input_ids: Sequence[Sequence[int] | NDArray[np.integer]],
    trainable: Sequence[Sequence[bool] | NDArray[np.bool_]],
    temperature: float = 1.0,
) -> TokenForest:
    """Pack sequences: each is one chain and one trajectory, with advantage 1, version 0 and age 0.

    ``trainable[i][j]`` marks token j of sequence i. The first token of a sequence cannot be trainable,
    because no token predicts it. All tokens have ``temperature``. Raises ForestError.
    """
    chains = []
    for index, (ids, mask) in enumerate(zip(input_ids, trainable, strict=True)):
        name = f"sequence {index}"
        require(len(ids) > 0, name, "it has no tokens", "drop empty sequences")
        lengths = f"{len(ids)} ids, but a mask of {len(mask)}"
        require(len(mask) == len(ids), name, lengths, "give one mask entry per id")
        first = "its first token is trainable, and no token predicts it"
        require(not mask[0], name, first, "mask only tokens that have a token before them")
        chains.append(chain(name, np.asarray(ids, np.int64), np.asarray(mask, np.bool_), temperature))
    return forest_from_data(chains)


def chain(
    name: str, ids: Ints, trainable: NDArray[np.bool_], temperature: float = 1.0, images: Images = ()
) -> DBRecordData:
    """Return a sequence as supervised training data: advantage 1, version 0 and behavior logprobs of 0.

    Each run of ``trainable`` tokens is a span, as if one model call had generated it.
    """
    edges = np.flatnonzero(np.diff(trainable.astype(np.int8), prepend=0, append=0))
    spans = tuple(
        TrainableSpan(start=start, end=end, call=call, version=0, advantage=1.0, temperature=temperature)
        for call, (start, end) in enumerate(edges.reshape(-1, 2).tolist())
    )
    count = int(trainable.sum())
    return DBRecordData(
        id=name, record=name, task=name, split="sft", score=1.0, advantage=1.0, min_version=0, max_version=0,
        tokens=len(ids), trainable_tokens=count, turns=len(spans), nodes=(Node(start=0, end=len(ids)),),
        spans=spans, images=images, input_ids=pack_ids(ids.tolist()),
        behavior_logprobs=pack_floats([0.0] * count),
    )  # fmt: skip


def _one_trajectory(
    data: DBRecordData, vocab_size: int | None, ages: Mapping[int, int] | None, experts: ExpertShape | None
) -> TokenForest:
    ids = ids_of(data, vocab_size)
    check_nodes(data)
    new_index, parent, position, subtree_end = depth_first(data.nodes)
    stored = targets_of(data)
    labels = labels_of(data, len(stored), ages)
    target = new_index[stored]
    roots = stored[parent[target] < 0]
    require(roots.size == 0, data.id, f"token {roots[:1]} is trainable and a root: no token predicts it")
    laid_out = np.empty_like(ids)
    laid_out[new_index] = ids
    return TokenForest(
        **labels,
        input_ids=laid_out,
        position_ids=position,
        parent=parent,
        subtree_end=subtree_end,
        row=np.zeros(len(target), np.int64),
        target=target,
        # Make numbers of a mask: 0, this trajectory, from trained tokens on, and -1, context, elsewhere.
        owner=at_or_below(target, subtree_end) - 1,
        trajectory=np.zeros(1, np.int64),
        row_tokens=np.array([len(target)]),
        images=images_of(data, stored, new_index),
        sampling_mask=mask_of(data, ids[stored], vocab_size),
        routing=routing_of(data, experts, new_index),
        columns=columns_of(data),
    )


def restrict(forest: TokenForest, labels: NDArray[np.bool_]) -> TokenForest:
    """Return the trainable tokens chosen by ``labels`` bool[T], with their ancestors.

    Leaves out rows without a chosen token; ``row_tokens`` still counts whole trajectories.
    """
    target = forest.target[labels]
    before = np.zeros(forest.tokens + 1, np.int64)
    np.add.at(before, target + 1, 1)
    before = np.cumsum(before)
    kept = before[forest.subtree_end] > before[:-1]
    new_index = np.append(0, np.cumsum(kept))
    parent = forest.parent[kept]
    rows, row = np.unique(forest.row[labels], return_inverse=True)
    chosen: dict[str, Any] = {name: getattr(forest, name)[labels] for name in LABELS}
    return TokenForest(
        **chosen,
        input_ids=forest.input_ids[kept],
        position_ids=forest.position_ids[kept],
        parent=np.where(parent < 0, -1, new_index[parent]),
        subtree_end=new_index[forest.subtree_end[kept]],
        row=row,
        target=new_index[target],
        owner=forest.owner[kept],
        trajectory=forest.trajectory[rows],
        row_tokens=forest.row_tokens[rows],
        images=None if forest.images is None else forest.images.select(kept),
        sampling_mask=None if forest.sampling_mask is None else forest.sampling_mask.select(labels),
        routing=None if forest.routing is None else forest.routing.select(kept),
        columns=None if forest.columns is None else forest.columns.select(labels),
    )


def join(parts: Sequence[TokenForest]) -> TokenForest:
    """Return one forest of at least one part of a step; parts of the same trajectory get one row."""
    forest = concatenate(parts)
    numbers, first, row = np.unique(
        np.concatenate([part.trajectory for part in parts]), return_index=True, return_inverse=True
    )
    return replace(
        forest,
        row=row[forest.row],
        # Restore the owners: they are numbers of the step, which ``concatenate`` has shifted.
        owner=np.concatenate([part.owner for part in parts]),
        trajectory=numbers,
        row_tokens=forest.row_tokens[first],
    )


def segment_starts(forest: TokenForest) -> Ints:
    """Return int64[leaves]: where each segment starts. In a segment, each token is the parent of the next."""
    return np.flatnonzero((forest.parent < 0) | (forest.parent != np.arange(forest.tokens) - 1))


def cut(forest: TokenForest, budget: int, names: Sequence[str]) -> list[TokenForest]:
    """Cut ``forest`` at branch points into parts of at most ``budget`` tokens.

    Each part repeats the path to its start as context. Every trainable token is in exactly one part, and the
    number of repeated tokens is minimal. Every leaf must be trainable, as ``restrict`` ensures. Raises
    ConfigError, with the trajectory's name in ``names``, for a path above ``budget``.
    """
    if forest.tokens <= budget:
        return [forest]
    starts = segment_starts(forest)
    own = np.diff(np.append(starts, forest.tokens))
    above = forest.position_ids[starts]
    _require_paths_fit(forest, starts, above + own, budget, names)
    firsts = _cheapest_cuts(above.tolist(), own.tolist(), budget)
    part = np.searchsorted(firsts, np.searchsorted(starts, forest.target, side="right") - 1, side="right")
    return [restrict(forest, part == index + 1) for index in range(len(firsts))]


def split_paths(tree: TokenForest) -> list[TokenForest]:
    """Split ``tree`` into a chain per leaf; a trainable token that several share is in the first.

    Every leaf must be trainable, as ``restrict`` ensures.
    """
    leaves = np.flatnonzero(tree.subtree_end == np.arange(tree.tokens) + 1)
    leaf = np.searchsorted(leaves, tree.target)
    return [restrict(tree, leaf == index) for index in range(len(leaves))]


def _require_paths_fit(
    forest: TokenForest, starts: Ints, lengths: Ints, budget: int, names: Sequence[str]
) -> None:
    worst = int(np.argmax(lengths))
    if lengths[worst] <= budget:
        return
    end = starts[worst + 1] if worst + 1 < len(starts) else forest.tokens
    row = int(forest.row[np.flatnonzero(forest.target == end - 1)[0]])
    raise ConfigError(
        f"trajectory {names[int(forest.trajectory[row])]} has a sequence of {lengths[worst]} tokens,"
        f" longer than a micro-batch of --max_tokens {budget}",
        hint=f"raise --max_tokens to {lengths[worst]} or more, or lower --max_prompt_tokens when sampling",
    )


def _cheapest_cuts(above: Sequence[int], own: Sequence[int], budget: int) -> list[int]:
    """Return the first segment of each part, so that parts fit and repeat as few tokens as possible.

    A part of segments [a, b] holds the ``above[a]`` tokens of the path before it and the segments' ``own``.
    """
    count = len(own)
    best: list[tuple[int, int]] = [(0, 0)] + [(0, 0)] * count
    chosen = [0] * (count + 1)
    for end in range(1, count + 1):
        options = []
        size = 0
        for first in range(end - 1, -1, -1):
            size += own[first]
            if size > budget:
                break
            if size + above[first] <= budget:
                repeated, parts = best[first]
                options.append((repeated + above[first], parts + 1, first))
        # Break ties by the number of parts: fewer micro-batches for the same repeated tokens.
        repeated, parts, chosen[end] = min(options)
        best[end] = (repeated, parts)
    firsts = []
    end = count
    while end > 0:
        end = chosen[end]
        firsts.append(end)
    return firsts[::-1]


def merge_prefixes(forest: TokenForest) -> TokenForest:
    """Return the same trajectories as a prefix tree over token ids; losses and gradients do not change.

    Paths that start with the same ids are merged: within a trajectory along all equal ids, so a context reset
    branches where it leaves the old context; across trajectories along the context before the first generated
    token (``owner``). Labels move with their tokens and keep their order. No prefix occurs twice in the
    result. A merged token has the routing of the first of them that has one.
    """
    keys = _keys(forest)
    # Sort as big-endian bytes: they order like the keys, so equal prefixes become neighbours.
    paths = sorted(_paths(forest), key=lambda path: keys[path].astype(">u8").tobytes())
    new_index = np.zeros(forest.tokens, np.int64)
    subtree_end = np.zeros(forest.tokens, np.int64)
    kept: list[Ints] = []
    parents: list[Ints] = []
    count = 0
    before, before_new = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for path in paths:
        merged = common_prefix(keys[path], keys[before])
        subtree_end[before_new[merged:]] = count
        added = np.arange(count, count + len(path) - merged)
        path_new = np.concatenate([before_new[:merged], added])
        new_index[path] = path_new
        kept.append(path[merged:])
        parents.append(np.concatenate([[-1], path_new[:-1]])[merged:])
        count += len(added)
        before, before_new = path, path_new
    subtree_end[before_new] = count
    source = np.concatenate(kept)
    target, subtree_end = new_index[forest.target], subtree_end[:count]
    owner = forest.owner[source]
    # Find owners anew: a kept token may be context in its own path and generated in a merged one.
    if forest.trajectories == 1:
        generated = np.unique(new_index[forest.owner >= 0])
        owner = np.where(at_or_below(generated, subtree_end), forest.trajectory[0], -1)
    return replace(
        forest,
        input_ids=forest.input_ids[source],
        position_ids=forest.position_ids[source],
        parent=np.concatenate(parents),
        subtree_end=subtree_end,
        target=target,
        owner=owner,
        images=None if forest.images is None else forest.images.select(source),
        routing=None if forest.routing is None else forest.routing.merge(source, new_index),
    )


def _keys(forest: TokenForest) -> Ints:
    """Return int64[N], equal for tokens that may be merged: the id, with the owner if there are several.

    Tokens of an image are equal only at one place of one image: all images have the same id.
    """
    ids = forest.input_ids
    if forest.images is not None:
        keys = forest.images.keys()
        ids = np.where(keys > 0, int(ids.max(initial=0)) + keys, ids)
    if forest.trajectories == 1:
        return ids
    return ids + (forest.owner + 1) * (int(ids.max(initial=0)) + 1)


def _paths(forest: TokenForest) -> list[Ints]:
    """Return the token indices from root to leaf: one int64 array per leaf."""
    starts = segment_starts(forest)
    made: list[Ints] = []
    for start, end in zip(starts, np.append(starts[1:], forest.tokens), strict=True):
        depth = forest.position_ids[start]
        above = made[-1][:depth] if depth else np.zeros(0, np.int64)
        made.append(np.concatenate([above, np.arange(start, end)]))
    return made


def common_prefix(ids: NDArray[np.integer], others: NDArray[np.integer]) -> int:
    """Return the number of equal leading ids."""
    length = min(len(ids), len(others))
    different = np.flatnonzero(ids[:length] != others[:length])
    return int(different[0]) if different.size else length
