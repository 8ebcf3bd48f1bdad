"""Measure the peak of what torch's CPU allocator hands out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_allocated(run: Callable[[], object]) -> int:
    """Return the largest number of bytes of CPU tensors made by ``run`` that are alive at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    pending: list[Any] = list(recorded.profiler.kineto_results.experimental_event_tree())
    changes: list[tuple[int, int]] = []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.name == "[memory]":
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    alive = peak = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        alive += size
        peak = max(peak, alive)
    return peak
