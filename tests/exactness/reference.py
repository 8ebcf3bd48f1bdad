"""Compute a step with the plain model, and measure how far another computation deviates from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.config.training import VERSION_LOGPROBS
from agentrl.data.planner import PrefixMerging, build_micro_batches
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.documents.model_call import unpack_floats, unpack_ids
from agentrl.documents.record import TokenColumns
from agentrl.documents.training import DBRecordData, Node
from agentrl.losses.compute import Denominators, old_logprobs, reduce_losses, token_losses
from agentrl.losses.loss import TokenBatch
from agentrl.losses.settings import LossSettings
from agentrl.model.logprobs import ForwardOptions
from agentrl.train.step import forward_backward

AGES = {0: 3, 2: 0}
"""{version: age} of the versions in ``make_step``."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The loss of a step and the gradient of every parameter that has one."""

    loss: float
    gradients: Mapping[str, Tensor]

    def deviation(self, expected: Computed) -> float:
        """Return the largest relative deviation of the loss and of any gradient from ``expected``.

        A gradient's is ‖g − e‖ / ‖e‖, but relative to a hundredth of the largest gradient's norm where ‖e‖ is
        below it: 1e-5 of less is what float32 does not resolve. It is 1 where one has a gradient that the
        other has not. The loss's is relative to max(1, |loss|).
        """
        if self.gradients.keys() != expected.gradients.keys():
            return 1.0
        norms = {name: float(gradient.norm()) for name, gradient in expected.gradients.items()}
        floor = max(max(norms.values(), default=0.0) * 1e-2, 1e-12)
        worst = abs(self.loss - expected.loss) / max(1.0, abs(expected.loss))
        for name, gradient in self.gradients.items():
            distance = float((gradient - expected.gradients[name]).norm())
            worst = max(worst, distance / max(norms[name], floor))
        return worst


def plain_step(model: Any, data: Sequence[DBRecordData], settings: LossSettings) -> Computed:
    """Return loss and gradients from ``model`` itself: a call at a time, whole logits, one loss batch."""
    model.set_attn_implementation("sdpa")
    model.zero_grad(set_to_none=True)
    device = model.device
    pieces: list[Tensor] = []
    entropies: list[Tensor] = []
    columns: list[tuple[int, float, float, int, float]] = []
    for row, item in enumerate(data):
        ids, behavior = unpack_ids(item.input_ids), unpack_floats(item.behavior_logprobs)
        packed = TokenColumns.unpack(item.columns, item.trainable_tokens)
        assert packed is not None
        at_version = packed.values[VERSION_LOGPROBS]
        place = 0
        for span in item.spans:
            path = path_to(item.nodes, span.end)
            logits = model(input_ids=torch.from_numpy(ids[path].astype(np.int64)).to(device)[None]).logits[0]
            logprobs = torch.log_softmax(logits.float() / span.temperature, -1)
            for index in range(span.start, span.end):
                at = path.index(index)
                pieces.append(logprobs[at - 1, int(ids[index])])
                entropies.append(-(logprobs[at - 1].exp() * logprobs[at - 1]).sum())
                values = float(behavior[place]), span.version, float(at_version[place])
                columns.append((row, span.advantage, *values))
                place += 1
    loss = _loss(torch.stack(pieces), torch.stack(entropies), columns, len(data), settings)
    loss.backward()  # type: ignore[no-untyped-call]
    return taken(model, float(loss.detach()))


def trainer_step(
    model: Any,
    data: Sequence[DBRecordData],
    settings: LossSettings,
    *,
    merging: PrefixMerging,
    max_tokens: int,
    executor: str = "auto",
    options: ForwardOptions | None = None,
) -> Computed:
    """Return loss and gradients as training computes them."""
    model.zero_grad(set_to_none=True)
    vocabulary = model.config.get_text_config().vocab_size
    forests = build_micro_batches(data, max_tokens, vocab_size=vocabulary, merging=merging, ages=AGES)
    report = forward_backward(ParallelModel(model, executor=executor), forests, settings, options=options)
    return taken(model, report["loss"])


def longest_sequence(data: Sequence[DBRecordData]) -> int:
    """Return the tokens of the longest path from a root to a leaf: the smallest possible ``max_tokens``."""
    return max(len(path_to(item.nodes, node.end)) for item in data for node in item.nodes)


def path_to(nodes: Sequence[Node], end: int) -> list[int]:
    """Return the stored indices from the root to token ``end`` − 1."""
    number = next(i for i, node in enumerate(nodes) if node.start < end <= node.end)
    path: list[int] = []
    while number >= 0:
        node = nodes[number]
        path = [*range(node.start, end), *path]
        number = node.parent
        end = nodes[number].end
    return path


def _loss(
    logprobs: Tensor,
    entropy: Tensor,
    columns: Sequence[tuple[int, float, float, int, float]],
    rows: int,
    settings: LossSettings,
) -> Tensor:
    device = logprobs.device
    row, version = (torch.tensor([c[i] for c in columns], device=device) for i in (0, 3))
    advantages, behavior, at_version = (
        torch.tensor([c[i] for c in columns], device=device) for i in (1, 2, 4)
    )
    age = torch.tensor([AGES[column[3]] for column in columns], device=device)
    if not settings.loss.from_policy:
        behavior = logprobs.detach()
    batch = TokenBatch(
        logprobs=logprobs,
        entropy=entropy,
        old_logprobs=old_logprobs(settings.old_logprobs, logprobs, behavior, age, at_version),
        behavior_logprobs=behavior,
        advantages=advantages,
        row=row,
        version=version,
        age=age,
        mask=torch.ones_like(row, dtype=torch.bool),
        trajectories=rows,
    )
    whole = Denominators(int(batch.mask.sum()), torch.unique(row[batch.mask]).numel())
    return reduce_losses(token_losses(batch, settings).losses, batch.mask, row, rows, whole, settings)


def taken(model: Any, loss: float) -> Computed:
    """Return the gradients of ``model``, which has none from now on."""
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Computed(loss, gradients)
