"""Generate with the local engine on fake CUDA tensors: ``LD_PRELOAD=GUARD python fake_engine.py FOLDER``.

Prints a line of JSON: device and shape of the logits, and the operations on tensors of several devices.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from agentrl.documents.sampling import SamplingParams
from agentrl.local.engine import model as engine
from agentrl.local.engine.model import ATTENTION, CacheSlot
from agentrl.local.engine.scheduler import RowSampler, sample
from agentrl.model.attention import set_attention
from agentrl.model.load import allocate
from fake_gpu.fake_cuda import GpuMemory, Recorder, cuda_stubs


def generate(folder: str) -> dict[str, Any]:
    """Run a prompt beside a sequence that decodes, and sample a token of each in three ways."""
    build: Any = AutoModelForCausalLM
    with torch.device("meta"):
        empty = (
            build.from_config(engine.load_config(folder), dtype=torch.bfloat16).eval().requires_grad_(False)
        )
    set_attention(empty, ATTENTION)

    def load(folder: str, dtype: torch.dtype, device: torch.device) -> Any:
        """Give the model tensors without values, in place of what reads its weights."""
        allocate(empty, device)
        empty.to = lambda dtype: empty  # it has that dtype, and fake parameters cannot be replaced
        return empty

    unchecked = mock.patch.object(engine.LocalModel, "_check_against_plain_attention")  # it reads values
    recorder, memory = Recorder(), GpuMemory()
    memory.scalar = 1
    with (
        cuda_stubs(),
        mock.patch.object(engine, "_load", load),
        unchecked,
        FakeTensorMode(allow_non_fake_inputs=True),
        memory,
        torch.no_grad(),
        recorder,
    ):
        model = engine.LocalModel(folder, dtype=torch.bfloat16, device=torch.device("cuda:0"))
        cache, ids = model.new_cache(128), np.arange(9, dtype=np.int32)
        prompt, running = CacheSlot(ids, start=0, capacity=32), CacheSlot(ids, start=64, capacity=32)
        chunks = [engine.Chunk(prompt, 2, ids[2:], True), engine.Chunk(running, 8, ids[8:], True)]
        logits = model.forward(chunks, cache)
        cache._copy(64, 70, 9)
        for params in ({}, {"temperature": 0.0}, {"top_p": 0.9, "presence_penalty": 0.5}):
            samplers = [RowSampler(SamplingParams(**params), np.random.default_rng(0)) for _ in chunks]
            for sampler in samplers:
                sampler.record(1)
            sample(logits, samplers)
    return {"device": str(logits.device), "shape": list(logits.shape), "mixed": dict(recorder.mixed)}


if __name__ == "__main__":
    print(json.dumps(generate(sys.argv[1])))
