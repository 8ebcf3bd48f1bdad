"""Measure the memory of a real training step of one process, beside a planned or a simulated one."""

from __future__ import annotations

from fake_gpu.rank_step import StepSpec, add_gradients, build_model
from peak_memory import peak_allocated

from agentrl.distributed.parallel_model import ParallelModel
from agentrl.train.optimizer import build_optimizer


def real_peak(planned: StepSpec) -> int:
    """Bytes of the second real step in this process: what it holds before, and what it allocates."""
    model = ParallelModel(build_model(planned))
    optimizer = build_optimizer(model.model, planned.optim, planned.memory)

    def step() -> None:
        add_gradients(model, planned, [planned.forest()] * planned.micro_batches)
        model.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    before = sum(item.nbytes for item in (*model.parameters(), *moments))
    return before + peak_allocated(step)
