"""Run a training step, or an engine beside a trainer, for ``gpu_check.py``, and print the figures as JSON.

    python scripts/bench/gpu_check_child.py '{"way": "step", "shape": "0.6B", "folder": "…", …}'

``way`` is machine, step or engine. A step with ``fake`` runs on fake CUDA tensors (tests/fake_gpu), which
have shapes, and no values; the process then has the library of ``gpu_check.py`` in LD_PRELOAD.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import torch
from train_workload import Group
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from agentrl.base.atomic_folder import begin_folder
from agentrl.config.load import Configs
from agentrl.config.schema import GROUPS as FLAG_GROUPS

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from tiny_policy import tiny_tokenizer

from agentrl.config.schema import EngineConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from agentrl.distributed.fsdp import choose_reduction
from agentrl.distributed.mesh import World, single_process
from agentrl.documents.training import DBRecordData
from agentrl.inference.engines.clients import engine_client
from agentrl.inference.engines.commands import EngineProcess, engine_command, free_port
from agentrl.local.mongod import EmbeddedMongo
from agentrl.store.client import open_store
from agentrl.train.build import build_trainer
from agentrl.train.controller import lead
from agentrl.weights.publish import PublishTarget, publish, publish_base

_CAUSAL_LM: Any = AutoModelForCausalLM
_QWEN3 = {"vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128}
SHAPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "0.6B": (Qwen3Config, _QWEN3 | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "tie_word_embeddings": True,
    }),
    "8B": (Qwen3Config, _QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }),
    "MoE": (Qwen3MoeConfig, _QWEN3 | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }),
    "tiny": (Qwen3Config, {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
    }),
}  # fmt: skip
"""Qwen3-0.6B, Qwen3-8B, Qwen3-30B-A3B, and a model for a CPU."""

GROUPS = {
    "gpu": Group(trajectories=8, turns=4, prompt=512, output=512, observation=512, even=True),
    "fake": Group(trajectories=4, turns=2, prompt=128, output=128, observation=128, even=True),
    "cpu": Group(trajectories=4, turns=2, prompt=16, output=16, observation=16, even=True),
}
"""A group fills a micro-batch."""
GROUPS_PER_STEP = 2
STEPS = 4
"""The first one compiles and makes the moments; the fastest of the others is reported."""

STATE_BYTES = 16
"""Of a trained number on the GPU: float32 weight, gradient and two moments."""
LOADED_BYTES = 6
"""Of a number on the host while it is loaded: bfloat16 in the file, and float32."""
MEMORY_SHARE = 0.7
"""The part of the GPU's and the host's memory that the numbers of a model whose layers are cut may take."""
FAKE_BYTES = 79 * 2**30
LEARNING_RATE = 1e-3
"""Large enough for one update to change weights that are rounded to bfloat16."""
ENGINE_MEMORY = 0.3


def machine() -> dict[str, Any]:
    """Describe this machine."""
    found = {
        "torch": torch.__version__, "torch_folder": str(Path(torch.__file__).parent),
        "python": platform.python_version(), "cores": os.cpu_count(), "cpu": platform.machine(),
        "host_gib": psutil.virtual_memory().total / 2**30,
    }  # fmt: skip
    if not torch.cuda.is_available():
        return found
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    return found | {
        "gpu": torch.cuda.get_device_name(), "gpu_gib": torch.cuda.mem_get_info()[1] / 2**30,
        "driver": driver.splitlines()[0], "cuda": torch.version.cuda,
    }  # fmt: skip


def step(*, shape: str, folder: str, layers: int, fake: bool) -> dict[str, Any]:
    """Train steps of a model with random weights, and report the fastest and the largest peak memory.

    The model has as many layers as fit, and at most ``layers`` (0: as many as the shape).
    """
    with _fake_gpu() if fake else contextlib.nullcontext() as memory:
        device = torch.device("cuda") if fake else single_process().device
        group = GROUPS["fake" if fake else "gpu" if device.type == "cuda" else "cpu"]
        config = cut_layers(shape, layers, FAKE_BYTES if fake else None)
        write_model(Path(folder), config, None if fake else device)
        trainer = build_trainer(
            recipe(Path(folder), group), weights=None, total_steps=None, world=World(device)
        )
        if memory is not None:
            trainer = dataclasses.replace(trainer, recorded_tokens=0)  # it reads values
        reduction = choose_reduction("auto", trainer.policy.model, trainer.model.mesh.layout)
        steps, peak, tokens = [], 0, GROUPS_PER_STEP * group.computed
        for number in range(2 if fake else STEPS):
            gc.collect()
            if memory is not None:
                _watch(memory, trainer)
            elif device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            result = trainer.train(step_data(group, config.vocab_size, number))
            steps.append(result.metrics | {"seconds": time.perf_counter() - began})
            if not result.is_finite or (result.metrics["tokens"] != tokens and not fake):
                raise RuntimeError(
                    f"step {number + 1} is not finite, or not {tokens} tokens: {result.metrics}"
                )
            if memory is not None:
                peak = max(item.total for item in memory.peaks.values())
            elif device.type == "cuda":
                peak = torch.cuda.max_memory_allocated()
    best = min(steps[1:], key=lambda metrics: float(metrics["seconds"]))
    shown = ("seconds", "tokens_per_second", "mfu", "tflops_per_second")
    return {
        "layers": config.num_hidden_layers, "all_layers": SHAPES[shape][1]["num_hidden_layers"],
        "parameters": sum(parameter.numel() for parameter in trainer.policy.model.parameters()),
        "tokens": tokens, "micro_batches": best["micro_batches"], "peak_bytes": peak,
        "reduction": reduction,
        "context": group.context, "max_tokens": group.computed, "group": group.plain(),
        **({} if fake else {name: best.get(name) for name in shown} | {"first": steps[0]["seconds"]}),
    }  # fmt: skip


def cut_layers(shape: str, most: int, fake_bytes: int | None) -> Any:
    """Return the configuration of ``shape``, with as many layers as GPU and host have memory for."""
    host_bytes = math.inf if fake_bytes else psutil.virtual_memory().available
    gpu_bytes = fake_bytes or (torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else math.inf)
    make, fields = SHAPES[shape]
    most = min(most or fields["num_hidden_layers"], fields["num_hidden_layers"])
    with torch.device("meta"):
        one, two = (
            _CAUSAL_LM.from_config(make(**fields | {"num_hidden_layers": count})).num_parameters()
            for count in (1, 2)
        )
    limit = MEMORY_SHARE * min(gpu_bytes / STATE_BYTES, host_bytes / LOADED_BYTES)
    fitting = 1 + (limit - one) / (two - one)
    if fitting < 1:
        raise RuntimeError(f"one layer of {shape} does not fit: {one * STATE_BYTES / 2**30:.0f} GiB")
    return make(**fields | {"num_hidden_layers": int(min(most, fitting)), "dtype": torch.bfloat16})


def write_model(folder: Path, config: Any, device: torch.device | None) -> None:
    """Write a folder with a tokenizer and random bfloat16 weights, made on ``device``; None: no weights."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    config.eos_token_id, config.pad_token_id, config.bos_token_id = tokenizer.eos_token_id, 0, None
    config.save_pretrained(folder)
    if device is not None:
        torch.manual_seed(0)
        with device:
            model = _CAUSAL_LM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)


