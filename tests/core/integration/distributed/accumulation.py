"""Check how often two ranks reduce gradients, and that they recover from an aborted step; for torchrun.

torchrun --nproc_per_node 2 tests/core/integration/distributed/accumulation.py
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from layouts import LIMIT, Case, build_parallel, build_trainer, compare_step, compare_weights
from steps import step_data
from tiny_models import AGES, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.config.schema import MemoryConfig, TrainConfig
from agentrl.distributed.fsdp import GradientReduction
from agentrl.distributed.mesh import leave_processes
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.train.step import PolicyTrainer

REDUCED = torch.ops.c10d._reduce_scatter_base_.default
MODULES = 3
"""Two layers, and what is around them."""


class Counter(TorchDispatchMode):
    """Counts how often gradients are scattered."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation."""
        self.count += func is REDUCED
        return func(*args, **(kwargs or {}))


def reductions(together: PolicyTrainer, step: int) -> tuple[int, int]:
    """Count how often ``step`` scatters gradients, and how many micro-batches each rank runs in it."""
    data = step_data(step)
    with Counter() as counter:
        together.train(data, AGES)
    return counter.count, len(together.pack(data))


def abort_step(together: PolicyTrainer) -> None:
    """Raise in the second layer of a step's second micro-batch."""
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ConnectionError

    layer = together.policy.model.get_decoder().layers[1]
    with layer.register_forward_pre_hook(fail), contextlib.suppress(ConnectionError):
        together.train(step_data(6), AGES)
    assert calls == 2


def check(reduction: GradientReduction) -> None:
    """Compare with one process, before and after an aborted step."""
    model = tiny_model("qwen3", vocab_size=64)
    case = Case(2, TrainConfig(), memory=MemoryConfig(gradient_reduction=reduction))
    alone = build_trainer(ParallelModel(copy.deepcopy(model)), case)
    together = build_parallel(model, case)
    deviations = list(compare_step(alone, together, 0).values())
    abort_step(together)
    deviations += compare_step(alone, together, 1).values()
    deviations.append(compare_weights(alone, together))
    (several, batches), (one, single) = (reductions(together, step) for step in (2, 4))
    if dist.get_rank() == 0:
        print(f"{reduction}: {max(deviations):.1e}, {several} reductions of {batches} forests, {one} of one")
    assert max(deviations) <= LIMIT, deviations
    assert batches > single == 1
    assert (several, one) == (MODULES * (batches if reduction == "every" else 1), MODULES)


def main() -> int:
    """Check both values of ``--gradient_reduction``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        check("last")
        check("every")
    finally:
        leave_processes()
    return 0


if __name__ == "__main__":
    sys.exit(main())
