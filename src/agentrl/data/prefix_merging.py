"""Merge equal prefixes: keep context that several paths of a forest have in common only once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from agentrl.data.forest import Ints, TokenForest, at_or_below
from agentrl.data.split import segment_starts


def merge_prefixes(forest: TokenForest) -> TokenForest:
    """Return the same trajectories as a prefix tree over token ids; losses and gradients do not change.

    Paths that start with the same ids are merged: within a trajectory along all equal ids, so a context reset
    branches where it leaves the old context; across trajectories along the context before the first generated
    token (``owner``). Labels move with their tokens and keep their order. No prefix occurs twice in the
    result.
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
    )


def _keys(forest: TokenForest) -> Ints:
    """Return int64[N], equal for tokens that may be merged: the id, with the owner if there are several.

    Tokens of an image are equal only at one place of one image: all images have the same id.
    """
    ids = forest.input_ids
    if forest.images is not None:
        places = forest.images.keys()
        ids = np.where(places > 0, int(ids.max(initial=0)) + places, ids)
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


def common_prefix(ids: Ints, others: Ints) -> int:
    """Return the number of equal leading ids."""
    length = min(len(ids), len(others))
    different = np.flatnonzero(ids[:length] != others[:length])
    return int(different[0]) if different.size else length
