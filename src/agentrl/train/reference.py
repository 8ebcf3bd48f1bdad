"""Logprobs that stay while a step's updates move the policy: its own at the start, and a reference's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from agentrl.config.schema import LossConfig, ModelConfig
from agentrl.data.forest import TokenForest
from agentrl.errors import ModelError
from agentrl.model.load import Policy, base_folder, disable_dropout, load_model
from agentrl.model.lora import Adapter
from agentrl.train.step import ForwardOptions, each_logprobs

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

Logprobs = Callable[[Sequence[TokenForest], ForwardOptions], Iterable[tuple[Tensor, Tensor]]]
"""``each_logprobs`` of some model."""


@dataclass(frozen=True)
class FrozenLogprobs:
    """Which logprobs a step's forests keep: of the policy as it starts, of a reference, both or none."""

    start: bool = False
    reference: Reference | None = None

    @torch.no_grad()
    def attach(
        self, forests: Sequence[TokenForest], policy: Logprobs, options: ForwardOptions
    ) -> list[TokenForest]:
        """The forests with what is asked for, computed once each and kept in the CPU's memory."""
        anchored = list(forests)
        if self.start:
            computed = policy(anchored, options)
            anchored = [
                replace(forest, start_logprob=_numbers(found))
                for forest, found in zip(anchored, computed, strict=True)
            ]
        if self.reference is not None:
            computed = self.reference.logprobs(anchored, policy, options)
            anchored = [
                replace(forest, reference_logprob=_numbers(found))
                for forest, found in zip(anchored, computed, strict=True)
            ]
        return anchored


@dataclass(frozen=True)
class Reference:
    """The model that ``--kl_coef`` pulls to: one of its own, or the policy without its adapter."""

    model: Any = None
    adapter: Adapter | None = None

    def logprobs(
        self, forests: Sequence[TokenForest], policy: Logprobs, options: ForwardOptions
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Logprob and entropy of each trainable token, of each forest in turn."""
        if self.adapter is None:
            yield from each_logprobs(self.model, forests, options)
            return
        with self.adapter.disabled():
            yield from policy(forests, options)


def build_reference(
    loss: LossConfig, config: ModelConfig, policy: Policy, device: torch.device
) -> Reference | None:
    """What ``--kl_coef`` above 0 asks for: the model of ``--reference_model``, or the one that the run starts
    from, which a policy with an adapter holds within itself.

    Raises ModelError for a folder that is no model, or one with another vocabulary.
    """
    if loss.kl_coef == 0:
        return None
    if config.reference_model is None and policy.adapter is not None:
        return Reference(adapter=policy.adapter)
    folder = Path(config.reference_model or policy.base)
    base_folder(replace(config, model_name_or_path=str(folder)))
    model = load_model(folder, config)
    own, others = (_vocabulary(item) for item in (policy.model, model))
    if own != others:
        raise ModelError(
            f"--reference_model {folder} has {others} token ids, and the policy {own}",
            hint="give a model with the policy's tokenizer",
        )
    disable_dropout(model)
    model.requires_grad_(requires_grad=False)
    model.to(device)  # type: ignore[arg-type]
    logger.info("the policy is kept near %s (--kl_coef %g, %s)", folder, loss.kl_coef, loss.kl_estimator)
    return Reference(model=model)


def _vocabulary(model: Any) -> int:
    return cast("nn.Embedding", model.get_input_embeddings()).num_embeddings


def _numbers(computed: tuple[Tensor, Tensor]) -> Any:
    """float32[T] of the logprobs."""
    return computed[0].detach().float().cpu().numpy()