def recipe(folder: Path, group: Group) -> Configs:
    """Return the default recipe; products are in bfloat16 on every device."""
    return Configs(
        [
            *(kind() for kind in FLAG_GROUPS),
            ModelConfig(model_name_or_path=str(folder)),
            OptimConfig(learning_rate=LEARNING_RATE),
            TrainConfig(max_tokens=group.computed, autocast_bf16="true", gradient_checkpointing=True),
        ]
    )


def step_data(group: Group, vocabulary: int, number: int) -> list[DBRecordData]:
    """Return the data of a step; groups and steps have other tokens."""
    return [
        dataclasses.replace(item, id=f"{seed}/{item.id}", record=f"{seed}/{item.record}", task=f"task {seed}")
        for seed in range(GROUPS_PER_STEP * number, GROUPS_PER_STEP * (number + 1))
        for item in group.data(vocabulary, seed)
    ]


@contextlib.contextmanager
def _fake_gpu() -> Iterator[Any]:
    """Make this process the only rank of a GPU that is not there; yield what counts its memory."""
    from fake_gpu.fake_cuda import GpuMemory, cuda_stubs
    from fake_gpu.fake_rank import fake_mesh
    from fake_gpu.fake_step import _eager_flex, _real_meshes
    from torch._subclasses.fake_tensor import FakeTensorMode

    from agentrl.distributed import build_policy
    from agentrl.distributed.mesh import Layout, Mesh
    from agentrl.model import load
    from agentrl.model.load import allocate

    def load_model(folder: Path, config: ModelConfig, dtype: torch.dtype) -> Any:
        model = load.empty_model(folder, config, dtype)
        allocate(model, torch.device("cuda"))
        return model

    memory = GpuMemory()
    with contextlib.ExitStack() as stack:
        for item in (cuda_stubs(), fake_mesh(Layout(), 0, "cuda"), _eager_flex(), _real_meshes()):
            stack.enter_context(item)
        # What reads values, or the state of a real device.
        for place, name, value in (
            (torch.cuda, "manual_seed_all", lambda seed: None),
            (torch.cuda, "is_bf16_supported", lambda *given, **named: True),
            (torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=FAKE_BYTES)),
            (torch.nn.Module, "to", lambda module, *given: module),  # it is there already
            (load, "load_model", load_model),
            (build_policy, "check_model", lambda model: None),
            (Mesh, "sum_reports", lambda mesh, report: report),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        memory.scalar = 1
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(memory)


