"""Open the span of an optimizer step, with its phases and links to the trajectories that it trains."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentrl.data.stream import StepData
from agentrl.documents.training import TrainStep
from agentrl.spans import NO_SPAN, Attributes, Span, tracer

if TYPE_CHECKING:
    from agentrl.store.client import Store

_LINKS = 128
"""Most links of a span that OpenTelemetry keeps."""
_PHASES = ("pack", "forward", "backward", "optimizer")
_METRICS = (
    "loss", "reward", "pass_rate", "grad_norm", "lr", "kl_k3", "staleness_mean", "trajectories", "tokens",
    "trainable_tokens", "tokens_per_second", "mfu",
)  # fmt: skip


async def step_span(store: Store, plan: TrainStep, batch: StepData, seconds_data: float) -> Span:
    """Return the root span of a step; it began ``seconds_data`` ago, when the step began to wait for data."""
    if not tracer().is_recording:
        return NO_SPAN
    now = time.time()
    attributes: Attributes = {
        "agentrl.train_step": plan.id,
        "agentrl.step": plan.step,
        "agentrl.policy_version": plan.policy_version,
        "agentrl.groups": len(batch.groups),
        "agentrl.records": [item.record for item in batch.data][:_LINKS],
    }
    traces = await store.records.trace_ids([item.record for item in batch.data], _LINKS)
    begin = now - seconds_data
    span = tracer().span("train_step", attributes, root=True, begin=begin, links=traces)
    span.phase("wait_for_data", begin, now)
    return span


def trace_updates(span: Span, began: float, metrics: Mapping[str, Any]) -> None:
    """Add the optimizer updates, which began at ``began`` and have ended, and their phases.

    A phase is the sum over micro-batches: phases are shown one after the other, although they alternate.
    """
    if not span.is_recording:
        return
    compute = span.phase("updates", began, time.time())
    at = began
    for name in _PHASES:
        seconds = float(metrics.get(f"seconds_{name}", 0.0))
        if seconds > 0:
            compute.phase(name, at, at + seconds)
            at += seconds


def end_step(span: Span, metrics: Mapping[str, Any]) -> None:
    """Set the metrics of a committed step."""
    found = {name: metrics[name] for name in _METRICS if isinstance(metrics.get(name), int | float)}
    span.set({f"agentrl.{name}": value for name, value in found.items()})
