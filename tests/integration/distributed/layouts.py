"""A program for torchrun: trains a tiny model in a layout, and compares it with the model in one process.

    torchrun --nproc_per_node 2 tests/integration/distributed/layouts.py fsdp2 --folder DIR

Rank 0 prints one line: the largest deviation of loss, gradient norm and weights over three steps, and of
all of them over two more after a checkpoint was saved and resumed in another layout.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "train"))
from tiny_models import chains, packed, tiny_model, tree
from transformers import AutoModelForCausalLM

from agentrl.config.schema import AdapterConfig, MemoryConfig, OptimConfig, TrainConfig
from agentrl.losses.settings import LossSettings
from agentrl.train.compute import StepComputer
from agentrl.train.lora import Adapter, add_adapter
from agentrl.train.memory import compile_layers
from agentrl.train.model import Policy
from agentrl.train.optim import build_optimizer
from agentrl.train.parallel.data import Parallel, RankedModel
from agentrl.train.parallel.gradients import split_by_mesh
from agentrl.train.parallel.mesh import build_mesh, parallelize, plan_layout
from agentrl.train.parallel.state import (
    GatheredAdapter,
    StreamedModel,
    gather_adapter,
    gather_weights,
    give_parts,
    published_parts,
)
from agentrl.train.shards import load_optimizer
from agentrl.train.step import ForwardOptions

LIMIT = 1e-4
LORA = AdapterConfig(lora_rank=5)
FILE_BYTES = 20_000
"""So that a tiny model is written in several files."""
STEPS = 3
COUNTS = ("trainable_tokens", "trajectories")
OPTIM = OptimConfig(learning_rate=1e-3, weight_decay=0.01, max_grad_norm=0.5)


ALL_SHARDED = TrainConfig()
PLAIN = MemoryConfig()


@dataclass(frozen=True)
class Case:
    """A layout, the model to try it on, and the layout in which its checkpoint is resumed."""

    world: int
    config: TrainConfig
    model: str = "qwen3"
    tied: bool = False
    resumed: TrainConfig = ALL_SHARDED
    memory: MemoryConfig = PLAIN
    lora: bool = False


CASES = {
    "fsdp2": Case(2, TrainConfig(), tied=True, resumed=TrainConfig(tp_size=2)),
    "dp_replicate2": Case(2, TrainConfig(dp_replicate_size=2)),
    "dp_replicate2×fsdp2": Case(4, TrainConfig(dp_replicate_size=2), model="llama"),
    "dp_replicate2×fsdp2_every": Case(
        4, TrainConfig(dp_replicate_size=2), memory=MemoryConfig(gradient_reduction="every")
    ),
    "fsdp2_lora": Case(2, TrainConfig(), lora=True, resumed=TrainConfig(dp_replicate_size=2)),
    "fsdp2_compile": Case(2, TrainConfig(), memory=MemoryConfig(torch_compile=True)),
    "fsdp2_offload": Case(2, TrainConfig(), memory=MemoryConfig(optimizer_offload=True)),
    "tp2": Case(2, TrainConfig(tp_size=2), resumed=TrainConfig(dp_replicate_size=2)),
    "tp2_tied": Case(2, TrainConfig(tp_size=2), model="llama", tied=True),
    "fsdp2×tp2": Case(4, TrainConfig(tp_size=2), tied=True, resumed=TrainConfig()),
}


def computer(
    model: Any,
    parallel: Parallel | None = None,
    memory: MemoryConfig = PLAIN,
    adapter: Adapter | None = None,
) -> StepComputer:
    """What trains ``model``, alone or together with other processes."""
    optimizer = build_optimizer(model, OPTIM, memory)
    if parallel is not None:
        optimizer.param_groups[:] = split_by_mesh(optimizer.param_groups)
    return StepComputer(
        device=torch.device("cpu"),
        policy=Policy(model, cast("Any", None), Path(), None, adapter),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        settings=LossSettings(importance_weight_cap_ratio=math.inf),
        options=ForwardOptions(),
        max_tokens=64,
        prefix_merging="group",
        max_grad_norm=OPTIM.max_grad_norm,
        parallel=parallel,
    )


def step_data(step: int) -> list[Any]:
    """Five forests of different sizes: an odd number, so that one process of two has less to do."""
    data = [*chains(step, 6), tree(step)]
    return [packed(part) for part in (data[:2], data[2:3], data[3:4], data[4:6], data[6:])]


def spread(
    model: Any, config: TrainConfig, memory: MemoryConfig = PLAIN, adapter: Adapter | None = None
) -> StepComputer:
    """What trains ``model`` in a layout."""
    if memory.torch_compile:
        compile_layers(model)
    mesh = build_mesh(plan_layout(config, dist.get_world_size()), "cpu")
    parallelize(model, mesh, config)
    parallel = Parallel(mesh, RankedModel(model, mesh), memory.gradient_reduction)
    return computer(model, parallel, memory, adapter)


def resume(saved: StepComputer, config: TrainConfig, folder: Path) -> StepComputer:
    """Save model and optimizer, and load them in another layout."""
    if dist.get_rank() == 0:
        (folder / "model").mkdir()
        StreamedModel(saved.policy, lambda: None, limit=FILE_BYTES).save_pretrained(str(folder / "model"))
    else:
        give_parts(published_parts(saved.policy))
    saved.save_optimizer(folder / "optimizer")
    if saved.policy.adapter is not None:
        return resume_adapter(saved.policy.adapter, config, folder)
    dist.barrier()
    model = type(saved.policy.model).from_pretrained(folder / "model", attn_implementation="sdpa").train()
    resumed = spread(model, config)
    load_optimizer(folder / "optimizer", model, resumed.optimizer)
    return resumed


def resume_adapter(saved: Adapter, config: TrainConfig, folder: Path) -> StepComputer:
    """The model as it was made, with the adapters that a checkpoint holds."""
    (folder / "adapter").mkdir(exist_ok=True)
    if dist.get_rank() == 0:
        GatheredAdapter(saved, lambda: None).save_pretrained(str(folder / "adapter"))
    else:
        gather_adapter(saved)
    dist.barrier()
    model = tiny_model("qwen3", vocab_size=64)
    adapter = add_adapter(model, LORA, Path(), folder / "adapter")
    resumed = spread(model, config, adapter=adapter)
    load_optimizer(folder / "optimizer", model, resumed.optimizer)
    return resumed


def largest_deviations(case: Case, folder: Path) -> dict[str, float]:
    """Train alone and together for some steps, and go on from a checkpoint in another layout."""
    model = tiny_model(case.model, tied=case.tied, vocab_size=64)
    adapter = add_adapter(model, LORA, Path(), None) if case.lora else None
    single, single_adapter = copy.deepcopy((model, adapter))
    alone = computer(single, adapter=single_adapter)
    together = spread(model, case.config, case.memory, adapter)
    worst = {"loss": 0.0, "grad_norm": 0.0, "weights": 0.0, "resumed": 0.0}
    for step in range(STEPS):
        for key, value in compare_step(alone, together, step).items():
            worst[key] = max(worst[key], value)
    worst["weights"] = compare_weights(alone, together)
    resumed = resume(together, case.resumed, folder)
    if single_adapter is not None and dist.get_rank() == 0:
        worst["merged"] = compare_merged(single_adapter, folder / "model")
    for step in range(STEPS, STEPS + 2):
        worst["resumed"] = max(worst["resumed"], *compare_step(alone, resumed, step).values())
    worst["resumed"] = max(worst["resumed"], compare_weights(alone, resumed))
    return worst


def compare_step(alone: StepComputer, together: StepComputer, step: int) -> dict[str, float]:
    """Relative deviations of one step's loss and gradient norm; the other metrics must be there."""
    expected = alone.train_forests(step_data(step), 1).metrics
    found = together.train_forests(step_data(step), 1).metrics
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for key in COUNTS:
        assert found[key] == expected[key], f"{key} {found[key]}, not {expected[key]}"
    return {key: abs(found[key] - expected[key]) / abs(expected[key]) for key in ("loss", "grad_norm")}


