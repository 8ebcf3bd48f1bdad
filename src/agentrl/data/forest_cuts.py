"""Cut, split, join and merge the trees of forests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.data.forest import LABELS, Ints, TokenForest, at_or_below, concatenate
from agentrl.errors import ConfigError


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
