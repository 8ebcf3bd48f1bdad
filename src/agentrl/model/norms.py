"""RMS norms of a model as one kernel on a GPU."""

from __future__ import annotations

import inspect
import logging
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

logger = logging.getLogger(__name__)

_EPSILONS = ("variance_epsilon", "eps")
"""What transformers' norms call the number that they add to the mean of squares."""


def fuse_norms(model: nn.Module) -> None:
    """Let the RMS norms of ``model`` run torch's fused kernel where their input is on a GPU.

    As transformers writes a norm, it is eight kernels forward and more backward, each of which moves all
    hidden states: a fifth of a step's time on an H100 (``scripts/bench/roofline.py``). The fused kernel
    rounds once, after the weight. A CPU has no such kernel, and one of AMD's has returned wrong gradients
    (https://github.com/pytorch/pytorch/issues/190828): there a norm stays as it is.

    Each norm is tried on numbers, and left alone if it computes anything else, as Gemma's do: norms of one
    class may differ, as those of Gemma 4 with and without a weight do.
    """
    for module in model.modules():
        if _is_plain(module):
            module.forward = MethodType(_fused(type(module).forward, _epsilon(module)), module)


def is_fused(norm: nn.Module) -> bool:
    """Return whether ``norm`` runs the fused kernel on a GPU."""
    return hasattr(vars(norm).get("forward"), _MARK)


_MARK = "runs_fused_kernel"


def _fused(plain: Any, epsilon: float | None) -> Any:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        is_fused = hidden_states.is_cuda and torch.version.hip is None
        if not is_fused or hidden_states.dtype != weight.dtype or isinstance(weight, DTensor):
            result: Tensor = plain(self, hidden_states)
            return result
        return F.rms_norm(hidden_states, weight.shape, weight, epsilon)

    setattr(forward, _MARK, True)
    return forward


def _epsilon(module: nn.Module) -> float | None:
    found = [getattr(module, name) for name in _EPSILONS if hasattr(module, name)]
    return found[0] if found else None


def _is_plain(module: nn.Module) -> bool:
    """Return whether ``module`` computes ``x / sqrt(mean(x²) + epsilon) * weight`` of the last dimension."""
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1:
        return False
    if "forward" in vars(module):  # another library's, which calls its own
        return False
    if len(inspect.signature(module.forward).parameters) != 1:  # a gated norm takes a gate
        return False
    epsilon = _epsilon(module)
    if [name for name, _ in module.named_parameters()] != ["weight"] or not isinstance(epsilon, float):
        return False
    # Let the result be large: a norm may clamp it.
    tried = torch.linspace(0.5, 200.0, weight.numel(), device="cpu")
    hidden = torch.linspace(-1.0, 1.0, 2 * weight.numel(), device="cpu").view(2, -1) ** 3
    expected = F.rms_norm(hidden, weight.shape, tried, epsilon)
    try:
        with torch.no_grad():
            found = functional_call(module, {"weight": tried}, (hidden,))
    except Exception as error:  # noqa: BLE001  a model's own code may want three dimensions, or a GPU
        logger.debug("%s stays as it is: it cannot be tried: %s", type(module).__name__, error)
        return False
    return (
        isinstance(found, Tensor) and found.shape == expected.shape
        and torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    )  # fmt: skip
