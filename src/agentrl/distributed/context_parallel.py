"""Context parallelism: a group of ranks splits the tokens of each forest, and attends to all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface

from agentrl.data.forest import Ints, TokenForest
from agentrl.distributed.pipeline_stages import receiving
from agentrl.errors import ConfigError
from agentrl.model.attention import (
    BLOCK,
    MaskLimits,
    block_attention,
    check_call,
    check_compatibility,
    forest_block_mask,
    has_flex,
    set_attention,
    split_segments,
)
from agentrl.model.logprobs import ForwardOptions, OutputHead, forest_logprobs
from agentrl.model.path_attention import Segment, path_attention
from agentrl.model.routing import routing_input


@dataclass(frozen=True)
class RankTokens:
    """The two equal chunks of a forest's tokens that one rank computes: the r-th from either end.

    A token attends to those before it, so a cheap early chunk is paired with an expensive late one.
    """

    forest: TokenForest
    """The whole forest, padded at its end so that all chunks have the same length."""
    chunks: tuple[tuple[int, int], tuple[int, int]]

    @property
    def tokens(self) -> Ints:
        """int64[n], the indices of this rank's tokens, ascending."""
        return np.concatenate([np.arange(start, end) for start, end in self.chunks])

    def targets(self) -> tuple[Ints, Ints]:
        """Return the targets whose parent is here, as indices in [0, T), and those parents in [0, n)."""
        parent = self.forest.parent[self.forest.target]
        (first, middle), (second, end) = self.chunks
        is_late = (second <= parent) & (parent < end)
        mine = np.flatnonzero(is_late | ((first <= parent) & (parent < middle)))
        before = np.where(is_late[mine], second - (middle - first), first)
        return mine, parent[mine] - before

    def segments(self) -> list[Segment]:
        """Return this rank's tokens as segments of the whole forest, in order."""
        whole = split_segments(self.forest)
        ends = np.array([segment.end for segment in whole])
        pieces = []
        for start, end in self.chunks:
            index = int(np.searchsorted(ends, start, side="right"))
            while start < end:
                segment = whole[index]
                stop = min(end, segment.end)
                pieces.append(segment.part(start, stop))
                start, index = stop, index + 1
        return pieces