def compare_weights(alone: StepComputer, together: StepComputer) -> float:
    """The largest difference between two weights; 0 on other ranks than 0."""
    plain, weights = alone.policy.model.state_dict(), gather_weights(together.policy.model)
    if dist.get_rank() != 0:
        return 0.0
    assert weights.keys() == plain.keys()
    return max(float((weights[key] - plain[key]).abs().max()) for key in plain)


def compare_merged(alone: Adapter, folder: Path) -> float:
    """The largest difference between two weights of the model that engines load."""
    published = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return max(float((part.make() - published[part.name]).abs().max()) for part in alone.merged.parts())


def main() -> int:
    """Run the layout that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("layouts", nargs="*", choices=[*CASES, []])
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written; shared by all ranks")
    parser.add_argument("--list", action="store_true", help="print processes and names, and leave")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{CASES[name].world} {name}" for name in arguments.layouts or CASES))
        return 0
    (name,) = arguments.layouts
    case = CASES[name]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        worst = largest_deviations(case, arguments.folder)
        is_first = dist.get_rank() == 0
    finally:
        dist.destroy_process_group()
    good = all(value <= LIMIT for value in worst.values())
    if is_first:
        told = "  ".join(f"{key} {value:.1e}" for key, value in worst.items())
        print(f"{name:<20} {case.world} processes  {told}  {'ok' if good else 'FAILED'}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
