"""Choose the dtypes of a training step by what the device multiplies fast."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from agentrl.config.schema import ModelConfig, TrainConfig

logger = logging.getLogger(__name__)

WORTHWHILE = 1.2
"""How many times faster than in float32 products in bfloat16 must be to be chosen: casts cost time too."""
NARROWEST = 192
"""On a CPU, narrower models compute in float32: there a step's time is not in its products. At a hidden size
of 128, bfloat16 products are 2.8 times as fast, and a step with them takes 1.9 times as long."""
_WIDEST = 1024
"""A measured product is at most this wide. Wider ones run at the same speed, and take longer."""
_PRODUCT_FLOPS = 5e7
"""Size of a measured product: at most a fifth of a second on a CPU that emulates bfloat16."""
_PRODUCT_SECONDS = 0.05
"""How long the product is repeated in each dtype."""


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training step. Logits and losses are float32 in every case."""

    weights: torch.dtype = torch.float32
    """Of trained weights, their gradients and the moments of AdamW."""
    products: torch.dtype = torch.float32
    """Of matrix products, of activations, and of weights that an adapter or a reference model freezes."""

    @property
    def autocast_bf16(self) -> Literal["true", "false"]:
        """What ``--autocast_bf16 auto`` came to; the run keeps it, so that a what-if takes the same."""
        return "true" if self.products is torch.bfloat16 else "false"

    @property
    def policy(self) -> MixedPrecisionPolicy | None:
        """FSDP2's policy: cast weights when they are gathered, add gradients in the dtype of the weights.

        None if weights are multiplied as they are stored. Autocast would keep a cast copy of every weight
        until the forward ends, gather in float32, and leave grouped products of experts in float32.
        """
        if self.products == self.weights:
            return None
        # Inputs have the dtype of products already, as in a model that is loaded in it.
        return MixedPrecisionPolicy(self.products, reduce_dtype=self.weights, cast_forward_inputs=False)


@dataclass(frozen=True)
class ProductSpeed:
    """FLOP/s of a matrix product of one size on one device, in two dtypes."""

    rows: int
    width: int
    float32: float
    bfloat16: float

    @property
    def factor(self) -> float:
        """How many times faster bfloat16 is."""
        return self.bfloat16 / self.float32

    def __str__(self) -> str:
        """Return the figures as the log shows them."""
        return (
            f"a {self.rows} x {self.width} x {self.width} product runs at {self.bfloat16 / 1e9:.1f} GFLOP/s"
            f" in bfloat16 and {self.float32 / 1e9:.1f} in float32"
        )


def choose_precision(
    model: ModelConfig, train: TrainConfig, device: torch.device, hidden_size: int
) -> Precision:
    """Return the dtypes that ``--dtype`` and ``--autocast_bf16`` set on ``device``, and log why.

    ``auto`` is float32 for weights: AdamW on bfloat16 weights makes 1 to 10 percent of an update at learning
    rates of 1e-6 to 1e-5. For products it is bfloat16 where the device multiplies it faster: known of GPUs,
    measured elsewhere in less than half a second. Logs a warning with the factor where the flags choose the
    slower one.
    """
    is_fast, reason = bfloat16_speed(device, hidden_size)
    if model.dtype == "bfloat16":
        logger.info("weights and products in bfloat16 (--dtype bfloat16)")
        if not is_fast:
            logger.warning("--dtype bfloat16 makes training slower here: %s; auto would be float32", reason)
        return Precision(torch.bfloat16, torch.bfloat16)
    choice = {"true": True, "false": False}.get(train.autocast_bf16, is_fast)
    if choice and not is_fast:
        logger.warning("--autocast_bf16 true makes training slower here: %s; auto would not set it", reason)
    precision = Precision(torch.float32, torch.bfloat16 if choice else torch.float32)
    logger.info(
        "products in %s, weights in float32: %s (--autocast_bf16 %s)",
        "bfloat16" if choice else "float32", reason, train.autocast_bf16,
    )  # fmt: skip
    return precision


def bfloat16_speed(device: torch.device, width: int) -> tuple[bool, str]:
    """Return whether ``device`` multiplies bfloat16 notably faster than float32, and the reason in words.

    ``width`` is the model's hidden size.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return True, f"{name} multiplies bfloat16"
        speed = measure_products(device, min(width, _WIDEST))
        return False, f"{name} only emulates bfloat16: {speed}, {speed.factor:.2g} times as fast"
    if width < NARROWEST:
        return False, f"a model of hidden size {width} spends its time outside its products"
    speed = measure_products(device, min(width, _WIDEST))
    return speed.factor >= WORTHWHILE, f"{speed}, {speed.factor:.2g} times as fast"


@cache
def measure_products(device: torch.device, width: int) -> ProductSpeed:
    """Time a product of ``width`` columns in float32 and in bfloat16, with the process's threads."""
    rows = max(16, int(_PRODUCT_FLOPS / (2 * width * width)))
    flops = 2 * rows * width * width
    found = [flops / product_seconds(device, rows, width, dtype) for dtype in (torch.float32, torch.bfloat16)]
    return ProductSpeed(rows, width, *found)


def product_seconds(device: torch.device, rows: int, width: int, dtype: torch.dtype) -> float:
    """Return the seconds of the fastest product of a linear layer; the first one also builds the kernel."""
    inputs = torch.ones(rows, width, dtype=dtype, device=device)
    weight = torch.ones(width, width, dtype=dtype, device=device)  # multiplied transposed, as layers do
    best, started = float("inf"), time.perf_counter()
    while True:
        begun = time.perf_counter()
        torch.nn.functional.linear(inputs, weight)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        now = time.perf_counter()
        best = min(best, now - begun)
        if now - started > _PRODUCT_SECONDS:
            return best
