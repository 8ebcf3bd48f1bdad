"""Join the model calls of a Record in their token tree."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.documents.images import ImageSpan
from agentrl.documents.model_call import DispatchedSamplingTask, unpack_ids
from agentrl.documents.routing import TreeRouting
from agentrl.documents.training import Node
from agentrl.errors import StoreError


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Runs of tokens in depth-first order. The output of a call starts at ``output_starts[call_id]``."""

    nodes: tuple[Node, ...]
    input_ids: NDArray[np.int32]
    output_starts: Mapping[str, int]
    images: tuple[ImageSpan, ...] = ()
    """Tokens that stand for images, by their place in ``input_ids``."""
    routing: bytes = b""
    """The experts of each token, if a call has a routing."""


def build_tree(calls: Sequence[DispatchedSamplingTask], kept: Collection[str]) -> TokenTree:
    """Return the tree of the model calls ``kept`` and all their ancestors.

    A call appends its ``context_ids`` and ``output_ids`` to its parent's output. A call without a parent
    starts a root; a parent with several children ends a node, and each child starts one. Leaves out calls
    without a kept descendant. Raises StoreError if a parent is missing or comes later.
    """
    children = _children(calls, kept)
    builder = _Builder(children)
    for root in children[None]:
        builder.add_branch(root)
    return builder.finish()


def _children(
    calls: Sequence[DispatchedSamplingTask], kept: Collection[str]
) -> dict[str | None, list[DispatchedSamplingTask]]:
    known: dict[str, DispatchedSamplingTask] = {}
    for call in calls:
        if call.parent is not None and call.parent not in known:
            raise StoreError(
                f"model call {call.id} continues {call.parent}, which is not among the calls before it",
                hint="the trajectory is damaged: look at it with `agentrl audit record`; reopen its task",
            )
        known[call.id] = call
    needed: set[str] = set()
    for call_id in kept:
        while call_id not in needed:
            needed.add(call_id)
            parent = known[call_id].parent
            if parent is None:
                break
            call_id = parent
    children: dict[str | None, list[DispatchedSamplingTask]] = {None: []}
    for call in calls:
        if call.id in needed:
            children.setdefault(call.parent, []).append(call)
    return children


class _Builder:
    def __init__(self, children: Mapping[str | None, Sequence[DispatchedSamplingTask]]) -> None:
        self._children = children
        self._nodes: list[Node] = []
        self._pieces: list[NDArray[np.int32]] = []
        self._length = 0
        self._output_starts: dict[str, int] = {}
        self._images: list[ImageSpan] = []
        self._routing = TreeRouting()
        self._ends: dict[str, int] = {}

    def add_branch(self, first: DispatchedSamplingTask) -> None:
        """Append the subtree of ``first``, depth-first. Does not recurse: chains may be long."""
        pending = [(first, -1)]
        while pending:
            call, parent_node = pending.pop()
            start = self._length
            self._append_call(call)
            following = self._children.get(call.id, ())
            while len(following) == 1:
                call = following[0]
                self._append_call(call)
                following = self._children.get(call.id, ())
            self._nodes.append(Node(start=start, end=self._length, parent=parent_node))
            pending.extend((child, len(self._nodes) - 1) for child in reversed(following))

    def finish(self) -> TokenTree:
        ids = np.concatenate(self._pieces) if self._pieces else np.empty(0, np.int32)
        images, routing = tuple(self._images), self._routing.finish(self._length)
        return TokenTree(tuple(self._nodes), ids, self._output_starts, images, routing)

    def _append_call(self, call: DispatchedSamplingTask) -> None:
        context, output = unpack_ids(call.context_ids), unpack_ids(call.output_ids)
        self._images += [image.moved(self._length) for image in call.images]
        self._output_starts[call.id] = self._length + len(context)
        self._pieces += [context, output]
        self._routing.add(
            call.routing, self._length, len(context) + len(output), call.prompt_tokens > len(context),
            call.parent is not None and self._ends[call.parent] == self._length,
        )  # fmt: skip
        self._length += len(context) + len(output)
        self._ends[call.id] = self._length
