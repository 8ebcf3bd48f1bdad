"""Shares equal prefixes: the tokens that several paths of a forest have in common are kept once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from agentrl.batching.forest import Ints, TokenForest


def share_prefixes(forest: TokenForest) -> TokenForest:
    """The same trajectories as a prefix tree over token ids; losses and gradients stay what they were.

    Paths from a root that begin with the same ids share those tokens, across trajectories too (the system
    prompt, a group's question). Labels move with their tokens: rows, advantages and logprobs keep their
    order, and a shared token may be the target of several rows. The result has at most as many tokens.
    """
    paths = _paths(forest)
    paths.sort(key=lambda path: forest.input_ids[path].tolist())
    new_index = np.zeros(forest.tokens, np.int64)
    kept: list[Ints] = []
    parents: list[Ints] = []
    count = 0
    before = np.zeros(0, np.int64)
    before_new = np.zeros(0, np.int64)
    for path in paths:
        shared = common_prefix(forest.input_ids[path], forest.input_ids[before])
        added = np.arange(count, count + len(path) - shared)
        path_new = np.concatenate([before_new[:shared], added])
        new_index[path] = path_new
        kept.append(path[shared:])
        parents.append(np.concatenate([[-1], path_new[:-1]])[shared:])
        count += len(added)
        before, before_new = path, path_new
    source, parent = np.concatenate(kept), np.concatenate(parents)
    return replace(
        forest,
        input_ids=forest.input_ids[source],
        position_ids=forest.position_ids[source],
        parent=parent,
        subtree_end=_subtree_ends(parent),
        target=new_index[forest.target],
    )


def _paths(forest: TokenForest) -> list[Ints]:
    """Token indices from root to leaf, one int64 array per leaf."""
    is_leaf = np.ones(forest.tokens, np.bool_)
    is_leaf[forest.parent[forest.parent >= 0]] = False
    made: list[Ints] = []
    for leaf in np.flatnonzero(is_leaf):
        path = np.zeros(forest.position_ids[leaf] + 1, np.int64)
        index = int(leaf)
        for place in range(len(path) - 1, -1, -1):
            path[place] = index
            index = int(forest.parent[index])
        made.append(path)
    return made


def common_prefix(ids: Ints, others: Ints) -> int:
    """How many leading ids are equal."""
    length = min(len(ids), len(others))
    different = np.flatnonzero(ids[:length] != others[:length])
    return int(different[0]) if different.size else length


def _subtree_ends(parent: Ints) -> Ints:
    """One past each token's last descendant, for tokens laid out depth-first."""
    ends = np.arange(1, len(parent) + 1)
    for index in range(len(parent) - 1, -1, -1):
        if parent[index] >= 0:
            ends[parent[index]] = max(ends[parent[index]], ends[index])
    return ends
