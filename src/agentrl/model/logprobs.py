"""Turn hidden states of a forest into logprobs and entropies, without the [T, V] logits in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn

from agentrl.config.schema import ModelConfig
from agentrl.data.forest import Ints, TokenForest, forest_from_sequences
from agentrl.documents.model_call import SamplingMask
from agentrl.documents.record import TopLogprobs
from agentrl.errors import ModelError
from agentrl.losses.loss import TEACHER
from agentrl.model.attention import build_executor
from agentrl.model.load import disable_dropout, load_model, resolve_dtype
from agentrl.model.norms import fuse_norms


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The last layer of a causal LM: logits = softcap·tanh(scale·(hidden @ weightᵀ + bias)/softcap)."""

    weight: Tensor
    """[V, H]; the embedding itself if the model ties them."""
    bias: Tensor | None = None
    """[V]."""
    scale: float = 1.0
    softcap: float | None = None
    group: distributed.ProcessGroup | None = None
    """Tensor-parallel ranks, each of which holds a slice of the vocabulary as ``weight`` and ``bias``."""
    first: int = 0
    """The token id of the slice's first row."""

    @property
    def vocabulary(self) -> int:
        """The rows of the whole head, over all ranks of ``group``."""
        return len(self.weight) * (1 if self.group is None else self.group.size())

    def own_rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row of ``weight`` of each id, and whether it has one: bool; row 0 or the last if not."""
        row = ids - self.first
        return row.clamp(0, len(self.weight) - 1), (row >= 0) & (row < len(self.weight))


def output_head(model: nn.Module) -> OutputHead:
    """Return the head of a Hugging Face causal LM, with the logit scaling that its config declares.

    Raises ModelError for a head that is not a linear layer. ``check_output_head`` compares it with the model.
    """
    layer = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(layer, nn.Linear):
        raise ModelError(
            f"{type(model).__name__} ends in {type(layer).__name__}, not a linear layer",
            hint="use a causal language model with an lm_head",
        )
    config: Any = model.config
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
        getattr(config, "logits_scaling", None) or 1.0
    )
    return OutputHead(layer.weight, layer.bias, scale, getattr(config, "final_logit_softcapping", None))


class Projection:
    """Computes float32 logits / temperature a block at a time, in one buffer that each block overwrites."""

    def __init__(self, head: OutputHead, width: int) -> None:
        self._head = head
        self._width = min(width, len(head.weight))
        self._buffer: Tensor | None = None

    def blocks(self, states: Tensor, divisor: Tensor | float) -> Iterator[tuple[slice, Tensor]]:
        """Yield (vocabulary slice, float32[n, width]) of ``states`` [n, H]; ``divisor``: see ``rows_of``."""
        for start in range(0, len(self._head.weight), self._width):
            here = slice(start, min(start + self._width, len(self._head.weight)))
            yield here, self._block(states, divisor, here)

    def _block(self, states: Tensor, divisor: Tensor | float, here: slice) -> Tensor:
        head, weight = self._head, self._head.weight[here]
        if states.is_cuda and states.dtype == weight.dtype != torch.float32:
            # Multiply 16-bit numbers and add in float32, on tensor cores; ``out_dtype`` exists on CUDA alone.
            logits = torch.mm(states, weight.T, out_dtype=torch.float32)
        else:
            logits = torch.mm(states.float(), weight.float().T, out=self._block_buffer(states, here))
        if head.bias is not None:
            logits += head.bias[here].float()
        if head.softcap is not None:
            logits.mul_(head.scale / head.softcap).tanh_().mul_(head.softcap / divisor)
        elif isinstance(divisor, Tensor) or head.scale != divisor:
            logits.mul_(head.scale / divisor)
        return logits

    def _block_buffer(self, states: Tensor, here: slice) -> Tensor:
        rows, width = len(states), here.stop - here.start
        if self._buffer is None or len(self._buffer) < rows * width:
            self._buffer = states.new_empty(rows * width, dtype=torch.float32)
        return self._buffer[: rows * width].view(rows, width)


def rows_of(divisor: Tensor | float, rows: slice) -> Tensor | float:
    """Return the divisor of ``rows``; ``divisor`` is one number or float32[n, 1]."""
    return divisor[rows] if isinstance(divisor, Tensor) else divisor


LOWEST: Final = -1e30
"""Logit of an excluded id: finite, so that its share of a sum is 0 and not NaN."""


@dataclass(frozen=True, slots=True)
class KeptIds:
    """A SamplingMask on the device of the logits; K ids in all."""

    first: NDArray[np.int64]
    """int64[T + 1], on the host: the ids of token t are [first[t], first[t + 1])."""
    row: Tensor
    """int64[K], the token of each id."""
    ids: Tensor
    """int64[K]."""
    truncated: Tensor
    """bool[T]: whether a token keeps only some ids."""

    @classmethod
    def of(cls, mask: SamplingMask, device: torch.device) -> Self:
        """Copy a mask to ``device``."""
        row = np.repeat(np.arange(len(mask)), mask.counts)
        tensors = (torch.from_numpy(array).to(device) for array in (row, mask.ids, mask.counts > 0))
        return cls(np.append(0, np.cumsum(mask.counts)), *tensors)

    def apply(self, logits: Tensor, tokens: slice, id_of_column: int) -> None:
        """Set the logits of excluded ids to ``LOWEST``, in place.

        logits [n, width] are those of ``tokens``; the first column is that of ``id_of_column``. Ids that are
        not in the block mark one more column, so that the host need not wait to know how many these are.
        """
        start, end = self.first[tokens.start], self.first[tokens.stop]
        if start == end:
            return
        width = logits.shape[1]
        column = self.ids[start:end] - id_of_column
        column = torch.where((column >= 0) & (column < width), column, width)
        excluded = self.truncated[tokens, None].repeat(1, width + 1)
        excluded[self.row[start:end] - tokens.start, column] = False
        logits.masked_fill_(excluded[:, :width], LOWEST)


DEFAULT_VOCAB_CHUNK = 8192
"""Vocabulary entries per block of logits."""
DEFAULT_CHUNK = 1024
"""Tokens per chunk of the projection."""
GPU_CHUNK = 8192
"""The same on a GPU: each chunk reads and writes the gradient of the whole head, and short kernels wait to be
launched."""
_STRIPES = 8


def token_logprobs(
    hidden: Tensor,
    head: OutputHead,
    parent: Tensor,
    target_ids: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    kept: KeptIds | None = None,
    entropy_gradient: bool = False,
    chunk_size: int | None = None,
    vocab_chunk_size: int = DEFAULT_VOCAB_CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits/temperature) of each target, and the entropy of that softmax, in nats.

    hidden [N, H] with gradient; parent int64[T], the position whose logits predict each target; target_ids
    int64[T]; temperature above 0, one number or float32[T] (keep a tensor on the CPU: checking it then does
    not wait for the accelerator). Returns logprobs float32[T], with gradient to hidden, weight and bias, and
    entropy float32[T], with gradient if ``entropy_gradient``. Logits are float32 for every dtype of the
    weights. With ``kept``, the softmax of each token is over its kept ids, of which the target is one.

    Projects only the T positions, [chunk_size, vocab_chunk_size] logits at a time with a running log-sum-exp
    (arXiv 1805.02867), and recomputes them in the backward. Besides the gradients, memory holds one block, an
    eighth of a block (one more for softcap and one for the entropy's gradient), and a few numbers per token.

    With ``head.group``, every rank passes the same arguments except its slice of the head, and gets the same
    results; the gradient of hidden is summed over the ranks. Raises ValueError for a temperature or a chunk
    size that is not above 0.
    """
    divisor = _divisor(temperature, target_ids)
    if chunk_size is None:
        chunk_size = GPU_CHUNK if hidden.is_cuda else DEFAULT_CHUNK
    for name, size in (("chunk_size", chunk_size), ("vocab_chunk_size", vocab_chunk_size)):
        if size < 1:
            raise ValueError(f"{name} is {size}, expected 1 or more")
    logprobs, entropy = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, parent, target_ids,
        head, divisor, kept, entropy_gradient, (chunk_size, vocab_chunk_size),
    )  # fmt: skip
    return logprobs, entropy


