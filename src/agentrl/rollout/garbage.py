"""Collect garbage while no answer waits, so that collections delay no model call."""

from __future__ import annotations

import asyncio
import gc
import time

_NEW_OBJECTS = 50_000
"""New objects after which Python itself collects, also while the process is busy; its default is 700."""

_INTERVAL_SECONDS = 0.1
_BUSY_SECONDS = 0.005
"""Delay of a timer from which on the process is busy."""

_FEW_OBJECTS = 2_000
"""New objects up to which a collection waits; one of so many takes about a millisecond."""

_PER_OLDER_GENERATION = (10, 100)
"""Collections of one generation after which the next older one is collected too."""


def collect_garbage_less_often() -> None:
    """Leave what was loaded at the start out of garbage collections, and collect less often.

    Call it once in a process. By default a tenth of a sampler's CPU time goes into collections that find
    nothing: prompts are long lists of ids, and each collection visits every id. One of all objects takes a
    tenth of a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 10, 10)


async def collect_while_idle() -> None:
    """Collect every tenth of a second in which this process was not busy, until it is cancelled."""
    while True:
        planned = time.monotonic() + _INTERVAL_SECONDS
        await asyncio.sleep(_INTERVAL_SECONDS)
        if time.monotonic() - planned < _BUSY_SECONDS and gc.get_count()[0] > _FEW_OBJECTS:
            gc.collect(_due_generation(gc.get_count()))


def _due_generation(count: tuple[int, int, int]) -> int:
    """Return the oldest generation that is due; ``count`` is that of ``gc.get_count``."""
    if count[2] >= _PER_OLDER_GENERATION[1]:
        return 2
    return int(count[1] >= _PER_OLDER_GENERATION[0])
