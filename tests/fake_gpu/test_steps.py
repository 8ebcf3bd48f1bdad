"""On fake GPUs: a step in each layout (memory, collectives, dtypes, reads by the host), and an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from tiny_policy import write_tiny_policy
from training_data import training_configs

from agentrl.config.schema import AdapterConfig, TrainConfig
from agentrl.distributed.expert_parallel import check_experts
from agentrl.distributed.mesh import Layout, World
from agentrl.errors import ConfigError
from agentrl.model.flops import Precision
from agentrl.train.build import build_trainer
from fake_gpu.cases import BATCHES, HIDDEN, LAYERS, LAYOUTS, MODELS, RANK, TOKENS, Case, layouts
from fake_gpu.closed_forms import Collectives, expected
from fake_gpu.conftest import Fake, Steps

pytestmark = [pytest.mark.fake_gpu, pytest.mark.timeout(1000)]

MIB, GIB = 2**20, 2**30
FLOAT32_PRODUCTS = ("modeling_qwen3.py Qwen3RotaryEmbedding.forward", "Qwen3MoeRotaryEmbedding.forward")
"""Places that multiply in float32: the angles of rotary embeddings, which bfloat16 would round."""
_TP_FORWARD = "TensorParallelLayer.install_forward.<locals>.tp_forward"
CEILINGS: dict[tuple[str, int], dict[str, float]] = {
    ("dense", 1): {"one": 100.6},
    ("dense", 8): {"fsdp": 44.2, "hsdp": 52.9, "tp": 29.7, "cp": 33.4, "pp": 40.6},
    ("dense", 64): {"tp×cp": 10.5},
    ("moe", 1): {"one": 248.0},
    ("moe", 8): {"hsdp": 112.6, "pp": 84.0, "ep": 68.8},
    ("moe", 64): {"fsdp": 92.8, "tp×cp": 15.0, "ep×tp": 29.2},
    ("lora", 1): {"one": 33.5},
    ("lora", 8): {"hsdp": 30.6, "cp": 19.5},
    ("lora", 64): {"fsdp": 28.9},
    ("frozen", 1): {"one": 71.8},
    ("frozen", 8): {"hsdp": 43.8, "pp": 35.5},
    ("frozen", 64): {"tp×cp": 9.5, "ep×tp": 26.7},
    ("reference", 1): {"one": 109.4},
    ("reference", 8): {"hsdp": 55.1, "pp": 41.9},
    ("reference", 64): {"tp×cp": 10.7, "ep×tp": 29.6},
}
"""MiB of a rank at the peak of a step, by model, world and layout: about 3 % above the measured ones.