def _divisor(temperature: Tensor | float, target_ids: Tensor) -> Tensor | float:
    """Return the divisor of the logits: one number if all temperatures are equal, else float32[T, 1]."""
    if isinstance(temperature, Tensor):
        if temperature.shape != target_ids.shape:
            shape = list(temperature.shape)
            raise ValueError(f"temperature has shape {shape}, expected one per target: [{len(target_ids)}]")
        if not len(temperature):
            return 1.0
        ends = torch.stack(temperature.aminmax()).tolist()
        lowest, highest = float(ends[0]), float(ends[1])
    else:
        lowest = highest = temperature
    if not lowest > 0:
        raise ValueError(f"temperature is {lowest}, expected above 0")
    if isinstance(temperature, Tensor) and lowest != highest:
        return temperature.to(target_ids.device, torch.float32)[:, None]
    return lowest


@dataclass(slots=True)
class _RunningSoftmax:
    """Online softmax of n rows, a block of columns at a time: with x = logit − largest, Σ eˣ and Σ x·eˣ."""

    largest: Tensor
    total: Tensor
    weighted: Tensor
    chosen: Tensor
    """The logit of the target."""

    @classmethod
    def start(cls, like: Tensor) -> _RunningSoftmax:
        zeros = [like.new_zeros(len(like), dtype=torch.float32) for _ in range(3)]
        return cls(torch.full_like(zeros[0], LOWEST), *zeros)

    def add(self, logits: Tensor, target: Tensor) -> None:
        """Add a block of columns, overwriting it; ``target`` counts from its first, and may lie outside."""
        column, is_here = _column(target, logits.shape[1])
        self.chosen += torch.where(is_here, logits.gather(1, column[:, None])[:, 0], 0.0)
        self._raise_to(torch.maximum(self.largest, logits.amax(1)))
        logits.sub_(self.largest[:, None])
        for rows in _stripes(len(logits)):
            weights = logits[rows].exp()
            self.total[rows].add_(weights.sum(1))
            self.weighted[rows].add_(weights.mul_(logits[rows]).sum(1))

    def join(self, group: distributed.ProcessGroup) -> None:
        """All-reduce, so that every rank has the softmax over all columns."""
        largest = self.largest.clone()
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group)
        self._raise_to(largest)
        for part in (self.total, self.weighted, self.chosen):
            distributed.all_reduce(part, distributed.ReduceOp.SUM, group)

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (logprob, entropy, log-normalizer), float32[n] each."""
        log_total = self.total.log()
        normalizer = self.largest + log_total
        return self.chosen - normalizer, log_total - self.weighted / self.total, normalizer

    def _raise_to(self, largest: Tensor) -> None:
        shift = self.largest - largest
        decay = shift.exp()
        self.weighted.add_(self.total * shift).mul_(decay)
        self.total.mul_(decay)
        self.largest = largest


class _ChunkedLogprobs(torch.autograd.Function):
    """Saves the inputs and each token's log-normalizer; the backward recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parent: Tensor,
        target_ids: Tensor,
        head: OutputHead,
        divisor: Tensor | float,
        kept: KeptIds | None,
        entropy_gradient: bool,
        sizes: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(len(target_ids), dtype=torch.float32)
        entropy, normalizer = torch.empty_like(logprobs), torch.empty_like(logprobs)
        projection = Projection(head, sizes[1])
        for here in _chunks(len(target_ids), sizes[0]):
            softmax = _RunningSoftmax.start(target_ids[here])
            for columns, logits in projection.blocks(hidden[parent[here]], rows_of(divisor, here)):
                if kept is not None:
                    kept.apply(logits, here, head.first + columns.start)
                softmax.add(logits, target_ids[here] - head.first - columns.start)
            if head.group is not None:
                softmax.join(head.group)
            logprobs[here], entropy[here], normalizer[here] = softmax.results()
        ctx.save_for_backward(hidden, weight, bias, parent, target_ids, normalizer, entropy)
        ctx.others = (head.scale, head.softcap, head.group, head.first, divisor, kept, sizes)
        # Keep None for an output without use: zeros would cost the backward of the entropy.
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, parent, target_ids, normalizer, entropy = ctx.saved_tensors
        scale, softcap, group, first, divisor, kept, sizes = ctx.others
        head = OutputHead(weight, bias, scale, softcap, group, first)
        upstream = _Upstream.of(grads, scale / divisor, divisor, normalizer, entropy)
        needs = ctx.needs_input_grad
        grad_hidden = torch.zeros_like(hidden) if needs[0] else None
        # Add up in float32: bfloat16 would round after each of many chunks.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs[2] else None
        projection = Projection(head, sizes[1])
        for here in _chunks(len(target_ids), sizes[0]):
            states = hidden[parent[here]]
            grad_states = torch.zeros_like(states, dtype=torch.float32)
            for columns, logits in projection.blocks(states, rows_of(divisor, here)):
                if kept is not None:
                    kept.apply(logits, here, first + columns.start)
                target = target_ids[here] - first - columns.start
                _to_gradient(logits, head, upstream.rows(here), target)
                if grad_bias is not None:
                    grad_bias[columns] += logits.sum(0)
                # Multiply 16-bit operands as such on CUDA, in float32 elsewhere.
                if states.is_cuda and states.dtype == weight.dtype:
                    logits = logits.to(states.dtype)
                if grad_hidden is not None:
                    _add_product(grad_states, logits, weight[columns])
                if grad_weight is not None:
                    _add_product(grad_weight[columns], logits.T, states)
            if grad_hidden is not None:
                # Accumulate: where branches begin, one position predicts several tokens.
                grad_hidden.index_put_((parent[here],), grad_states.to(hidden.dtype), accumulate=True)
        if grad_hidden is not None and group is not None:
            distributed.all_reduce(grad_hidden, distributed.ReduceOp.SUM, group)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None, None, None, None, None, None, None,
        )  # fmt: skip


