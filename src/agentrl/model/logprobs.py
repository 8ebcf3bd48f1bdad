"""Compute logprobs and entropies of tokens without the [T, V] logits in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn

from agentrl.documents.model_call import SamplingMask
from agentrl.errors import ModelError


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
    chunk_size: int = DEFAULT_CHUNK,
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
            self.total[rows] += weights.sum(1)
            self.weighted[rows] += weights.mul_(logits[rows]).sum(1)

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
                if grad_hidden is not None:
                    _add_product(grad_states, logits, weight[columns])
                if grad_weight is not None:
                    _add_product(grad_weight[columns], logits.T, states)
                if grad_bias is not None:
                    grad_bias[columns] += logits.sum(0)
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
    """Add left @ right to ``total``; multiplies 16-bit operands as such on CUDA, in float32 elsewhere."""
    if right.is_cuda and right.dtype != torch.float32:
        total += torch.mm(left.to(right.dtype), right, out_dtype=torch.float32)
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
