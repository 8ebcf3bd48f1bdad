"""Compute the logprobs that stay as they are while a step's updates change the policy.

These are the policy's own at the start of the step, and those of a reference model (``--kl_coef``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.config.schema import LossConfig, ModelConfig
from agentrl.data.forest import TokenForest
from agentrl.distributed.apply import parallelize
from agentrl.distributed.load_shards import load_shards
from agentrl.distributed.mesh import Mesh
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.errors import ConfigError, ModelError
from agentrl.model.forward import ForwardOptions, check_model
from agentrl.model.load import Policy, base_folder, disable_dropout, empty_model, load_model
from agentrl.model.lora import Adapter

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FrozenLogprobs:
    """Which logprobs are attached to a step's forests: of the policy, of a reference, both or none."""

    start: bool = False
    """Attach those of the policy at the start of the step."""
    reference: Reference | None = None

    @torch.no_grad()
    def attach(
        self, policy: ParallelModel, forests: Sequence[TokenForest], options: ForwardOptions
    ) -> list[TokenForest]:
        """Return the forests with the logprobs attached, float32[T] in the CPU's memory."""
        attached = list(forests)
        if self.start:
            computed = policy.logprobs(attached, options)
            attached = [
                replace(forest, start_logprob=_to_numpy(logprobs))
                for forest, (logprobs, _) in zip(attached, computed, strict=True)
            ]
        if self.reference is not None:
            computed = self.reference.logprobs(policy, attached, options)
            attached = [
                replace(forest, reference_logprob=_to_numpy(logprobs))
                for forest, (logprobs, _) in zip(attached, computed, strict=True)
            ]
        return attached


@dataclass(frozen=True)
class Reference:
    """The model that ``--kl_coef`` keeps the policy near: its own, or the policy without its adapter."""

    model: ParallelModel | None = None
    """Split and sharded over the ranks like the policy."""
    adapter: Adapter | None = None
    """The policy's, if the reference is the policy without it."""

    def logprobs(
        self, policy: ParallelModel, forests: Sequence[TokenForest], options: ForwardOptions
    ) -> list[tuple[Tensor, Tensor]]:
        """Return logprob and entropy of each trainable token of each forest."""
        if self.model is not None:
            return self.model.logprobs(forests, options)
        assert self.adapter is not None
        with self.adapter.disabled():
            return policy.logprobs(forests, options)


def build_reference(
    loss: LossConfig,
    config: ModelConfig,
    policy: Policy,
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
    *,
    max_tokens: int,
) -> Reference | None:
    """Return the reference that ``--kl_coef`` above 0 needs: ``--reference_model`` or the run's base model.

    Its weights are held in ``dtype``, that of the policy's products, and split and sharded like the policy's.
    A policy with an adapter contains its base model. Raises ModelError for a folder that is not a model, or
    for a model with another vocabulary, and ConfigError for one that the policy's layout cannot split.
    """
    if loss.kl_coef == 0:
        return None
    if config.reference_model is None and policy.adapter is not None:
        return Reference(adapter=policy.adapter)
    folder = Path(config.reference_model or policy.base)
    base_folder(replace(config, model_name_or_path=str(folder)))
    is_shared = mesh.layout.world > 1
    model = (empty_model if is_shared else load_model)(folder, config, dtype)
    expected, found = (_vocabulary(item) for item in (policy.model, model))
    if found != expected:
        raise ModelError(
            f"--reference_model {folder} has {found} token ids, and the policy {expected}",
            hint="give a model with the policy's tokenizer",
        )
    disable_dropout(model)
    check_model(model)
    model.requires_grad_(requires_grad=False)
    try:
        parallel = parallelize(model, mesh, max_tokens=max_tokens)
    except ConfigError as error:
        raise ConfigError(
            f"--reference_model {folder} is split like the policy: {error.message}", hint=error.hint
        ) from error
    if is_shared:
        load_shards(model, folder, device, config)
    logger.info("the policy is kept near %s (--kl_coef %g, %s)", folder, loss.kl_coef, loss.kl_estimator)
    return Reference(parallel.to(device))


def _vocabulary(model: Any) -> int:
    return cast("nn.Embedding", model.get_input_embeddings()).num_embeddings


def _to_numpy(logprobs: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = logprobs.detach().float().cpu().numpy()
    return found
