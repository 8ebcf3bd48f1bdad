"""One measurement in a process of its own, so that its peak memory is its own; prints a line of JSON.

    python scripts/bench/train_child.py '{"way": "group", "model": "tiny", "group": {…}, …}'

``way``: off, trajectory or group (prefix merging), trl, or logprobs. ``train.py`` starts it.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train_work import Group, load_model


def main() -> int:
    """Measure what the argument asks for."""
    wanted = json.loads(sys.argv[1])
    way = wanted["way"]
    if way == "logprobs":
        result = _logprobs(**wanted["sizes"])
    elif way == "trl":
        sys.path.append(os.environ["AGENTRL_BENCH_TRL"])
        from train_trl import trl_step

        model = load_model(wanted["model"])
        data = Group(**wanted["group"]).data(_vocabulary(model))
        result = _measured(model, trl_step(model, data, wanted["rows"]), wanted["steps"])
    else:
        result = _ours(way, wanted)
    print(json.dumps(result))
    return 0


def _ours(way: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """A step of ours. ``sample`` k: of every k-th micro-batch by length, its seconds scaled up by FLOPs."""
    import torch

    from agentrl.config.schema import OptimConfig
    from agentrl.distributed.parallel_model import ParallelModel
    from agentrl.losses.settings import LossSettings
    from agentrl.train.memory import enable_checkpointing
    from agentrl.train.optimizer import build_optimizer
    from agentrl.train.step import forward_backward
    from agentrl.train.step_loss import count_step

    model = load_model(wanted["model"])
    enable_checkpointing(model, wanted.get("checkpointing", "none"))
    parallel = ParallelModel(model)
    data = Group(**wanted["group"]).data(_vocabulary(model))
    optimizer = build_optimizer(model, OptimConfig())
    every = wanted.get("sample", 1)
    fraction, spent = 1.0, [0.0, 0.0]
    forests: list[Any] = []

    def train(chosen: list[Any]) -> None:
        forward_backward(
            parallel, chosen, LossSettings(old_logprobs="recompute"),
            denominators=count_step(forests),
        )  # fmt: skip

    def step() -> float:
        forests[:] = _micro_batches(model, data, way, wanted["max_tokens"])
        started = time.perf_counter(), time.process_time()
        train(forests[every // 2 :: every])
        spent[:] = time.perf_counter() - started[0], time.process_time() - started[1]
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    if every > 1:  # what the first micro-batch alone pays for would be counted many times
        forests[:] = _micro_batches(model, data, way, wanted["max_tokens"])
        fraction = _flops(model, forests[every // 2 :: every]) / _flops(model, forests)
        train(forests[-1:])
        optimizer.zero_grad(set_to_none=True)
    result = _measured(model, step, wanted["steps"])
    for name, seconds in zip(("seconds", "cpu_seconds"), spent, strict=True):
        result[name] += seconds * (1 / fraction - 1)
    return result | {
        "tokens": sum(forest.tokens for forest in forests),
        "micro_batches": len(forests),
        "sampled": len(forests[every // 2 :: every]),
        "flops": _flops(model, forests),
    }


def _micro_batches(model: Any, data: Any, way: str, max_tokens: int) -> list[Any]:
    """As the trainer packs them."""
    from agentrl.data.planner import CPU_FILL, build_micro_batches

    return build_micro_batches(
        data, max_tokens, vocab_size=_vocabulary(model), merging=way,
        fill=CPU_FILL if model.device.type == "cpu" else None,
    )  # fmt: skip


def _flops(model: Any, forests: list[Any]) -> float:
    from agentrl.model.flops import ModelShape, attention_pairs

    return ModelShape.of(model.config).step_flops(
        sum(forest.tokens for forest in forests),
        sum(forest.trainable_tokens for forest in forests),
        sum(attention_pairs(forest) for forest in forests),
    )


def _measured(model: Any, step: Callable[[], float], steps: int) -> dict[str, Any]:
    """The fastest of ``steps`` steps, the first one's gradient norm, and the peak above the loaded model."""
    gc.collect()
    before = _resident()
    norms, wall, cpu = [], [], []
    for _ in range(steps):
        started = time.perf_counter(), time.process_time()
        norms.append(step())
        _wait()
        wall.append(time.perf_counter() - started[0])
        cpu.append(time.process_time() - started[1])
    return {
        "grad_norm": norms[0],
        "seconds": min(wall),
        "cpu_seconds": min(cpu),
        "peak_bytes": _peak() - before,
        "model_bytes": sum(4 * parameter.numel() for parameter in model.parameters()),
    }


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _resident() -> int:
    """Bytes in memory now: on the GPU where there is one, else of this process."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _peak() -> int:
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _vocabulary(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


def _logprobs(tokens: int, vocabulary: int, hidden: int, chunk: int, vocab_chunk: int) -> dict[str, Any]:
    """The most that torch holds at once in forward and backward of the projection, inputs apart."""
    import torch

    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    from peak_memory import peak_allocated

    from agentrl.model.logprobs import token_logprobs
    from agentrl.model.output_head import OutputHead

    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden) * hidden**-0.5).requires_grad_()
    parent, target = torch.arange(tokens), torch.randint(0, vocabulary, (tokens,))

    def run() -> None:
        logprobs, _ = token_logprobs(
            states, OutputHead(weight), parent, target, chunk_size=chunk, vocab_chunk_size=vocab_chunk
        )
        logprobs.sum().backward()

    return {
        "peak_bytes": peak_allocated(run),
        "weight_gradient_bytes": 4 * vocabulary * hidden,
        "hidden_bytes": 4 * tokens * hidden,
        "chunk_bytes": 4 * chunk * vocab_chunk,
        "logits_bytes": 4 * tokens * vocabulary,
    }


if __name__ == "__main__":
    sys.exit(main())
