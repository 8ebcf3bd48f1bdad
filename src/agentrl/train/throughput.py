"""How fast a step was, against what the hardware could do: FLOPs on the real mask, MFU, efficiencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.data.forest import TokenForest
from agentrl.documents.training import DBRecordData

_DENSE_BF16_TFLOPS: dict[str, float] = {
    "B200": 2250.0, "GH200": 989.0, "H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0,
    "H800": 989.0, "H20": 148.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0, "L40": 181.0, "L4": 121.0,
    "A10G": 70.0, "A10": 125.0, "A40": 149.7, "RTX 4090": 165.2, "MI300X": 1307.4,
}  # fmt: skip
"""Without sparsity, from the vendors' data sheets; looked up in this order by a part of the device's name."""


def table_peak(device_name: str) -> float | None:
    """FLOP/s of dense bfloat16 products that the vendor states for a device; None for an unknown one."""
    found = next((peak for name, peak in _DENSE_BF16_TFLOPS.items() if name in device_name), None)
    return None if found is None else found * 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a decoder's configuration decides how many FLOPs a token costs."""

    layers: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Width of the feed-forward layers that one token passes: in a mixture, its experts' together."""
    router: int = 0
    """Experts that a router chooses from; 0 without one."""
    gated: bool = True
    """Three feed-forward matrices (SwiGLU) instead of two."""

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """The shape that a Hugging Face configuration declares. Every layer is counted alike."""
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
        """Weights that one token is multiplied with in all layers together, the output head apart."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        feed_forward = self.hidden * self.ffn * (3 if self.gated else 2)
        return self.layers * (attention + feed_forward + self.hidden * self.router)

    def step_flops(self, tokens: int, projected: int, pairs: int) -> float:
        """FLOPs of forward and backward, without recomputation: what MFU counts (arXiv 2204.02311).

        ``tokens`` pass the layers, ``projected`` of them the output head too, and ``pairs`` of a query and a
        key that it sees are in each layer's attention. A product costs 2 FLOPs, its backward twice as many.
        """
        linear = 2 * (tokens * self.layer_weights + projected * self.hidden * self.vocabulary)
        attention = 4 * pairs * self.layers * self.heads * self.head_dim
        return 3.0 * (linear + attention)


def attention_pairs(forest: TokenForest) -> int:
    """Pairs of a query and a key that it sees: each token sees its ancestors and itself."""
    return int(forest.position_ids.sum()) + forest.tokens


def call_tokens(data: Sequence[DBRecordData]) -> int:
    """Tokens that training would compute if each model call were a row of its own, prompt and output."""
    return sum(_of_calls(item) for item in data)


def _of_calls(item: DBRecordData) -> int:
    before: list[int] = []
    for node in item.nodes:
        above = item.nodes[node.parent] if node.parent >= 0 else None
        before.append(0 if above is None else before[node.parent] + above.end - above.start)
    ends: dict[int, int] = {}
    for span in item.spans:
        index = next(i for i, node in enumerate(item.nodes) if node.start <= span.start < node.end)
        length = before[index] + span.end - item.nodes[index].start
        ends[span.call] = max(ends.get(span.call, 0), length)
    return sum(ends.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Wall-clock seconds of one update's parts on this rank."""

    forward: float
    backward: float
    optimizer: float

    @property
    def total(self) -> float:
        """From packed data to new weights."""
        return self.forward + self.backward + self.optimizer


def step_metrics(
    forests: Sequence[TokenForest],
    seconds: StepSeconds,
    shape: ModelShape,
    peak_flops: float,
    *,
    step_tokens: int | None = None,
    positions: int | None = None,
    sharers: int = 1,
) -> dict[str, float]:
    """The speed of one update of a rank whose device does ``peak_flops`` FLOP/s and that ran ``forests``.

    ``step_tokens`` are those of all ranks, ``positions`` what the executor ran, padding included; both are
    the tokens of ``forests`` where they are not given. ``sharers`` ranks ran the same forests between them.
    """
    tokens = sum(forest.tokens for forest in forests)
    flops = (
        shape.step_flops(
            tokens,
            sum(forest.trainable_tokens for forest in forests),
            sum(attention_pairs(forest) for forest in forests),
        )
        / sharers
    )
    elapsed = max(seconds.total, 1e-9)
    return {
        "tokens_per_second": (step_tokens or tokens) / elapsed,
        "padding_efficiency": tokens / max(positions or tokens, 1),
        "micro_batches": len(forests),
        "mfu": flops / elapsed / peak_flops,
        "tflops_per_second": flops / elapsed / 1e12,
        "seconds_forward": seconds.forward,
        "seconds_backward": seconds.backward,
        "seconds_forward_backward": seconds.forward + seconds.backward,
        "seconds_optimizer": seconds.optimizer,
    }


def sharing_metrics(metrics: Mapping[str, Any], total_tokens: int) -> dict[str, float]:
    """What sharing prefixes saved in a step that reports ``metrics``.

    ``total_tokens`` are those of every model call as a row of its own (``call_tokens``); the step computed
    ``metrics["tokens"]`` of them.
    """
    ratio = total_tokens / max(metrics["tokens"], 1)
    return {
        "unique_tokens": metrics["tokens"],
        "total_tokens": total_tokens,
        "sharing_ratio": ratio,
        "total_tokens_per_second": metrics["tokens_per_second"] * ratio,
    }
