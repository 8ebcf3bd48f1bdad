"""Check what is stored of a trajectory, and lay its tokens out in depth-first order, as forests need them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.data.forest_images import ForestImages, images_of_spans
from agentrl.documents.column import TokenColumns
from agentrl.documents.model_call import unpack_floats, unpack_ids
from agentrl.documents.sampling_mask import SamplingMask
from agentrl.documents.training import DBRecordData, Node
from agentrl.errors import ForestError, StoreError

Ints = NDArray[np.int64]

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
