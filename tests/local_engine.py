"""The local engine in this process: its model on the CPU, requests, and a scheduler that works them off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.documents.sampling import SamplingParams
from agentrl.local.engine.model import CacheSlot, Chunk, LocalModel
from agentrl.local.engine.scheduler import GenerationRequest, RowSampler, Scheduler


def cpu_model(folder: Path, dtype: torch.dtype | None = None, **options: Any) -> LocalModel:
    """Load a model folder on the CPU."""
    return LocalModel(str(folder), dtype=dtype, device=torch.device("cpu"), **options)


def next_logits(model: LocalModel, ids: NDArray[np.int32]) -> torch.Tensor:
    """float32[1, vocabulary]: the logits of the token behind ``ids``."""
    with torch.inference_mode():
        return model.forward([Chunk(CacheSlot(ids, start=0), 0, ids, True)], model.new_cache(64))


def request_of(
    prompt: Sequence[int], new: int, finish: Callable[[GenerationRequest], None], seed: int = 0, **fields: Any
) -> GenerationRequest:
    """A request for ``new`` tokens behind ``prompt``; ``finish`` gets it at its end."""
    values: dict[str, Any] = {"rid": str(seed), "stop_ids": frozenset(), **fields}
    return GenerationRequest(
        tokens=np.array([*prompt, *[0] * new], dtype=np.int32), prompt_tokens=len(prompt), finish=finish,
        sampler=RowSampler(SamplingParams(), np.random.default_rng(seed)), **values,
    )  # fmt: skip


def work_off(scheduler: Scheduler, steps: int = 2000) -> None:
    """Step until nothing is left to do."""
    for _ in range(steps):
        if not scheduler.has_work:
            return
        scheduler.step()
    raise AssertionError("the scheduler makes no progress")