@dataclass(slots=True)
class _Upstream:
    """Upstream gradients of n tokens, times scale / temperature, and saved forward values."""

    logprob: Tensor
    entropy: Tensor | None
    divisor: Tensor | float
    normalizer: Tensor
    value: Tensor
    """The entropy itself."""

    @classmethod
    def of(
        cls,
        grads: tuple[Tensor | None, ...],
        factor: Tensor | float,
        divisor: Tensor | float,
        normalizer: Tensor,
        value: Tensor,
    ) -> _Upstream:
        """Build it from ``grads`` of logprobs and entropy; each is None if the loss does not use it."""
        factors = factor[:, 0] if isinstance(factor, Tensor) else factor
        logprob, entropy = (None if grad is None else grad * factors for grad in grads)
        return cls(
            torch.zeros_like(normalizer) if logprob is None else logprob, entropy, divisor, normalizer, value
        )

    def rows(self, rows: slice) -> _Upstream:
        entropy = None if self.entropy is None else self.entropy[rows]
        return _Upstream(
            self.logprob[rows], entropy, rows_of(self.divisor, rows), self.normalizer[rows], self.value[rows]
        )


def _to_gradient(logits: Tensor, head: OutputHead, upstream: _Upstream, target: Tensor) -> None:
    """Replace a block of logits / temperature with the gradient of the linear layer's output.

    With z = logits / temperature and p = softmax(z): d logprob/dz = 1[target] − p, and
    d entropy/dz = −p·(log p + entropy).
    """
    column, is_here = _column(target, logits.shape[1])
    for rows in _stripes(len(logits)):
        stripe, here = logits[rows], upstream.rows(rows)
        capped = None
        if head.softcap is not None:
            # Clamp: an excluded id's −1e30 squared is infinite, and times its share of 0 it is NaN.
            capped = 1 - (stripe * (here.divisor / head.softcap)).clamp_(-1, 1).square()
        stripe.sub_(here.normalizer[:, None])
        if here.entropy is None:
            stripe.exp_().mul_(-here.logprob[:, None])
        else:
            probabilities = stripe.exp()
            stripe.add_(here.value[:, None]).mul_(-here.entropy[:, None]).sub_(here.logprob[:, None])
            stripe.mul_(probabilities)
        stripe.scatter_add_(1, column[rows, None], torch.where(is_here[rows], here.logprob, 0.0)[:, None])
        if capped is not None:
            stripe.mul_(capped)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to ``total``, in float32 unless ``left`` is of 16 bits, too."""
    if left.dtype != torch.float32:
        total += torch.mm(left, right, out_dtype=torch.float32)
    else:
        total.addmm_(left, right.float())


def _column(target: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return each target's column, clamped to a block of ``width``, and whether the target is in it."""
    return target.clamp(0, width - 1), (target >= 0) & (target < width)