def split_tokens(forest: TokenForest, ranks: int, rank: int, *, block: int = 1) -> RankTokens:
    """Return the tokens of ``rank`` among ``ranks``, in chunks of whole ``block`` tokens."""
    length = max(1, -(-forest.tokens // (2 * ranks * block))) * block
    chunks = (rank, 2 * ranks - 1 - rank)
    first, second = ((index * length, (index + 1) * length) for index in chunks)
    return RankTokens(_padded(forest, 2 * ranks * length), (first, second))


def _padded(forest: TokenForest, tokens: int) -> TokenForest:
    """Return ``forest`` with an untrained chain behind it, ``tokens`` in all."""
    extra = tokens - forest.tokens
    if extra == 0:
        return forest
    position = np.arange(extra)
    return replace(
        forest,
        input_ids=np.pad(forest.input_ids, (0, extra)),
        position_ids=np.append(forest.position_ids, position),
        parent=np.append(forest.parent, np.where(position, forest.tokens + position - 1, -1)),
        subtree_end=np.append(forest.subtree_end, np.full(extra, tokens)),
        owner=np.append(forest.owner, np.full(extra, -1)),
        routing=None if forest.routing is None else forest.routing.padded(extra),
    )


IMPLEMENTATION = "agentrl_context_parallel"


@dataclass(frozen=True)
class TokenExchange:
    """Collectives between the ranks that split a forest by ``split_tokens``; all ranks call each method."""

    group: ProcessGroup

    def gather(self, local: Tensor) -> Tensor:
        """All-gather each rank's [1, heads, n, d] into [1, heads, N, d], in the forest's order."""
        parts = local.new_empty(self.group.size(), *local.shape[1:])
        dist.all_gather(list(parts.chunk(self.group.size())), local.contiguous(), self.group)
        early, late = parts.chunk(2, dim=2)
        return torch.cat([*early, *late.flip(0)], dim=1)[None]

    def scatter_sum(self, whole: Tensor) -> Tensor:
        """Reduce-scatter the ranks' ``whole`` [1, heads, N, d]: the sum over them, [1, heads, n, d] of it."""
        early, late = torch.stack(whole[0].chunk(2 * self.group.size(), dim=1)).chunk(2)
        parts = torch.cat([early, late.flip(0)], dim=2)
        local = whole.new_empty(1, *parts.shape[1:])
        dist.reduce_scatter(local, list(parts.chunk(self.group.size())), dist.ReduceOp.SUM, self.group)
        return local

    def gather_with_gradient(self, *local: Tensor) -> tuple[Tensor, ...]:
        """``gather`` each tensor; gradients are summed over all ranks."""
        return cast("tuple[Tensor, ...]", _Gather.apply(self, *local))  # type: ignore[no-untyped-call]

    def join(self, part: Tensor, indices: Tensor, count: int) -> Tensor:
        """Return [count] values on every rank, of which this one has ``part`` at indices ``indices``.

        The gradient reaches ``part`` alone, unsummed: every rank computes the same loss of all values.
        """
        if count == 0:
            return part
        return cast(Tensor, _Join.apply(part, indices, count, self.group))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: TokenExchange, *local: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(exchange.gather(tensor) for tensor in local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(ctx.exchange.scatter_sum(grad) for grad in grads))


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, indices: Tensor, count: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(indices)
        whole = part.new_zeros(count)
        whole[indices] = part
        dist.all_reduce(whole, dist.ReduceOp.SUM, group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        return grads[0][indices], None, None, None


def split_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    exchange: TokenExchange | None = None,
    segments: list[Segment] | None = None,
    block_mask: BlockMask | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Compute attention over a forest that ranks split, as transformers' attention interface calls it.

    query [1, heads, n, d]; key and value [1, key-value heads, n, d], all of this rank's n tokens; returns
    ([1, n, heads, d], None). Collective, forward and backward. Runs FlexAttention under ``block_mask``, or
    ``path_attention`` over ``segments``. Raises ModelError without either, and for a layer with capped scores
    or attention sinks.
    """
    lacks = exchange is None or (segments is None) == (block_mask is None)
    check_call(module, "token exchange" if lacks else None, softcap, s_aux)
    assert exchange is not None
    if block_mask is not None:
        key, value = exchange.gather_with_gradient(key, value)
        return block_attention(module, query, key, value, None, scaling=scaling, block_mask=block_mask)
    assert segments is not None
    return path_attention(query, key, value, segments, scaling, exchange).transpose(1, 2), None


AttentionInterface.register(IMPLEMENTATION, split_attention)


def check_context(model: Any, max_tokens: int) -> None:
    """Raise ConfigError for a model that no mask makes exact on forests of up to ``max_tokens``."""
    reason = MaskLimits.of(model).reason(max_tokens)
    if reason is not None:
        raise ConfigError(
            f"--cp_size: {type(model).__name__} has {reason} (--max_tokens {max_tokens}): its tokens cannot"
            " be split over processes",
            hint="set --cp_size 1, or, if it only has a window, --max_tokens to at most that window",
        )


class ContextParallel:
    """A model whose ranks in ``group`` split the tokens of each forest.

    Every rank calls the same methods with the same forests.
    """

    def __init__(
        self, model: Any, group: ProcessGroup, executor: str = "auto", *, trains: bool = True
    ) -> None:
        """``executor``: auto, flex or varlen. ``trains``: refuse dropout and other noise."""
        if executor not in ("auto", "flex", "varlen"):
            raise ConfigError(
                f"attention executor {executor!r} cannot split tokens over processes",
                hint="use auto, flex or varlen",
            )
        check_compatibility(model, trains=trains)
        self._model, self._group, self._executor = model, group, executor

    def run(self, forest: TokenForest, received: Tensor | None = None) -> Tensor:
        """Return hidden states [n, H] of this rank's tokens.

        ``received`` [n, H] are those of the stage of layers before.
        """
        model, part = self._model, self._split(forest)
        set_attention(model, IMPLEMENTATION)
        tokens, device = part.tokens, model.device
        is_flex = has_flex(model) if self._executor == "auto" else self._executor == "flex"
        seen: dict[str, Any] = (
            {"block_mask": forest_block_mask(part.forest.subtree_end, device, tokens)}
            if is_flex
            else {"segments": part.segments()}
        )
        ids = part.forest.input_ids[tokens] if received is None else np.arange(len(tokens))
        with receiving(model, received):
            output = model.get_decoder()(
                input_ids=torch.from_numpy(ids).to(device)[None],
                position_ids=torch.from_numpy(part.forest.position_ids[tokens]).to(device)[None],
                attention_mask=None,
                use_cache=False,
                exchange=TokenExchange(self._group),
                **routing_input(part.forest, device, tokens),
                **seen,
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logprobs(
        self, hidden: Tensor, head: OutputHead, forest: TokenForest, options: ForwardOptions
    ) -> tuple[Tensor, ...]:
        """Return the logprobs of all trainable tokens, as ``forest_logprobs`` does.

        ``hidden`` [n, H] are this rank's. Gradients flow to its own tokens only; FSDP2 sums them over ranks.
        """
        own, parent = self._split(forest).targets()
        parts = forest_logprobs(hidden, head, forest, options, chosen=own, parent=parent)
        exchange, indices = TokenExchange(self._group), torch.from_numpy(own).to(hidden.device)
        # Enable it: values have a gradient under ``no_grad`` too.
        with torch.enable_grad():
            return tuple(exchange.join(part, indices, forest.trainable_tokens) for part in parts)

    def tokens(self, forest: TokenForest) -> int:
        """Return n, the number of this rank's tokens, padding included."""
        return len(self._split(forest).tokens)

    def _split(self, forest: TokenForest) -> RankTokens:
        block = BLOCK if has_flex(self._model) else 1
        return split_tokens(forest, self._group.size(), self._group.rank(), block=block)
