"""Count the FLOPs of a decoder, look up or measure a device's FLOP/s, and time work on a device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from agentrl.data.forest import TokenForest

_DENSE_BF16_TFLOPS: dict[str, float] = {
    "B200": 2250.0, "GH200": 989.0, "H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0,
    "H800": 989.0, "H20": 148.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0, "L40": 181.0, "L4": 121.0,
    "A10G": 70.0, "A10": 125.0, "A40": 149.7, "RTX 4090": 165.2, "MI300X": 1307.4,
}  # fmt: skip
"""Without sparsity, from the vendors' data sheets. The first name that a device's name contains counts."""
_MEASURED_SIZE = 1024
_MEASURED_TIMES = 5


class Stopwatch:
    """Adds up wall-clock seconds by name. On CUDA it waits for the kernels that were launched."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = self._now()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Add the time since the last lap to ``name``."""
        now = self._now()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def stated_peak(device_name: str) -> float | None:
    """Return the FLOP/s of dense bfloat16 products that the vendor states; None for an unknown device."""
    found = next((peak for name, peak in _DENSE_BF16_TFLOPS.items() if name in device_name), None)
    return None if found is None else found * 1e12


@cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s that products of ``dtype`` matrices can reach on ``device``.

    For bfloat16 on a known accelerator this is the vendor's number. Otherwise it is the fastest of a few
    products of two 1024 x 1024 matrices, measured once per process with its number of threads.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        stated = stated_peak(torch.cuda.get_device_name(device))
        if stated is not None:
            return stated
    left, right = (torch.randn(_MEASURED_SIZE, _MEASURED_SIZE).to(device, dtype) for _ in range(2))
    best = float("inf")
    for _ in range(_MEASURED_TIMES):
        watch = Stopwatch(device)
        torch.mm(left, right)
        watch.lap("product")
        best = min(best, watch.seconds["product"])
    return 2 * _MEASURED_SIZE**3 / best


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes in a decoder's configuration that decide how many FLOPs a token costs."""

    layers: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Width of the feed-forward layers that one token passes; in a mixture of experts, their sum."""
    router: int = 0
    """Experts that a router chooses from; 0 without a router."""
    gated: bool = True
    """Three feed-forward matrices (SwiGLU) instead of two."""

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Return the shape that a Hugging Face configuration declares. All layers count alike."""
        config = config.get_text_config()
        experts = int(getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0) or 0)
        ffn = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
        if experts:
            each = int(getattr(config, "moe_intermediate_size", None) or ffn)
            shared = int(getattr(config, "shared_expert_intermediate_size", 0) or 0)
            ffn = each * int(config.num_experts_per_tok) + shared
        heads = int(config.num_attention_heads)
        activation = str(getattr(config, "hidden_act", getattr(config, "activation_function", "silu")))
        return cls(
            layers=int(config.num_hidden_layers),
            hidden=int(config.hidden_size),
            vocabulary=int(config.vocab_size),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            ffn=ffn,
            router=experts,
            gated=activation in ("silu", "swish") or "glu" in activation or config.model_type == "gemma2",
        )

    @property
    def layer_weights(self) -> int:
        """Weights of all layers that one token is multiplied with, without the output head."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        feed_forward = self.hidden * self.ffn * (3 if self.gated else 2)
        return self.layers * (attention + feed_forward + self.hidden * self.router)

    def step_flops(self, tokens: int, projected: int, pairs: int) -> float:
        """Return the FLOPs of forward and backward, as MFU counts them (arXiv 2204.02311).

        ``tokens`` pass the layers, ``projected`` of them also pass the output head, and each layer's
        attention computes ``pairs`` of a query and a key. A product costs 2 FLOPs; its backward costs twice
        as many. Recomputation does not count.
        """
        linear = 2 * (tokens * self.layer_weights + projected * self.hidden * self.vocabulary)
        attention = 4 * pairs * self.layers * self.heads * self.head_dim
        return 3.0 * (linear + attention)


def attention_pairs(forest: TokenForest) -> int:
    """Count pairs of a query and a key that it sees: each token sees its ancestors and itself."""
    return int(forest.position_ids.sum()) + forest.tokens