def _chunks(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _stripes(rows: int) -> Iterator[slice]:
    """Yield slices of an eighth of the rows, which bound the size of temporary tensors."""
    return _chunks(rows, max(1, -(-rows // _STRIPES)))


_IDS_AT_ONCE = 1024
"""Ids whose rows of the output head are in memory at a time."""
_LEAST = 1e-6
"""Smallest probability of all other ids together."""


def reverse_kl(
    hidden: Tensor,
    head: OutputHead,
    parent: Tensor,
    target_ids: Tensor,
    temperature: Tensor,
    logprobs: Tensor,
    top: TopLogprobs,
    kept: SamplingMask | None = None,
) -> Tensor:
    """Return Σ π·(log π − log π_teacher) of each token in nats, float32[T], with gradient; 0 without ids.

    The outcomes are the teacher's likeliest ids and, as one, all others: by the log-sum inequality at most
    the KL over the whole vocabulary. An id beyond the head's rows, of a teacher with more padding, is one of
    the others, and so is one that a token of ``kept`` was not sampled from: π of it is 0.
    hidden [N, H] and ``logprobs`` float32[T] (of ``target_ids``) carry gradients; the rest is as for
    ``token_logprobs``. A logit is projected for the ids of ``top`` and for the target alone: their difference
    and the target's logprob give the logprob of an id.
    """
    device = hidden.device
    token = np.repeat(np.arange(len(top)), top.ids.counts)
    known = (top.ids.ids < head.vocabulary) & _are_kept(token, top.ids.ids, kept)
    row, ids, wanted = (
        torch.from_numpy(values[known]).to(device)
        for values in (token, top.ids.ids, top.logprobs.astype(np.float32))
    )
    divisor = temperature.to(device)
    normalizer = _logits(hidden, head, parent, target_ids, divisor) - logprobs
    found = _logits(hidden, head, parent[row], ids, divisor[row]) - normalizer[row]
    share = found.exp()

    def summed(values: Tensor) -> Tensor:
        return values.new_zeros(len(top)).index_add(0, row, values)

    # Bound it: rounding may add the known shares up to 1, and a rest of 0 has no logarithm.
    rest, teacher_rest = ((1 - summed(each)).clamp(min=_LEAST) for each in (share, wanted.exp()))
    has_any = torch.from_numpy(top.ids.counts > 0).to(device)
    return torch.where(has_any, summed(share * (found - wanted)) + rest * (rest / teacher_rest).log(), 0.0)


def _are_kept(
    token: NDArray[np.int64], ids: NDArray[np.int64], kept: SamplingMask | None
) -> NDArray[np.bool_]:
    """Return bool[K]: whether token[i] could have been sampled as ids[i]."""
    if kept is None:
        return np.ones(len(ids), np.bool_)
    width = 1 + max(ids.max(initial=0), kept.ids.max(initial=0))
    allowed = np.repeat(np.arange(len(kept)), kept.counts) * width + kept.ids
    found: NDArray[np.bool_] = (kept.counts[token] == 0) | np.isin(token * width + ids, allowed)
    return found


def _logits(hidden: Tensor, head: OutputHead, place: Tensor, ids: Tensor, divisor: Tensor) -> Tensor:
    """Return the logit / temperature of ids[i] at hidden[place[i]], float32[K], with gradient."""
    products: Tensor = _ChosenProducts.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, place, ids, head
    )
    logits = products * head.scale
    if head.softcap is not None:
        logits = head.softcap * (logits / head.softcap).tanh()
    return logits / divisor


class _ChosenProducts(torch.autograd.Function):
    """Multiplies hidden[place[i]] by row ids[i] of the head alone.

    Autograd of ``weight[ids]`` would make a gradient of the whole head for each chunk, and add them up in the
    dtype of the products. Here one float32 tensor takes all of them, as in ``_ChunkedLogprobs``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        place: Tensor,
        ids: Tensor,
        head: OutputHead,
    ) -> Tensor:
        products = hidden.new_zeros(len(ids), dtype=torch.float32)
        for here in _chunks(len(ids), _IDS_AT_ONCE):
            row, is_own = head.own_rows(ids[here])
            part = (hidden[place[here]].float() * weight[row].float()).sum(-1)
            if bias is not None:
                part += bias[row].float()
            # Leave 0 for rows of other ranks, which the sum below adds.
            products[here] = part * is_own
        if head.group is not None:
            distributed.all_reduce(products, distributed.ReduceOp.SUM, head.group)
        ctx.save_for_backward(hidden, weight, bias, place, ids)
        ctx.head = head
        return products

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, place, ids = ctx.saved_tensors
        head: OutputHead = ctx.head
        totals = [
            torch.zeros_like(each, dtype=torch.float32) if each is not None and needed else None
            for each, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        ]
        for here in _chunks(len(ids), _IDS_AT_ONCE):
            row, is_own = head.own_rows(ids[here])
            grad, at = (grads[0][here] * is_own)[:, None], place[here]
            for total, index, part in zip(
                totals, (at, row, row), (weight[row], hidden[at], torch.ones_like(grad)), strict=True
            ):
                if total is not None:
                    values = grad * part.float()
                    total.index_put_((index,), values.view(-1, *total.shape[1:]), accumulate=True)
        if totals[0] is not None and head.group is not None:
            distributed.all_reduce(totals[0], distributed.ReduceOp.SUM, head.group)
        rounded = [
            None if total is None else total.to(each.dtype)
            for total, each in zip(totals, (hidden, weight, bias), strict=True)
        ]
        return (*rounded, None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOptions:
    """How a forward computes logprobs. No option changes a loss by more than rounding."""

    chunk_size: int | None = None
    """Tokens per chunk of the projection onto the vocabulary (default: ``DEFAULT_CHUNK``; ``GPU_CHUNK``)."""
    vocab_chunk_size: int = DEFAULT_VOCAB_CHUNK
    """Vocabulary entries per chunk of the projection."""
    entropy_gradient: bool = False
    """Give entropies a gradient."""
    divergence: bool = False
    """Return the divergence from a teacher too, for forests with the teacher's likeliest ids."""
    value_head: nn.Module | None = None
    """Return its values too, as the last tensor."""
    values_alone: bool = False
    """Return the values alone."""

    @property
    def for_logprobs(self) -> ForwardOptions:
        """The same options for logprobs and entropies alone."""
        return replace(self, divergence=False, value_head=None)


def forest_logprobs(
    hidden: Tensor,
    head: OutputHead,
    forest: TokenForest,
    options: ForwardOptions,
    *,
    chosen: Ints | None = None,
    parent: Ints | None = None,
) -> tuple[Tensor, ...]:
    """Return logprob (float32[T], with gradient) and entropy (float32[T]) of trainable tokens.

    With ``options.divergence``, a forest that has a teacher's likeliest ids gives a third tensor, the
    ``reverse_kl`` (float32[T], with gradient) to the teacher. With ``options.value_head`` the last tensor is
    the value (float32[T]) before each token. Its gradient ends at ``hidden``, and exists under ``no_grad``
    too; that of ``options.values_alone`` reaches ``hidden``.

    Both are of softmax(logits / temperature), at the temperature that each token was sampled with and over
    the ids that it was sampled from.
    ``hidden`` [N, H] has a row per token of ``forest``. For a part of the tokens, ``chosen`` (int64[t])
    selects trainable tokens, and ``parent`` (int64[t]) is the row of ``hidden`` that predicts each one.
    """
    target = forest.target if chosen is None else forest.target[chosen]
    temperature = forest.temperature if chosen is None else forest.temperature[chosen]
    rows = forest.parent[target] if parent is None else parent
    mask = forest.sampling_mask
    if mask is not None and chosen is not None:
        mask = mask.select(chosen)
    parents, ids = (torch.from_numpy(array).to(hidden.device) for array in (rows, forest.input_ids[target]))
    values: tuple[Tensor, ...] = ()
    if options.value_head is not None and options.values_alone:
        return (options.value_head(hidden[parents].float()).reshape(len(parents)),)
    if options.value_head is not None:
        # Enable it: while the critic warms up, it alone is trained.
        with torch.enable_grad():
            values = (options.value_head(hidden.detach()[parents].float()).reshape(len(parents)),)
    logprobs, entropy = token_logprobs(
        hidden,
        head,
        parents,
        ids,
        temperature=torch.from_numpy(temperature),
        kept=None if mask is None else KeptIds.of(mask, hidden.device),
        entropy_gradient=options.entropy_gradient,
        chunk_size=options.chunk_size,
        vocab_chunk_size=options.vocab_chunk_size,
    )
    top = None if forest.columns is None else forest.columns.top.get(TEACHER)
    if top is None or not options.divergence:
        return logprobs, entropy, *values
    if chosen is not None:
        top = top.select(chosen)
    divergence = reverse_kl(hidden, head, parents, ids, torch.from_numpy(temperature), logprobs, top, mask)
    return logprobs, entropy, divergence, *values


_ROWS = 256
"""Tokens whose logits are in memory at a time."""


class IdScorer:
    """A model that scores one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        """Load the model to the accelerator, or to the CPU without one. Raises ModelError."""
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = load_model(folder, ModelConfig(), resolve_dtype("auto"))
        disable_dropout(model)
        fuse_norms(model)
        model.to(device=self._device).eval()  # type: ignore[call-arg]
        self._head = output_head(model)
        self._executor = build_executor(model, trains=False)

    @torch.no_grad()
    def score(
        self, ids: Sequence[int], first: int, top: int
    ) -> tuple[NDArray[np.float32], list[dict[int, float]]]:
        """Return the logprobs of ``ids[first:]``, float32, and {id: logprob} of the ``top`` likeliest ids.

        Logits are those of temperature 1, in float32.
        """
        forest = forest_from_sequences([ids], [[place >= first for place in range(len(ids))]])
        hidden = self._executor(forest)
        target = torch.tensor(ids[first:], device=self._device)
        projection = Projection(self._head, len(self._head.weight))
        values: list[Tensor] = []
        rows: list[dict[int, float]] = []
        for start in range(first - 1, len(ids) - 1, _ROWS):
            states = hidden[start : min(start + _ROWS, len(ids) - 1)]
            ((_, logits),) = projection.blocks(states, 1.0)
            logprobs = logits.log_softmax(-1)
            own = target[start - first + 1 : start - first + 1 + len(states)]
            values.append(logprobs.gather(1, own[:, None])[:, 0])
            if top:
                best = logprobs.topk(min(top, logprobs.shape[1]), -1)
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                rows += [dict(zip(*pair, strict=True)) for pair in pairs]
        return torch.cat(values).float().cpu().numpy(), rows
