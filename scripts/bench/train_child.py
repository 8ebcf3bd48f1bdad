"""Run one measurement of ``train.py`` in a separate process, and print it as a line of JSON.

    python scripts/bench/train_child.py '{"way": "group", "model": "tiny", "group": {…}, …}'

``way`` is off, trajectory or group (prefix merging), trl, or logprobs. A separate process gives each
measurement its own peak memory.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from train_workload import Group, load_model


def main() -> int:
    """Run the measurement that the JSON argument describes."""
    wanted = json.loads(sys.argv[1])
    way = wanted["way"]
    if way == "logprobs":
        result = _logprobs(**wanted["sizes"])
    elif way == "trl":
        sys.path.append(os.environ["AGENTRL_BENCH_TRL"])
        model = load_model(wanted["model"])
        data = Group(**wanted["group"]).data(_vocabulary(model))
        result = _measured(model, _trl_step(model, data, wanted["rows"]), wanted["steps"])
    else:
        result = _ours(way, wanted)
    print(json.dumps(result))
    return 0


def _ours(way: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """Measure a training step. ``sample`` k trains every k-th micro-batch and scales the seconds by FLOPs."""
    import torch

    from agentrl.config.schema import OptimConfig
    from agentrl.distributed.parallel_model import ParallelModel
    from agentrl.losses.settings import LossSettings
    from agentrl.train.build import enable_checkpointing
    from agentrl.train.optimizer import build_optimizer
    from agentrl.train.step import forward_backward

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
            parallel, chosen, LossSettings(old_logprobs="recompute", token_level_loss=True),  # as TRL's dapo
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

    if every > 1:  # warm up: scaling would multiply the one-time costs of the first micro-batch
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
    """Pack the data as the trainer does."""
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
    """Return the fastest of ``steps`` steps, the first gradient norm, and the peak memory above the model."""
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
    """Return the bytes allocated on the GPU, or the resident bytes of this process without a GPU."""
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


def _trl_step(model: Any, data: Sequence[Any], rows: int) -> Callable[[], float]:
    """Return a function that runs one GRPO step of Hugging Face TRL and returns the gradient norm.

    It trains the same ids as our step with TRL's own loss and backward, ``rows`` padded rows at a time, in
    float32: no recomputation, no reference model, mean over the step's tokens.
    """
    import torch

    trainer = _trainer(model, rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> float:
        batches = [data[start : start + rows] for start in range(0, len(data), rows)]
        trainer.current_gradient_accumulation_steps = len(batches)
        trainer.args.steps_per_generation = len(batches)
        for batch in batches:
            loss = trainer.compute_loss(model, _padded(batch, data))
            trainer.accelerator.backward(loss)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    return step


def _trainer(model: Any, rows: int) -> Any:
    import pyarrow
    import torch
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")),
        pad_token="<pad>", eos_token="<eos>",
    )  # fmt: skip
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="agentrl-bench-trl-"), report_to=[], beta=0.0, bf16=False,
        gradient_checkpointing=False, per_device_train_batch_size=rows, num_generations=rows,
        loss_type="dapo", use_cpu=not torch.cuda.is_available(), use_liger_kernel=False,
    )  # fmt: skip
    return GRPOTrainer(
        model=model, args=arguments, processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset(
            InMemoryTable(pyarrow.table({"prompt": ["x"] * rows})), fingerprint="agentrl-bench"
        ),
    )  # fmt: skip


def _padded(batch: Sequence[Any], data: Sequence[Any]) -> dict[str, Any]:
    """Pad prompts on the left and completions on the right to the longest of the step, as TRL does."""
    import torch

    from agentrl.documents.model_call import unpack_ids

    prompts = [item.spans[0].start for item in batch]
    longest_prompt = max(item.spans[0].start for item in data)
    longest = max(item.tokens - item.spans[0].start for item in data)
    inputs = {
        name: torch.zeros(len(batch), width, dtype=torch.int64)
        for name, width in (
            ("prompt_ids", longest_prompt), ("prompt_mask", longest_prompt),
            ("completion_ids", longest), ("completion_mask", longest), ("tool_mask", longest),
        )
    }  # fmt: skip
    for index, (item, prompt) in enumerate(zip(batch, prompts, strict=True)):
        ids = torch.from_numpy(unpack_ids(item.input_ids).copy()).long()
        inputs["prompt_ids"][index, longest_prompt - prompt :] = ids[:prompt]
        inputs["prompt_mask"][index, longest_prompt - prompt :] = 1
        inputs["completion_ids"][index, : item.tokens - prompt] = ids[prompt:]
        inputs["completion_mask"][index, : item.tokens - prompt] = 1
        for span in item.spans:
            inputs["tool_mask"][index, span.start - prompt : span.end - prompt] = 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs["num_items_in_batch"] = torch.tensor(sum(item.trainable_tokens for item in data))
    inputs["advantages"] = torch.tensor([item.advantage for item in batch])
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def _logprobs(tokens: int, vocabulary: int, hidden: int, chunk: int, vocab_chunk: int) -> dict[str, Any]:
    """Return the peak bytes of the projection's forward and backward, without its inputs."""
    import torch

    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    from peak_memory import peak_allocated

    from agentrl.model.logprobs import OutputHead, token_logprobs

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