def _watch(memory: Any, trainer: Any) -> None:
    """Measure the peak of what follows."""
    from fake_gpu.rank_step import owned_tensors

    memory.owned, memory.resized = owned_tensors(trainer.model, trainer.optimizer)
    memory.restart()


async def engine(*, shape: str, folder: str, kind: str, seconds: float, given: str | None) -> dict[str, Any]:
    """Compare a trainer with an engine, train a step, publish it, update the engine, and compare again.

    ``given`` is a model's folder, in place of random weights of ``shape``.
    """
    device, base = single_process().device, Path(given or folder)
    group = GROUPS["gpu" if device.type == "cuda" else "cpu"]
    model = ModelConfig(model_name_or_path=str(base), dtype="bfloat16")
    if given is None:
        write_model(base, cut_layers(shape, 0, None), device)
    config = EngineConfig(engine=kind, inf_mem_ratio=ENGINE_MEMORY, max_total_tokens=32768)  # type: ignore[arg-type]
    port, root = free_port(config.host), Path(folder).with_name("run")
    url, mongo = f"http://{config.host}:{port}", EmbeddedMongo(root / "mongo")
    process = EngineProcess(engine_command(str(base), model, config, port), root / "engine.log")
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, mongo.down)
        stack.push_async_callback(process.stop)
        client = await stack.enter_async_context(engine_client(kind, url))
        began = time.perf_counter()
        await process.wait_ready(client, seconds)
        started = time.perf_counter() - began
        before = await parity(base, kind, url, seconds)
        trainer = build_trainer(recipe(base, group), weights=None, total_steps=None)
        vocabulary = trainer.policy.model.config.vocab_size
        result = await asyncio.to_thread(trainer.train, step_data(group, vocabulary, 0))
        if not result.is_finite:
            raise RuntimeError(f"the step is not finite: {result.metrics}")
        uri = (await asyncio.to_thread(mongo.up)).uri
        run = RunConfig(run_name="gpu_check", db_connection_string=uri, output_dir=str(root))
        store = await stack.enter_async_context(await open_store(run))
        attempt = await store.trainer_lease.acquire("gpu_check", platform.node(), os.getpid(), 600.0)
        await publish_base(store, base, attempt)
        controller = lead(World(device), lambda: trainer)
        began = time.perf_counter()
        temporary = begin_folder(root / "weights" / "step-1")
        write = await asyncio.to_thread(controller.write_version, 1, temporary)
        version = await publish(
            store, temporary, await asyncio.wrap_future(write),
            PublishTarget(root=str(root / "weights"), attempt=attempt, keep=2), step=1, train_step_id=None,
        )  # fmt: skip
        published = time.perf_counter() - began
        began = time.perf_counter()
        await client.update_weights(version.location, version.id)
        updated = time.perf_counter() - began
        served = (await client.model_info()).version
        if served != version.id:
            raise RuntimeError(f"the engine serves version {served} after an update to {version.id}")
        after = await parity(Path(version.location), kind, url, seconds)
    return {
        "start": started, "publish": published, "update": updated,
        "bytes": sum(file.bytes for file in version.files),
        "before": before, "after": after,
    }  # fmt: skip


async def parity(folder: Path, kind: str, url: str, seconds: float) -> list[dict[str, Any]]:
    """Run ``agentrl parity`` on the engine at ``url``, and return its differences."""
    prompts = "16" if torch.cuda.is_available() else "4"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "agentrl", "parity", "--model_name_or_path", str(folder), "--engine", kind,
        "--url", url, "--dtype", "bfloat16", "--prompts", prompts, "--json", stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), seconds)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise RuntimeError(f"agentrl parity did not end within {seconds:.0f} s") from None
    if not output:
        raise RuntimeError(f"agentrl parity ended with exit code {process.returncode}")
    found: list[dict[str, Any]] = json.loads(output)
    return found


def main() -> int:
    """Run what the JSON argument describes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the engine and the database end, too
    wanted = json.loads(sys.argv[1])
    ways: dict[str, Any] = {
        "machine": machine,
        "step": step,
        "engine": lambda **given: asyncio.run(engine(**given)),
    }
    print(json.dumps(ways[wanted.pop("way")](**wanted)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