The layouts of a model have each split that it trains in; those of a dense one have each alone.
"""


def cases(model: str) -> list[tuple[str, int, Case]]:
    """Return layout, world and case of each step of a model; of a pipeline the first and the last stage."""
    found = []
    for world, sizes in LAYOUTS.items():
        for name in CEILINGS.get((model, world), ()):
            for rank in (0, world - 1) if "pp" in name else (0,):
                is_padded = (world, name) == (64, "fsdp")  # by what the plan does not count
                planned = rank == 0 and not is_padded and model in ("dense", "moe", "lora")
                case = Case(model=model, layout=sizes[name], rank=rank, planned=planned)
                found.append((name, world, case))
    if model == "dense":  # what moves to the host changes no exchange between GPUs and adds no wait of it
        found.append(("tp×cp", 64, Case(model=model, layout=LAYOUTS[64]["tp×cp"], offload=True)))
    return found


@pytest.mark.parametrize("model", MODELS)
def test_each_split_that_a_model_trains_in_is_run(model: str) -> None:
    trained = {
        size for world, sizes in LAYOUTS.items() for name in layouts(model, world) for size in sizes[name]
    }
    assert {size for _, _, case in cases(model) for size in case.layout} == trained


@pytest.mark.parametrize("model", MODELS)
def test_a_step_on_fake_gpus(model: str, run_steps: Steps) -> None:
    named = cases(model)
    steps = run_steps([case for _, _, case in named])
    wrong = [
        f"{name}, rank {case.rank} of {world}: {problem}"
        for (name, world, case), step in zip(named, steps, strict=True)
        for problem in (
            *_memory_problems(step, CEILINGS[model, world][name] * MIB),
            *_collective_problems(step, expected(case)),
            *_dtype_problems(step),
            *_read_problems(step, reads(case)),
            *_move_problems(step, case),
        )
    ]
    assert not wrong, "\n".join(wrong)


def _memory_problems(step: dict[str, Any], ceiling: float) -> Iterator[str]:
    if step["peak"] > ceiling:
        yield f"the peak is {step['peak'] / MIB:.1f} MiB, above {ceiling / MIB:.1f}: {step['parts']}"
    if step["planned"] is not None and abs(step["planned"] / step["peak"] - 1) > 0.1:
        yield f"agentrl plan says {step['planned'] / MIB:.1f} MiB, and {step['peak'] / MIB:.1f} are used"


def _collective_problems(step: dict[str, Any], by_hand: Collectives) -> Iterator[str]:
    for key in sorted({*step["calls"], *by_hand.calls}):
        counted = step["calls"].get(key, 0), step["bytes"].get(key, 0)
        computed = by_hand.calls[key], by_hand.bytes[key]
        if counted != computed:
            yield f"{key}: (calls, bytes) {counted}, by hand {computed}"


def _dtype_problems(step: dict[str, Any]) -> Iterator[str]:
    for product in step["products"]:
        if "float32" in product and not product.endswith(FLOAT32_PRODUCTS):
            yield f"a product in float32: {product}"
    if step["mixed"]:
        yield f"operations on tensors of several devices: {step['mixed']}"


def reads(case: Case) -> dict[str, int]:
    """Return how many numbers the host reads from the device in the step of ``case``, by place.

    The counts of the step's tokens; loss and metrics, all at its end; the gradients' norm; the logprobs of a
    reference model. DTensor asks twice which ids of a micro-batch are not in a rank's part of the embedding.
    """
    layout = Layout(**case.layout)
    is_last = case.rank // (layout.world // layout.pp) == layout.pp - 1
    is_reference = case.model == "reference"
    found = {
        "agentrl/train/step.py StepLoss.start": 3,
        "agentrl/distributed/fsdp.py gradient_norm": 1,
    }
    if is_last:
        found["agentrl/train/step.py StepLoss.report"] = BATCHES * 20
    if layout.tp > 1:
        passes = 2 if is_reference else 1
        for function in ("EmbeddingParallel.transform_output_post_forward", _TP_FORWARD):
            found[f"transformers/distributed/tensor_parallel.py {function}"] = passes * BATCHES
    if is_reference:
        found["agentrl/train/step.py _to_numpy"] = BATCHES
    return found


def _read_problems(step: dict[str, Any], listed: dict[str, int]) -> Iterator[str]:
    for place in sorted({*step["reads"], *listed}):
        if step["reads"].get(place, 0) != listed.get(place, 0):
            yield f"{place} reads {step['reads'].get(place, 0)} numbers, {listed.get(place, 0)} are listed"


def _move_problems(step: dict[str, Any], case: Case) -> Iterator[str]:
    """Yield what moves to the host, of a step that keeps the inputs of its layers there what does not."""
    inputs = LAYERS * BATCHES * TOKENS // Layout(**case.layout).cp * HIDDEN * torch.bfloat16.itemsize
    moved = step["moved"].get("bfloat16", 0)
    if moved < inputs if case.offload else step["moved"]:
        yield f"bytes that move to the host: {step['moved']}, and {inputs} are the inputs of all layers"


@pytest.mark.parametrize("world", [8, 64])
@pytest.mark.parametrize("model", MODELS)
def test_a_layout_that_no_step_runs_in_is_refused_by_name(model: str, world: int) -> None:
    left_out = LAYOUTS[world].keys() - {*layouts(model, world)}
    assert bool(left_out) is (model in ("dense", "lora"))
    for name in left_out:
        sizes = LAYOUTS[world][name]
        flags = {f"{size}_size": ranks for size, ranks in sizes.items() if size != "dp_shard"}
        with pytest.raises(ConfigError) as caught:
            build(model, flags, sizes, world)
        named = [flag for flag, ranks in flags.items() if f"--{flag} {ranks}" in caught.value.message]
        assert named, f"{name}: {caught.value.message}"


def build(model: str, flags: dict[str, int], sizes: dict[str, int], world: int) -> None:
    """Build what trains ``model``, up to the check that refuses it."""
    if model == "dense":
        check_experts(tiny_model("qwen3"), Layout(**sizes))
        return
    recipe = training_configs(TrainConfig(**flags), AdapterConfig(lora_rank=RANK))
    ranks = World(torch.device("cpu"), 0, world)
    build_trainer(recipe, weights=None, total_steps=1, world=ranks, precision=Precision())


def test_the_peak_of_large_models(run_steps: Steps) -> None:
    """Qwen3-8B on 8 GPUs and Qwen3-32B on 64 fit 40 and 55 GiB, two micro-batches of 32k tokens."""
    small = Case(model="8b", layout={"dp_shard": 8}, layers=36, planned=True)
    large = Case(model="32b", layout={"dp_shard": 64}, layers=64, planned=True)
    steps = run_steps([small, large])
    for step, limit in zip(steps, (40, 55), strict=True):
        print(f"{step['peak'] / GIB:.2f} GiB, planned {step['planned'] / GIB:.2f}: {step['parts']}")
        assert step["peak"] <= limit * GIB
        assert step["planned"] == pytest.approx(step["peak"], rel=0.1)


def test_the_trainer_moves_to_the_host_and_back(run_fake: Fake) -> None:
    [found] = run_fake("fake_offload")
    assert found["on the host"] < 1000  # the step counts of AdamW
    assert found["trained"] > 5 * 2**20
    assert found["trained"] == found["back"] == found["trained again"]


def test_a_prompt_and_a_running_sequence_on_a_fake_gpu(run_fake: Fake, tmp_path: Path) -> None:
    [found] = run_fake("fake_engine", str(write_tiny_policy(tmp_path / "model")))
    assert (found["device"], found["mixed"]) == ("cuda:0", {})
    assert found["shape"][0] == 2
