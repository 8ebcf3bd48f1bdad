"""Lay out the nodes of a token tree in depth-first order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.documents.training import Node

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layout:
    """New index of each stored token, and the tree arrays in the new order; int64[N] each."""

    place: Ints
    parent: Ints
    position: Ints
    subtree_end: Ints


def lay_out(nodes: Sequence[Node]) -> Layout:
    """Put nodes in depth-first order, children in their stored order."""
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
    place = np.concatenate(
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
    return Layout(place, parent, position, subtree_end)
