"""Lay the nodes of a trajectory out in depth-first order, as forests need them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.documents.training import Node

Ints = NDArray[np.int64]


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
