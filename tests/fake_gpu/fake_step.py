"""Train a step of one rank on fake CUDA tensors: ``LD_PRELOAD=GUARD python fake_step.py '[CASE, …]'``.

A case is a JSON object with the fields of ``Case``. Prints a line of JSON per case: those of ``Measured``, or
``error``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import flex_attention as torch_flex

from agentrl.distributed.mesh import Layout, Mesh
from agentrl.distributed.parallel_model import ParallelModel, parallelize
from agentrl.losses.settings import LossSettings
from agentrl.model import attention, norms
from agentrl.model.flops import Precision, Stopwatch
from agentrl.model.load import allocate
from agentrl.train import step as trainer_step
from agentrl.train.optimizer import build_optimizer
from agentrl.train.step import FrozenLogprobs, Reference, forward_backward
from fake_gpu.cases import Case, step_spec
from fake_gpu.fake_cuda import GpuMemory, Recorder, cuda_stubs
from fake_gpu.fake_rank import balance_experts, fake_mesh
from fake_gpu.layer_kinds import Depth, Peaks, extrapolate
from fake_gpu.memory_tracker import MemoryTracker, watch_phases
from fake_gpu.rank_step import StepSpec, build_model, owned_tensors, planned_memory


@dataclass
class Measured:
    """What a rank did in one step."""

    peaks: Peaks
    recorder: Recorder = field(default_factory=Recorder)

    def report(self, spec: StepSpec, layout: Layout, *, planned: bool) -> dict[str, Any]:
        """Return the step as JSON; ``planned`` adds what ``agentrl plan`` says of its memory."""
        peak = max(self.peaks.values(), key=lambda found: found.total)
        return {
            "peak": peak.total, "parts": dict(peak.parts), "phase": peak.phase,
            "planned": planned_memory(spec, layout).peak if planned else None,
            **{name: dict(getattr(self.recorder, name)) for name in ("calls", "bytes", "products", "reads")},
            **{name: dict(getattr(self.recorder, name)) for name in ("mixed", "moved")},
        }  # fmt: skip


@dataclass(kw_only=True)
class FakeTrainer:
    """What ``PolicyTrainer`` trains a step with, on fake tensors."""

    spec: StepSpec
    parallel: ParallelModel
    optimizer: torch.optim.Optimizer
    frozen: FrozenLogprobs
    memory: MemoryTracker

    def train(self, batches: int) -> None:
        """Train one step of ``batches`` micro-batches as ``PolicyTrainer`` does."""
        spec, parallel = self.spec, self.parallel
        forests = self.frozen.attach(parallel, [spec.forest()] * batches, spec.options)
        with mock.patch.object(Mesh, "sum_reports", lambda mesh, report: report):  # it pickles: host work
            forward_backward(
                parallel, forests, LossSettings.of(spec.loss), options=spec.options,
                watch=Stopwatch(torch.device("cuda")),
            )  # fmt: skip
        self.memory.begin("update")
        parallel.clip_gradients(spec.optim.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def measure(spec: StepSpec, layout: Layout, rank: int = 0, recorder: Recorder | None = None) -> Measured:
    """Run two steps of a rank, and measure the second: the first makes moments and infers shapes."""
    memory = GpuMemory()
    with torch.device("meta"):
        policy, base = build_model(spec), build_model(spec) if spec.loss.kl_coef else None
    with (
        cuda_stubs(),
        fake_mesh(layout, rank, "cuda") as mesh,
        _eager_flex(),
        _real_meshes(),
        FakeTensorMode(allow_non_fake_inputs=True),
        memory,
        torch.autograd.set_multithreading_enabled(False),  # DTensor's caches are cleared in this thread only
    ):
        trainer = _build(spec, policy, base, mesh, memory)
        found = Measured(memory.peaks, recorder or Recorder())
        with _values(found.recorder):
            trainer.train(1)
            gc.collect()
            watch_phases(memory, trainer.parallel.model)
            memory.restart()
            found.recorder.reads.clear()
            with found.recorder:
                trainer.train(spec.micro_batches)
        found.peaks = dict(memory.peaks)
    return found


def _measure_case(case: Case, layers: int) -> Measured:
    return measure(step_spec(case, layers), Layout(**case.layout), case.rank)


def measure_layers(case: Case) -> Peaks:
    """Return the peaks of a step of all layers, extrapolated from steps of few layers."""

    def simulate(depth: Depth | None) -> Peaks:
        return _measure_case(case, sum(depth) if depth else case.layers).peaks

    return extrapolate([0] * case.layers, simulate)


def _build(spec: StepSpec, policy: Any, base: Any, mesh: Mesh, memory: MemoryTracker) -> FakeTrainer:
    parallel = _parallel(spec, policy, mesh, spec.precision)
    optimizer = build_optimizer(policy, spec.optim, spec.memory)
    memory.owned, resized = owned_tensors(parallel, optimizer)
    memory.resized = resized
    frozen = FrozenLogprobs()
    if base is not None:
        base.requires_grad_(requires_grad=False).to(spec.precision.products)
        reference = _parallel(spec, base, mesh, None)
        _, others = owned_tensors(reference, optimizer)
        memory.resized = lambda: chain(resized(), others())
        frozen = FrozenLogprobs(reference=Reference(reference))
    memory.scalar = 1
    return FakeTrainer(spec=spec, parallel=parallel, optimizer=optimizer, memory=memory, frozen=frozen)


def _parallel(spec: StepSpec, model: Any, mesh: Mesh, precision: Precision | None) -> ParallelModel:
    allocate(model, torch.device("cuda:0"))
    parallel = parallelize(
        model,
        mesh,
        max_tokens=spec.max_tokens,
        reduction=spec.memory.gradient_reduction,
        precision=precision,
    )
    balance_experts(model)
    return parallel


@contextlib.contextmanager
def _values(recorder: Recorder) -> Iterator[None]:
    """Give the host zeros for logprobs that it reads from the device, and record the reads."""

    def read(logprobs: Tensor) -> Any:
        recorder.reads["agentrl/train/step.py _to_numpy"] += 1
        return np.zeros(len(logprobs), np.float32)

    with mock.patch.object(trainer_step, "_to_numpy", read):
        yield


@contextlib.contextmanager
def _eager_flex() -> Iterator[None]:
    """Leave FlexAttention uncompiled: Triton needs a GPU."""
    with (
        mock.patch.object(attention, "_kernel", return_value=torch_flex.flex_attention),
        mock.patch.object(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
    ):
        yield


@contextlib.contextmanager
def _real_meshes() -> Iterator[None]:
    """Let device meshes, and whoever tries a norm, read the values of the tensors that they make."""
    build, is_plain = DeviceMesh.__init__, norms._is_plain

    def built(*args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            build(*args, **kwargs)

    def tried(module: nn.Module) -> bool:
        with unset_fake_temporarily():
            return is_plain(module)

    with mock.patch.object(DeviceMesh, "__init__", built), mock.patch.object(norms, "_is_plain", tried):
        yield


def main() -> None:
    """Measure the cases of the command line."""
    for given in json.loads(sys.argv[1]):
        case = Case(**given)
        try:
            measured = Measured(measure_layers(case)) if case.layers else _measure_case(case, 0)
            spec, layout = step_spec(case, case.layers), Layout(**case.layout)
            found = measured.report(spec, layout, planned=case.planned)
        except Exception:  # noqa: BLE001  (the next case may work)
            found = {"error": traceback.format_exc()}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
