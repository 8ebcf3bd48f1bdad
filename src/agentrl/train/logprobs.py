"""Logprobs of chosen tokens from hidden states, a chunk at a time; the [T, V] logits are never held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.errors import ModelError

DEFAULT_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The last layer of a causal LM: logits = cap·tanh(scale·(hidden @ weightᵀ + bias)/cap)."""

    weight: Tensor
    """[V, H]; the embedding itself where the model ties them."""
    bias: Tensor | None = None
    """[V]."""
    scale: float = 1.0
    softcap: float | None = None


def output_head(model: nn.Module) -> OutputHead:
    """The head of a Hugging Face causal LM, with the logit scaling that its config declares.

    Raises ModelError for a head that is no linear layer. ``check_output_head`` compares it with the model.
    """
    layer = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(layer, nn.Linear):
        raise ModelError(
            f"{type(model).__name__} ends in {type(layer).__name__}, not in a linear layer",
            cure="use a causal language model with an lm_head",
        )
    config: Any = model.config
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
        getattr(config, "logits_scaling", None) or 1.0
    )
    return OutputHead(layer.weight, layer.bias, scale, getattr(config, "final_logit_softcapping", None))


@torch.no_grad()
def check_output_head(model: nn.Module, hidden: Tensor, logits: Tensor, *, tolerance: float = 1e-2) -> None:
    """Refuse a model whose own ``logits`` [n, V] are not ``output_head`` of its ``hidden`` [n, H].

    Raises ModelError: its head does something that its config does not declare.
    """
    ours = _logits(output_head(model), hidden.float())
    error = float((ours - logits.float()).abs().max())
    if not error <= tolerance * max(1.0, float(logits.abs().max())):
        raise ModelError(
            f"the logits of {type(model).__name__} differ by {error:.3g} from its linear head's",
            cure="use a model whose logits are a linear layer of the last hidden state",
        )


def token_logprobs(
    hidden: Tensor,
    head: OutputHead,
    parent: Tensor,
    target_ids: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = DEFAULT_CHUNK,
) -> tuple[Tensor, Tensor]:
    """log softmax(logits/temperature) of each target, and the entropy of that softmax, in nats.

    hidden [N, H] with gradient; parent int64[T], the position whose logits predict each target; target_ids
    int64[T]. Returns (logprobs float32[T] with gradient to hidden, weight and bias; entropy float32[T]
    without). Logits are float32 whatever the weights and any autocast are. Only the T positions are
    projected, ``chunk_size`` at a time, and again in the backward, so that no more than [chunk_size, V]
    logits exist at once.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, and logprobs need one above 0")
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}")
    logprobs, entropy = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden[parent], head.weight, head.bias, target_ids, head.scale, head.softcap, temperature, chunk_size
    )
    return logprobs, entropy


def _logits(head: OutputHead, hidden: Tensor) -> Tensor:
    """float32[n, V] of float32[n, H]."""
    logits = hidden @ head.weight.float().T
    if head.bias is not None:
        logits += head.bias.float()
    if head.scale != 1.0:
        logits *= head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward keeps the inputs and each token's log-normaliser; backward makes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_ids: Tensor,
        scale: float,
        softcap: float | None,
        temperature: float,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        count = len(target_ids)
        logprobs = hidden.new_empty(count, dtype=torch.float32)
        entropy, normaliser = torch.empty_like(logprobs), torch.empty_like(logprobs)
        with torch.autocast(hidden.device.type, enabled=False):
            head = OutputHead(weight.float(), bias, scale, softcap)
            for start in range(0, count, chunk_size):
                here = slice(start, start + chunk_size)
                logits = _logits(head, hidden[here].float()).div_(temperature)
                normaliser[here] = torch.logsumexp(logits, -1)
                logits.sub_(normaliser[here, None])
                logprobs[here] = logits.gather(-1, target_ids[here, None])[:, 0]
                entropy[here] = -torch.einsum("tv,tv->t", logits.exp(), logits)
        ctx.save_for_backward(hidden, weight, bias, target_ids, normaliser)
        ctx.numbers = (scale, softcap, temperature, chunk_size)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target_ids, normaliser = ctx.saved_tensors
        scale, softcap, temperature, chunk_size = ctx.numbers
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            head = OutputHead(weight.float(), bias, scale, softcap)
            for start in range(0, len(target_ids), chunk_size):
                here = slice(start, start + chunk_size)
                states = hidden[here].float()
                logits = _logits(head, states)
                slope = scale / temperature
                capped = None if softcap is None else 1 - (logits / softcap).square()
                grad_logits = torch.exp(logits.div_(temperature) - normaliser[here, None]).neg_()
                grad_logits.scatter_add_(-1, target_ids[here, None], torch.ones_like(normaliser[here, None]))
                grad_logits.mul_(grads[0][here, None] * slope)
                if capped is not None:
                    grad_logits.mul_(capped)
                if grad_hidden is not None:
                    grad_hidden[here] = (grad_logits @ head.weight).to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight.addmm_(grad_logits.T, states)
                if grad_bias is not None:
                    grad_bias.add_(grad_logits.sum(0))
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None, None, None, None, None,
        )  # fmt: skip
