"""Pack trajectories as a TokenForest, the batch format of rows, multi-turn chains and merged prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.data.forest_images import ForestImages, concatenate_images
from agentrl.data.forest_routing import ForestRouting, concatenate_routing, routing_of
from agentrl.data.stored_trajectory import (
    check_nodes,
    columns_of,
    depth_first,
    ids_of,
    images_of,
    labels_of,
    mask_of,
    require,
    targets_of,
)
from agentrl.documents.column import TokenColumns
from agentrl.documents.images import ImageSpan
from agentrl.documents.model_call import pack_floats, pack_ids
from agentrl.documents.routing import ExpertShape
from agentrl.documents.sampling_mask import SamplingMask
from agentrl.documents.training import DBRecordData, Node, TrainableSpan
from agentrl.errors import ForestError

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
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
        owner=at_or_below(target, subtree_end) - 1,
        trajectory=np.zeros(1, np.int64),
        row_tokens=np.array([len(target)]),
        images=images_of(data, stored, new_index),
        sampling_mask=mask_of(data, ids[stored], vocab_size),
        routing=routing_of(data, experts, new_index),
        columns=columns_of(data),
    )
