"""Move a trainer from fake GPUs to the host and back: ``LD_PRELOAD=GUARD python fake_offload.py``.

The trainer is one rank of eight with a reference model. Prints a line of JSON.
"""

from __future__ import annotations

import gc
import json
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from agentrl.distributed.mesh import Layout
from agentrl.train.controller import to_device, to_host
from fake_gpu.cases import Case, step_spec
from fake_gpu.fake_cuda import GpuMemory, Recorder, cuda_stubs
from fake_gpu.fake_rank import fake_mesh
from fake_gpu.fake_step import _build, _eager_flex, _real_meshes, _values
from fake_gpu.rank_step import build_model


def device_bytes() -> int:
    """Return the bytes of all tensors on the GPU."""
    gc.collect()
    sizes = {}
    for item in gc.get_objects():
        if isinstance(item, FakeTensor) and item.fake_device.type == "cuda":
            sizes[item.untyped_storage()._cdata] = item.untyped_storage().nbytes()
    return sum(sizes.values())


def move(case: Case) -> dict[str, Any]:
    """Train a step, move to the host and back, train another; return the bytes on the GPU meanwhile."""
    spec, layout, memory = step_spec(case, 0), Layout(**case.layout), GpuMemory()
    with torch.device("meta"):
        policy, base = build_model(spec), build_model(spec) if spec.loss.kl_coef else None
    with (
        cuda_stubs(),
        fake_mesh(layout, case.rank, "cuda") as mesh,
        _eager_flex(),
        _real_meshes(),
        FakeTensorMode(allow_non_fake_inputs=True),
        memory,
        torch.autograd.set_multithreading_enabled(False),
        _values(Recorder()),
    ):
        before = device_bytes()
        trainer = _build(spec, policy, base, mesh, memory)
        moved: Any = SimpleNamespace(
            model=trainer.parallel,
            frozen=trainer.frozen,
            optimizer=trainer.optimizer,
            memory=spec.memory,
            critic=None,
        )
        found = {}
        trainer.train(1)
        found["trained"] = device_bytes() - before
        to_host(moved)
        found["on the host"] = device_bytes() - before
        to_device(moved, torch.device("cuda:0"))
        found["back"] = device_bytes() - before
        trainer.train(1)
        found["trained again"] = device_bytes() - before
    return found


if __name__ == "__main__":
    print(json.dumps(move(Case(model="reference", layout={"dp_shard": 8}))))
