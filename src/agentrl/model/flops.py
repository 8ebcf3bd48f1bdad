"""What a device multiplies fast: the dtypes of a training step, the FLOPs of a decoder, a device's FLOP/s."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from agentrl.config.schema import ModelConfig, TrainConfig
from agentrl.data.forest import TokenForest

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
_FEWEST_PRODUCTS = 3
"""How often it is repeated at least."""
_PEAK_SECONDS = 1.0
"""How long measuring the peak may take. A product that would exceed it is left out."""


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
    measured elsewhere in less than a second. Logs a warning with the factor where the flags choose the
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
    """Return the seconds of the fastest of several products of a linear layer.

    The first one loads the library and builds the kernel, in a fresh installation for longer than all others
    together: it counts only if it takes a second, so that there is time for no other.
    """
    inputs = torch.ones(rows, width, dtype=dtype, device=device)
    weight = torch.ones(width, width, dtype=dtype, device=device)  # multiplied transposed, as layers do

    def timed() -> float:
        begun = time.perf_counter()
        torch.nn.functional.linear(inputs, weight)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - begun

    first = timed()
    if first > _PEAK_SECONDS:
        return first
    # Keep the fastest: other work on the machine only makes a product slower.
    found = [timed() for _ in range(_FEWEST_PRODUCTS)]
    until = time.perf_counter() + _PRODUCT_SECONDS - sum(found)
    while time.perf_counter() < until:
        found.append(timed())
    return min(found)


_DENSE_BF16_TFLOPS: dict[str, float] = {
    "B200": 2250.0, "GH200": 989.0, "H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0,
    "H800": 989.0, "H20": 148.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0, "L40": 181.0, "L4": 121.0,
    "A10G": 70.0, "A10": 125.0, "A40": 149.7, "RTX 4090": 165.2, "MI300X": 1307.4,
}  # fmt: skip
"""Without sparsity, from data sheets. The first name that is a word of a device's name counts."""
_MEASURED = ((64, 256), (64, 1024), (256, 512), (256, 1024), (1024, 1024))
"""Rows and width of the measured products, from small to large: most machines are fastest on a large one."""


class Stopwatch:
    """Adds up seconds by name: those of the wall clock, or on CUDA those between events of the device.

    ``lap`` does not wait for the device. On CUDA ``seconds`` does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: list[tuple[str, Any]] = [("", self._now())]

    def lap(self, name: str) -> None:
        """Add the time since the last lap to ``name``."""
        self._laps.append((name, self._now()))

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by name."""
        found: dict[str, float] = {}
        for (_, start), (name, end) in pairwise(self._laps):
            found[name] = found.get(name, 0.0) + self._between(start, end)
        return found

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, start: Any, end: Any) -> float:
        if self._device.type != "cuda":
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


def stated_peak(device_name: str) -> float | None:
    """Return the FLOP/s of dense bfloat16 products that the vendor states; None for an unknown device."""
    # As a word: an RTX A4000 is no A40, and an RTX A1000 no A100.
    known = _DENSE_BF16_TFLOPS.items()
    found = next((peak for name, peak in known if re.search(rf"\b{name}\b", device_name)), None)
    return None if found is None else found * 1e12


@dataclass
class DevicePeak:
    """The FLOP/s that matrix products can reach on a device: stated by its vendor, measured, or unknown."""

    flops: float | None
    is_measured: bool = False

    def share(self, flops: float) -> float | None:
        """Return the share of the peak that ``flops`` per second are, at most 1; None for an unknown peak.

        Other work on the machine slows a measurement down. A faster step therefore becomes the peak.
        """
        if self.flops is None:
            return None
        if flops > self.flops:
            if not self.is_measured:  # the data sheet is that of another device
                return None
            self.flops = flops
        return flops / self.flops


@cache
def device_peak(device: torch.device, products: torch.dtype) -> DevicePeak:
    """Return the peak of ``device`` for matrix products in the dtype ``products``.

    A known accelerator has its vendor's number for dense bfloat16, whatever the dtype. A CPU has the fastest
    of a few products of linear layers, measured once per process with its number of threads, in less than a
    second.
    """
    if device.type == "cuda":
        return DevicePeak(stated_peak(torch.cuda.get_device_name(device)))
    if device.type != "cpu":
        return DevicePeak(None)
    best, deadline = 0.0, time.perf_counter() + _PEAK_SECONDS
    for rows, width in _MEASURED:
        flops = 2.0 * rows * width * width
        if best and (1 + _FEWEST_PRODUCTS) * flops / best > deadline - time.perf_counter():
            break
        best = max(best, flops / product_seconds(device, rows, width, products))
    return DevicePeak(best, is_measured=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """The fractions of the layers' weights for which a backward pass computes a product."""

    inputs: float = 1.0
    """For the gradient of the layer's input: layers at and above the lowest trained one."""
    weights: float = 1.0
    """For the gradient of the weight: trained weights and adapters."""
    head: bool = True
    """The output head is trained."""

    @classmethod
    def of(cls, model: Any) -> Backward:
        """Return the fractions of a Hugging Face model; all, if its decoder has no list of layers."""
        layers = [list(layer.parameters()) for layer in getattr(model.get_decoder(), "layers", ())]
        sizes = [sum(each.numel() for each in layer) for layer in layers]
        trained = [sum(each.numel() for each in layer if each.requires_grad) for layer in layers]
        total = sum(sizes)
        # A pipeline stage has stand-ins without a weight for what other stages hold.
        head = getattr(model.get_output_embeddings(), "weight", None)
        has_trained_head = head is None or head.requires_grad
        if total == 0:
            return cls(head=has_trained_head)
        embedding = getattr(model.get_input_embeddings(), "weight", None)
        lowest = next((index for index, size in enumerate(trained) if size), len(layers))
        # Go down to the first layer: the embedding's gradient passes all of them.
        if embedding is not None and embedding.requires_grad:
            lowest = 0
        return cls(inputs=sum(sizes[lowest:]) / total, weights=sum(trained) / total, head=has_trained_head)


_FULL_BACKWARD = Backward()


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

    def step_flops(
        self, tokens: int, projected: int, pairs: int, backward: Backward = _FULL_BACKWARD
    ) -> float:
        """Return the FLOPs of forward and backward, as MFU counts them (arXiv 2204.02311).

        ``tokens`` pass the layers, ``projected`` of them also pass the output head, and each layer's
        attention computes ``pairs`` of a query and a key. A product costs 2 FLOPs; its backward costs twice
        as many, or less where ``backward`` leaves products out. Recomputation does not count.
        """
        layers = 2 * tokens * self.layer_weights * (1 + backward.inputs + backward.weights)
        head = 2 * projected * self.hidden * self.vocabulary * (2 + backward.head)
        attention = 4 * pairs * self.layers * self.heads * self.head_dim * (1 + 2 * backward.inputs)
        return float(layers + head + attention)


def attention_pairs(forest: TokenForest) -> int:
    """Count pairs of a query and a key that it sees: each token sees its ancestors and itself."""
    return int(forest.position_ids.sum()) + forest.tokens
