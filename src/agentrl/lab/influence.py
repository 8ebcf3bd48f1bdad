"""Measure how far each trajectory of a step moves the policy along a direction in weight space (TracIn).

A step adds −lr·P·Σ∇ℓ to the weights, where ℓ is a trajectory's part of the loss and P the scale of AdamW. To
first order the trajectory changes a function with gradient v by lr·⟨P·v, −∇ℓ⟩ (TracIn, arXiv 2002.08484; with
AdamW's scale: LESS, arXiv 2402.04333). All trajectories are compared with one direction, so the inner product
is computed as it is: a random projection would save no gradient, and add an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn

from agentrl.distributed.fsdp import local_part
from agentrl.documents.images import Image
from agentrl.documents.training import DBRecordData
from agentrl.model.logprobs import ForwardOptions
from agentrl.train.step import PolicyTrainer, StepLoss, explain_out_of_memory, split_updates

Images = Mapping[str, Image]
_NO_IMAGES: Images = MappingProxyType({})


@dataclass(frozen=True)
class Direction:
    """A direction in the space of the trained weights: float32 numbers for each parameter, on its device."""

    parts: Sequence[tuple[nn.Parameter, Tensor]]

    def take_product(self) -> float:
        """Return the inner product with the parameters' gradients, and clear these."""
        products = []
        for parameter, numbers in self.parts:
            if parameter.grad is not None:
                products.append((local_part(parameter.grad).float() * numbers).sum(dtype=torch.float64))
                parameter.grad = None
        return float(torch.stack(products).sum()) if products else 0.0

    def scaled_by(self, optimizer: torch.optim.Optimizer) -> Direction:
        """Return the direction divided by AdamW's √v̂ + ε, element by element.

        A parameter without moments keeps its numbers at the mean scale of the others.
        """
        scales: list[Tensor | None] = []
        groups = {id(item): group for group in optimizer.param_groups for item in group["params"]}
        for parameter, numbers in self.parts:
            state = optimizer.state.get(parameter, {})
            if "exp_avg_sq" not in state:
                scales.append(None)
                continue
            group = groups[id(parameter)]
            moment = local_part(state["exp_avg_sq"]).to(numbers.device).float()
            corrected = moment / (1 - group["betas"][1] ** float(state["step"]))
            scales.append(1 / (corrected.sqrt() + group["eps"]))
        known = [scale for scale in scales if scale is not None]
        mean = float(torch.stack([scale.mean() for scale in known]).mean()) if known else 1.0
        pairs = zip(self.parts, scales, strict=True)
        return Direction([
            (parameter, numbers * (mean if scale is None else scale)) for (parameter, numbers), scale in pairs
        ])  # fmt: skip


def likelihood_direction(
    trainer: PolicyTrainer, data: Sequence[DBRecordData], images: Images = _NO_IMAGES
) -> Direction:
    """Return the gradient of Σ A·log πθ over the trainable tokens of ``data``, with A their advantages.

    With advantages that are scores less their mean, this is the policy gradient of the score. Blocks.
    """
    trainer.model.train()
    trainer.model.zero_grad(set_to_none=True)
    forests = trainer.pack(data, images=images)
    with explain_out_of_memory(trainer.memory, trainer.max_tokens):
        for forest, (logprobs, *_) in trainer.model.micro_batches(forests, trainer.options):
            advantage = torch.from_numpy(forest.advantage).to(logprobs.device)
            torch.autograd.backward((advantage * logprobs).sum())
    parts = [
        (item, local_part(item.grad).float().clone())
        for item in trainer.model.parameters()
        if item.grad is not None
    ]
    trainer.model.zero_grad(set_to_none=True)
    return Direction(parts)


def influences(
    trainer: PolicyTrainer,
    data: Sequence[DBRecordData],
    direction: Direction,
    ages: Mapping[int, int] | None = None,
    images: Images = _NO_IMAGES,
) -> dict[str, float]:
    """Return {id: ⟨direction, −∇ℓ⟩} of the data of one step, with ℓ a trajectory's part of the step's loss.

    ``data``, ``ages`` and ``images`` are those of ``PolicyTrainer.train``. The loss is computed over the
    whole update, as in training, so clips, corrections and denominators are those of the step; then each
    trajectory runs by itself. Memory: one gradient beside the direction. The weights do not change. Each pass
    of ``--num_epochs_per_batch`` counts as the first one. Blocks.
    """
    options = replace(trainer.options, entropy_gradient=trainer.settings.entropy_coef > 0)
    found = {item.id: 0.0 for item in data}
    trainer.model.train()
    trainer.model.zero_grad(set_to_none=True)
    with explain_out_of_memory(trainer.memory, trainer.max_tokens):
        for part in split_updates(trainer.settings.loss.choose(data), trainer.mini_batches):
            for item, slope in zip(part, _slopes(trainer, part, ages, images, options), strict=True):
                if slope.any():
                    _backward(trainer, item, slope, ages, images, options)
                    found[item.id] = -trainer.epochs * direction.take_product()
    return found


def _slopes(
    trainer: PolicyTrainer,
    data: Sequence[DBRecordData],
    ages: Mapping[int, int] | None,
    images: Images,
    options: ForwardOptions,
) -> Sequence[Tensor]:
    """Return the derivatives of an update's loss by the logprob and the entropy of each trainable token.

    float32[2, trainable tokens] for each of ``data``, in the order of its spans.
    """
    frozen = replace(trainer.frozen, start=False)  # the logprobs of the start are those of these weights
    forests = frozen.attach(trainer.model, trainer.pack(data, ages, images), trainer.options)
    loss = StepLoss.start(trainer.model, forests, trainer.settings, options, data=data)
    sizes = [item.trainable_tokens for item in data]
    first = np.cumsum(sizes) - sizes
    slopes = torch.zeros(2, sum(sizes), device=trainer.policy.model.device)
    for forest in forests:
        if not forest.trainable_tokens:
            continue
        with torch.no_grad():
            values = trainer.model(forest, options)
        logprobs, entropy = (value.detach().float().requires_grad_() for value in values)
        torch.autograd.backward(loss.add(forest, logprobs, entropy))
        index = torch.from_numpy(first[forest.trajectory[forest.row]] + forest.label).to(slopes.device)
        for row, leaf in enumerate((logprobs, entropy)):
            if leaf.grad is not None:
                slopes[row, index] = leaf.grad
    return torch.split(slopes, sizes, dim=1)


def _backward(
    trainer: PolicyTrainer,
    item: DBRecordData,
    slope: Tensor,
    ages: Mapping[int, int] | None,
    images: Images,
    options: ForwardOptions,
) -> None:
    """Leave the gradient of one trajectory's part of the loss, which has the derivatives ``slope``."""
    forests = trainer.pack([item], ages, images)
    for forest, (logprobs, entropy) in trainer.model.micro_batches(forests, options):
        label = torch.from_numpy(forest.label).to(slope.device)
        part = (slope[0, label] * logprobs).sum()
        if options.entropy_gradient:
            part = part + (slope[1, label] * entropy).sum()
        torch.autograd.backward(part)
