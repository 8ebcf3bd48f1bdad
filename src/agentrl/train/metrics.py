"""Compute what a training step reports: speed, replayed routing, tokens saved by merging prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.data.forest import TokenForest
from agentrl.documents.training import DBRecordData
from agentrl.model.flops import Backward, DevicePeak, ModelShape, attention_pairs

_COUNTED = ("tokens", "trainable_tokens", "trajectories", "extreme_tokens")


def speed_metrics(
    forests: Sequence[TokenForest],
    seconds: Mapping[str, float],
    shape: ModelShape,
    peak: DevicePeak,
    *,
    backward: Backward,
    step_tokens: int,
    ranks: int,
) -> dict[str, float]:
    """Return the speed of one update on a rank that ran ``forests``; ``mfu`` only if ``peak`` is known.

    ``backward`` has what the backward pass computes. ``seconds`` has the wall-clock times of ``forward``,
    ``backward`` and ``optimizer``. ``step_tokens`` is the number of tokens of all ranks. ``ranks`` computed
    the same forests together.
    """
    flops = shape.step_flops(
        sum(forest.tokens for forest in forests),
        sum(forest.trainable_tokens for forest in forests),
        sum(attention_pairs(forest) for forest in forests),
        backward,
    )
    flops /= ranks
    forward_backward = seconds["forward"] + seconds.get("backward", 0.0)
    elapsed = max(forward_backward + seconds["optimizer"], 1e-9)
    mfu = peak.share(flops / elapsed)
    return {
        "tokens_per_second": step_tokens / elapsed,
        "padding_efficiency": 1.0,  # forests are packed; what executors and ranks pad is not counted
        "micro_batches": len(forests),
        **({} if mfu is None else {"mfu": mfu}),
        "tflops_per_second": flops / elapsed / 1e12,
        "seconds_forward": seconds["forward"],
        "seconds_backward": seconds.get("backward", 0.0),
        "seconds_forward_backward": forward_backward,
        "seconds_optimizer": seconds["optimizer"],
    }


def routing_metrics(forests: Sequence[TokenForest], differing: float) -> dict[str, float]:
    """Return how much routing a rank replayed in ``forests``; ``differing`` is the routers' own report."""
    found = [forest.routing for forest in forests if forest.routing is not None]
    merged = sum(routing.merged for routing in found)
    return {
        "router_replayed": sum(routing.tokens for routing in found)
        / max(sum(forest.tokens for forest in forests), 1),
        "router_differs": differing,
        "router_merge_differs": sum(routing.differing for routing in found) / max(merged, 1),
    }


def merging_metrics(metrics: Mapping[str, Any], total_tokens: int) -> dict[str, float]:
    """Return what merging prefixes saved in a step that reports ``metrics``.

    ``total_tokens`` is what ``call_tokens`` counts; the step computed ``metrics["tokens"]`` of them.
    """
    ratio = total_tokens / max(metrics["tokens"], 1)
    return {
        "unique_tokens": metrics["tokens"],
        "total_tokens": total_tokens,
        "sharing_ratio": ratio,
        "total_tokens_per_second": metrics["tokens_per_second"] * ratio,
    }


def call_tokens(data: Sequence[DBRecordData]) -> int:
    """Count the tokens that training would compute if each model call were a row: prompt and output."""
    total = 0
    for item in data:
        before: list[int] = []
        for node in item.nodes:
            above = item.nodes[node.parent] if node.parent >= 0 else None
            before.append(0 if above is None else before[node.parent] + above.end - above.start)
        ends: dict[int, int] = {}
        for span in item.spans:
            index = next(i for i, node in enumerate(item.nodes) if node.start <= span.start < node.end)
            length = before[index] + span.end - item.nodes[index].start
            ends[span.call] = max(ends.get(span.call, 0), length)
        total += sum(ends.values())
    return total


def join_metrics(updates: Sequence[Mapping[str, Any]], first_pass: int) -> dict[str, Any]:
    """Join the metrics of a step's updates; the first ``first_pass`` make one pass over its data.

    Tokens, trajectories and histograms are those of the first pass. Seconds add up, and a maximum is that of
    all updates. Every other number is the mean over updates, weighted by the trainable tokens that it is of.
    """
    joined: dict[str, Any] = {}
    for name, value in updates[0].items():
        share = "taught_fraction" if name == "kl_teacher" else ""
        weights = [float(update["trainable_tokens"]) * update.get(share, 1.0) for update in updates]
        found = [(update[name], weight) for update, weight in zip(updates, weights, strict=True)
                 if name in update]  # fmt: skip
        if isinstance(value, Mapping):
            joined[name] = _join_by_key(found[:first_pass], is_mean=name.endswith("_fractions"))
        elif name in _COUNTED:
            joined[name] = sum(number for number, _ in found[:first_pass])
        elif name.startswith("seconds_"):
            joined[name] = sum(number for number, _ in found)
        elif name.endswith("_max"):
            joined[name] = max(number for number, _ in found)
        elif isinstance(value, int | float):
            total = sum(weight for _, weight in found)
            joined[name] = sum(number * weight for number, weight in found) / total
        else:
            joined[name] = value
    return joined


def _join_by_key(found: Sequence[tuple[Mapping[str, float], float]], *, is_mean: bool) -> dict[str, float]:
    """Return the sum for each key, or the mean over updates by their weights."""
    keys = sorted({key for values, _ in found for key in values}, key=int)
    if not is_mean:
        return {key: sum(values.get(key, 0.0) for values, _ in found) for key in keys}
    total = sum(weight for _, weight in found)
    return {key: sum(values.get(key, 0.0) * weight for values, weight in found) / total for key in keys}
