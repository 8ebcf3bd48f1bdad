"""Train a tiny model in several layouts, and compare it with the same model in one process; for torchrun.

    torchrun --nproc_per_node 2 tests/core/integration/distributed/layouts.py fsdp2 tp2 --folder DIR

Every rank gets the data of each step and trains its micro-batches, as in a run. The single process trains
each model call as a sequence of its own. Rank 0 prints a line per layout: the largest deviation of loss,
gradient norm, weights, and log-ratio and entropy of single tokens over three steps, and the largest of all of
them over two more steps, after resuming from a checkpoint in another layout.

With ``--products bfloat16`` the layout computes in bfloat16, under FSDP2's policy, and the single process in
float32 as before. Then tokens deviate by their mean, because rounding may send a token to another expert, and
weights by the norm of the difference as a part of the update's. Of several steps the smallest deviation
counts.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[3]))
from steps import MAX_TOKENS, step_data
from tiny_models import AGES, tiny_model
from transformers import AutoModelForCausalLM

from agentrl.config.schema import AdapterConfig, MemoryConfig, OptimConfig, TrainConfig
from agentrl.config.training import VERSION_LOGPROBS
from agentrl.data.planner import PrefixMerging, build_micro_batches
from agentrl.distributed.build_policy import compile_layers
from agentrl.distributed.mesh import build_mesh, leave_processes, plan_layout
from agentrl.distributed.parallel_model import ParallelModel, parallelize
from agentrl.distributed.pipeline_stages import tied_weight
from agentrl.documents.model_call import ExpertShape
from agentrl.documents.record import TokenColumns
from agentrl.documents.training import DBRecordData
from agentrl.losses.settings import LossSettings
from agentrl.model.flops import Precision
from agentrl.model.load import Policy
from agentrl.model.logprobs import ForwardOptions
from agentrl.model.lora import Adapter, add_adapter
from agentrl.model.routing import RouterReplay, find_routers
from agentrl.train.build import checkpointing_mode, enable_checkpointing
from agentrl.train.controller import Lane, RankWriter
from agentrl.train.optimizer import build_optimizer, load_optimizer
from agentrl.train.step import FrozenLogprobs, PolicyTrainer, TokenValues, has_gradient
from agentrl.weights.snapshot import gather

BASE = tempfile.TemporaryDirectory()
"""Of this process: the folder of the base model."""
LIMIT = 1e-4
LIMITS = {"float32": LIMIT, "bfloat16": 0.25}
"""Of every deviation, by the dtype of products in the layout."""
LORA = AdapterConfig(lora_rank=5)
EXPERTS = ExpertShape(layers=2, top_k=2, experts=8)
"""Of the mixture, and of the routing of a step's data."""
FILE_BYTES = 20_000
"""So that a tiny model is written in several files."""
STEPS = 3
OPTIM = OptimConfig(learning_rate=1e-3, weight_decay=0.01, max_grad_norm=0.5, optim_args="eps=1e-6")
"""A larger eps, or AdamW makes a whole step of a gradient that is nothing but rounding."""


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
    layers: int = 2
    window: int | None = None
    """Tokens that a layer sees back."""
    memory: MemoryConfig = PLAIN
    """For the layout, not for the single process."""
    lora: bool = False
    prefix_merging: PrefixMerging = "group"
    products: str = "float32"
    whole_steps: bool = False
    """Make two passes of GSPO against recomputed logprobs: it reads whole trajectories, which ranks split."""
    at_version: bool = False
    """Take π_old from the column of ``--old_logprobs version``."""
    idle: bool = False
    """Let the policy gradient alone act, on data of which most have an advantage of 0."""


CASES = {
    "fsdp2": Case(2, TrainConfig(), tied=True, resumed=TrainConfig(tp_size=2)),
    "dp_replicate2": Case(2, TrainConfig(dp_replicate_size=2)),
    "dp_replicate2×fsdp2": Case(4, TrainConfig(dp_replicate_size=2), model="llama"),
    "dp_replicate2×fsdp2_every": Case(
        4, TrainConfig(dp_replicate_size=2), memory=MemoryConfig(gradient_reduction="every")
    ),
    "fsdp2_lora": Case(2, TrainConfig(), lora=True, resumed=TrainConfig(dp_replicate_size=2)),
    "fsdp2_compile": Case(2, TrainConfig(), memory=MemoryConfig(torch_compile=True)),
    "fsdp2_window": Case(2, TrainConfig(), window=9),
    "fsdp2_offload": Case(2, TrainConfig(), memory=MemoryConfig(optimizer_offload=True)),
    "fsdp2_gspo": Case(2, TrainConfig(), whole_steps=True),
    "fsdp2_chains": Case(2, TrainConfig(), prefix_merging="trajectory"),
    "fsdp2_calls": Case(2, TrainConfig(), prefix_merging="off"),
    "tp2": Case(2, TrainConfig(tp_size=2), resumed=TrainConfig(dp_replicate_size=2)),
    "tp2_tied": Case(2, TrainConfig(tp_size=2), model="llama", tied=True),
    "tp2_fused": Case(2, TrainConfig(tp_size=2), model="phi3", whole_steps=True),
    "fsdp2×tp2": Case(4, TrainConfig(tp_size=2), tied=True, resumed=TrainConfig()),
    "ep2": Case(2, TrainConfig(ep_size=2), model="qwen3_moe"),
    "ep_resumed": Case(2, TrainConfig(), model="qwen3_moe", resumed=TrainConfig(ep_size=2)),
    "ep2×fsdp2": Case(4, TrainConfig(ep_size=2), model="qwen3_moe", resumed=TrainConfig(tp_size=2)),
    "dp_replicate2×ep2": Case(4, TrainConfig(dp_replicate_size=2, ep_size=2), model="qwen3_moe"),
    "tp2_moe": Case(2, TrainConfig(tp_size=2), model="qwen3_moe", resumed=TrainConfig(ep_size=2)),
    "ep2×tp2": Case(4, TrainConfig(ep_size=2, tp_size=2), model="qwen3_moe"),
    "cp2": Case(2, TrainConfig(cp_size=2), tied=True),
    "cp2×fsdp2": Case(4, TrainConfig(cp_size=2), resumed=TrainConfig(dp_replicate_size=2)),
    "cp2×ep2": Case(4, TrainConfig(cp_size=2, ep_size=2), model="qwen3_moe"),
    "cp2×tp2": Case(4, TrainConfig(cp_size=2, tp_size=2), resumed=TrainConfig(cp_size=4)),
    "pp2": Case(2, TrainConfig(pp_size=2)),
    "pp2_tied": Case(2, TrainConfig(pp_size=2), model="llama", tied=True),
    "fsdp2_to_pp2": Case(2, TrainConfig(), tied=True, resumed=TrainConfig(pp_size=2)),
    "pp3": Case(3, TrainConfig(pp_size=3), layers=4, memory=MemoryConfig(activation_checkpointing="full")),
    "pp2_gspo": Case(2, TrainConfig(pp_size=2), resumed=TrainConfig(pp_size=2), whole_steps=True),
    "pp2×fsdp2": Case(4, TrainConfig(pp_size=2), tied=True, resumed=TrainConfig(tp_size=2)),
    "pp2×ep2": Case(4, TrainConfig(pp_size=2, ep_size=2), model="qwen3_moe"),
    "pp2×cp2": Case(4, TrainConfig(pp_size=2, cp_size=2), tied=True),
    "pp2×tp2": Case(4, TrainConfig(pp_size=2, tp_size=2), tied=True, resumed=TrainConfig(pp_size=2)),
    "fsdp2_idle": Case(2, TrainConfig(), idle=True),
    "cp2_idle": Case(2, TrainConfig(cp_size=2), idle=True),
    "pp2_idle": Case(2, TrainConfig(pp_size=2), idle=True),
    "fsdp2_version": Case(2, TrainConfig(), at_version=True),
    "tp2_version": Case(2, TrainConfig(tp_size=2), at_version=True),
    "cp2_version": Case(2, TrainConfig(cp_size=2), at_version=True),
    "ep2_version": Case(2, TrainConfig(ep_size=2), model="qwen3_moe", at_version=True),
    "pp2_version": Case(2, TrainConfig(pp_size=2), at_version=True),
}


def install_replay(model: Any) -> RouterReplay | None:
    """Let a mixture take the experts that the data of a step name."""
    return RouterReplay.install(model, EXPERTS) if find_routers(model) else None


def build_trainer(
    model: ParallelModel, case: Case, adapter: Adapter | None = None, replay: RouterReplay | None = None
) -> PolicyTrainer:
    """Return what trains ``model``; in a single process without merging prefixes or splitting data."""
    is_single = model.mesh.layout.world == 1
    if is_single:
        replay = install_replay(model.model)
    # Rounding decides on which side of a bound a token is: without one.
    gspo = {"loss_calculater": "GSPO", "old_logprobs": "recompute", "epsilon": 0.2}
    at_version = {"old_logprobs": "version", "importance_correction": "tis:8"}
    loss = gspo if case.whole_steps else at_version if case.at_version else {}
    # Steps with rounded gradients part from exact ones, the further the larger they are.
    config = OPTIM if case.products == "float32" else replace(OPTIM, learning_rate=OPTIM.learning_rate / 10)
    optimizer = build_optimizer(model.model, config, PLAIN if is_single else case.memory)
    rounded = None if is_single or adapter else torch.bfloat16
    base = Path(BASE.name)
    model.model.config.save_pretrained(base)  # published files keep the fields of the base's
    return PolicyTrainer(
        policy=Policy(model.model, cast("Any", None), base, None, adapter, own_dtype=rounded),
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        settings=LossSettings(
            importance_weight_cap_ratio=math.inf,
            entropy_coef=0.0 if case.idle else 0.1,
            distill_coef=0.0 if case.idle else 0.2,
            dual_clip=math.inf,
            **cast("Any", loss),
        ),
        options=ForwardOptions(),
        max_tokens=1 << 20 if is_single else MAX_TOKENS,
        prefix_merging="off" if is_single else case.prefix_merging,
        max_grad_norm=OPTIM.max_grad_norm,
        frozen=FrozenLogprobs(start=case.whole_steps),
        epochs=2 if case.whole_steps else 1,
        recorded_tokens=1 << 20,
        replay=replay,
    )


def build_parallel(model: Any, case: Case, adapter: Adapter | None = None) -> PolicyTrainer:
    """Split ``model`` over the layout of ``case``, and return what trains it."""
    replay = install_replay(model)
    enable_checkpointing(model, checkpointing_mode(case.memory, gradient_checkpointing=False))
    if case.memory.torch_compile:
        compile_layers(model)
    mesh = build_mesh(plan_layout(case.config, dist.get_world_size()), "cpu")
    parallel = parallelize(
        model,
        mesh,
        max_tokens=case.config.max_tokens,
        reduction=case.memory.gradient_reduction,
        precision=Precision(products=getattr(torch, case.products)),
    )
    return build_trainer(parallel, case, adapter, replay)


def rank_writer(together: PolicyTrainer, limit: int = FILE_BYTES) -> RankWriter:
    """Return what writes a rank's share; every rank calls it."""
    lanes = [Lane(name, dist.new_group(backend="gloo")) for name in ("versions", "checkpoints")]
    return RankWriter(together, *lanes, limit)


def publish(together: PolicyTrainer, folder: Path, limit: int = FILE_BYTES) -> None:
    """Write the model that engines load; every rank calls it."""
    writer = rank_writer(together, limit)
    try:
        writer.write_version(1, folder).result(60)
    finally:
        writer.close()


def whole_weights(together: PolicyTrainer) -> dict[str, Tensor]:
    """Return the weights of all stages before they are rounded, tied ones once; every rank calls it."""
    source = replace(together.policy, own_dtype=None).published
    own = {part.name: gather(part.make()).clone() for part in source.parts()}
    shares: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(shares, own)
    return {name: value for share in shares for name, value in share.items()}


def resume(saved: PolicyTrainer, case: Case, folder: Path) -> PolicyTrainer:
    """Save model and optimizer, and load them in the other layout."""
    (folder / "model").mkdir(exist_ok=True)
    writer = rank_writer(saved)
    for write in writer.write_checkpoint(1, folder, writes_model=True):
        write.result(60)
    if saved.policy.adapter is not None:
        (folder / "merged").mkdir(exist_ok=True)
        writer.write_version(1, folder / "merged").result(60)
    writer.close()
    case = replace(case, config=case.resumed, memory=PLAIN)
    if saved.policy.adapter is not None:
        return resume_adapter(case, folder)
    dist.barrier()
    kind = type(saved.policy.model)
    model = kind.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="sdpa").train()
    resumed = build_parallel(model, case)
    load_optimizer(folder / "optimizer", model, resumed.optimizer)
    return resumed


def resume_adapter(case: Case, folder: Path) -> PolicyTrainer:
    """Build the base model again, with the adapters of the checkpoint."""
    dist.barrier()
    model = tiny_model("qwen3", vocab_size=64)
    adapter = add_adapter(model, LORA, Path(), folder / "model")
    resumed = build_parallel(model, case, adapter)
    load_optimizer(folder / "optimizer", model, resumed.optimizer)
    return resumed


def window(case: Case) -> dict[str, Any]:
    """Return the model's settings for a window that some of a step's sequences exceed."""
    if case.window is None:
        return {}
    return {"use_sliding_window": True, "sliding_window": case.window, "max_window_layers": 1}


def largest_deviations(case: Case, folder: Path) -> dict[str, float]:
    """Train in one process and in the layout, then resume from a checkpoint in another layout."""
    model = tiny_model(
        case.model, tied=case.tied, vocab_size=64, num_hidden_layers=case.layers, **window(case)
    )
    adapter = add_adapter(model, LORA, Path(), None) if case.lora else None
    single, single_adapter = copy.deepcopy((model, adapter))
    if case.at_version:
        check_age_0(model, case)
    alone = build_trainer(ParallelModel(single), case, single_adapter)
    start = None
    if case.products != "float32":
        start = {part.name: part.make().clone() for part in alone.policy.published.parts()}
    together = build_parallel(model, case, adapter)
    check_steps(together.model.mesh.layout.data)
    # A rounded ratio may cross a clip, which changes the gradient of that step; a fault changes every step's.
    fold = max if start is None else min
    steps = [compare_step(alone, together, step) for step in range(STEPS)]
    worst = {key: fold(deviations[key] for deviations in steps) for key in steps[0]}
    worst["weights"] = compare_weights(alone, together, start)
    check_copies(together)
    resumed = resume(together, case, folder)
    if single_adapter is not None and dist.get_rank() == 0:
        worst["merged"] = compare_merged(single_adapter, folder / "merged")
    later = [compare_step(alone, resumed, step) for step in range(STEPS, STEPS + 2)]
    worst["resumed"] = fold(max(deviations.values()) for deviations in later)
    worst["resumed"] = max(worst["resumed"], compare_weights(alone, resumed, start))
    return worst


def check_age_0(model: Any, case: Case) -> None:
    """Check that a step on data of age 0 is that of ``recompute``, bit for bit, whatever the column has."""
    ways = [build_parallel(copy.deepcopy(model), case) for _ in range(2)]
    ways[1] = replace(ways[1], settings=replace(ways[1].settings, old_logprobs="recompute"))
    data = with_versions(step_data(0))
    version, recompute = (trainer.train(data, dict.fromkeys(AGES, 0)).metrics for trainer in ways)
    assert all(version[key] == recompute[key] for key in ("loss", "grad_norm", "kl_k3"))
    found, expected = map(whole_weights, ways)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def with_versions(data: Sequence[DBRecordData], filler: PolicyTrainer | None = None) -> list[DBRecordData]:
    """Return ``data`` with the column ``version_logprobs``, the same on every rank; −1 without a filler.

    A filler computes it in one process, as ``agentrl teach --self`` does. Tokens of age 1 get other values
    than those of its weights, each its own, so that one in the wrong place shows.
    """
    values = [np.full(item.trainable_tokens, -1.0, np.float32) for item in data]
    if filler is not None and dist.get_rank() == 0:
        forests = FrozenLogprobs(start=True).attach(filler.model, filler.pack(data), filler.options)
        for forest in forests:
            assert forest.start_logprob is not None
            shift = forest.age * np.linspace(0.1, 0.6, len(forest.age), dtype=np.float32)
            for number, own in enumerate(values):
                here = forest.trajectory[forest.row] == number
                own[forest.label[here]] = (forest.start_logprob - shift)[here]
    sent = [values]
    dist.broadcast_object_list(sent)
    filled = []
    for item, own in zip(data, sent[0], strict=True):
        columns = TokenColumns.unpack(item.columns, item.trainable_tokens)
        assert columns is not None
        columns = replace(columns, values={**columns.values, VERSION_LOGPROBS: own})
        filled.append(replace(item, columns=columns.pack()))
    return filled


def check_steps(ranks: int) -> None:
    """Check that the steps have several rounds, split trajectories, and ranks without work."""
    large, small = (
        build_micro_batches(step_data(step), MAX_TOKENS, vocab_size=64, ranks=ranks) for step in (0, 1)
    )
    assert len(large) > ranks
    assert any(forest.holds_parts for forest in large)
    assert any(not forest.is_chains for forest in large)
    assert sum(forest.trainable_tokens == 0 for forest in small) == ranks - 1


def compare_step(alone: PolicyTrainer, together: PolicyTrainer, step: int) -> dict[str, float]:
    """Return a step's deviations: relative of loss and gradient norm, absolute of single tokens, in nats.

    They are 0 on other ranks than 0. Only rank 0 also trains as one process. Both must train all of the data
    and report the same metrics. With ``--old_logprobs version`` ``gap`` is the difference of the filler's
    logprobs and the layout's own.
    """
    is_filled = together.settings.old_logprobs == "version"
    data = with_versions(step_data(step), alone) if is_filled else step_data(step)
    if not together.settings.distill_coef:  # the second step has one trajectory alone
        data = [item if item.id == "group/1" else without_advantage(item) for item in data]
    result = together.train(data, AGES)
    if dist.get_rank() != 0:
        return {"loss": 0.0, "grad_norm": 0.0, "tokens": 0.0} | ({"gap": 0.0} if is_filled else {})
    single = alone.train(data, AGES)
    found, expected = result.metrics, single.metrics
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    counts = {"trajectories": len(data), "trainable_tokens": sum(item.trainable_tokens for item in data)}
    for key, count in counts.items():
        assert expected[key] == found[key] == count, f"{key}: {expected[key]}, {found[key]}, not {count}"
    assert (expected.get("router_replayed", 0) > 0.7) == (alone.replay is not None)
    is_exact = together.model.products == torch.float32
    worst = {key: abs(found[key] - expected[key]) / max(abs(expected[key]), 1e-9)
             for key in ("loss", "grad_norm")}  # fmt: skip
    if is_filled:
        worst["gap"] = found["version_gap"]
    computed = [item for item in data if has_gradient(item, together.settings)]
    if not computed:
        assert (found["grad_norm"], found["computed_fraction"], result.tokens) == (0, 0, [])
        return worst | {"tokens": 0.0}
    differences = compare_tokens(computed, single.tokens, result.tokens)
    return worst | {"tokens": float(differences.max() if is_exact else differences.mean())}


def without_advantage(item: DBRecordData) -> DBRecordData:
    """Return ``item`` as that of a group whose scores agree."""
    return replace(item, advantage=0.0, spans=tuple(replace(span, advantage=0.0) for span in item.spans))


def compare_tokens(
    data: Sequence[DBRecordData], expected: Sequence[TokenValues], found: Sequence[TokenValues]
) -> np.ndarray:
    """Return the differences between two values of a token; every trajectory has values of each."""
    sizes, differences = {item.id: item.trainable_tokens for item in data}, []
    assert sorted(sizes) == sorted(values.record for values in found)
    for one, other in zip(expected, found, strict=True):
        assert one.record == other.record
        for values, others in ((one.log_ratio, other.log_ratio), (one.entropy, other.entropy)):
            assert len(values) == len(others) == sizes[one.record]
            differences.append(abs(values - others))
    return np.concatenate(differences)


def compare_weights(
    alone: PolicyTrainer, together: PolicyTrainer, start: dict[str, Tensor] | None = None
) -> float:
    """Return the largest difference between two weights; 0 on other ranks than 0.

    With the weights at the ``start`` of training, return the norm of all differences as a part of the norm of
    the update.
    """
    plain = {part.name: part.make() for part in alone.policy.published.parts()}
    weights = whole_weights(together)
    if dist.get_rank() != 0:
        return 0.0
    assert weights.keys() == plain.keys()
    if start is not None:
        error, update = (
            sum(float((plain[key] - others[key]).square().sum()) for key in plain)
            for others in (weights, start)
        )
        return math.sqrt(error / update)
    return max(float((weights[key] - plain[key]).abs().max()) for key in plain)


def check_copies(together: PolicyTrainer) -> None:
    """Check that a tied embedding is equal bit by bit on the two stages that hold it."""
    mesh, weight = together.model.mesh, tied_weight(together.policy.model)
    own = weight.to_local() if isinstance(weight, DTensor) else weight
    copies: list[Any] = [None] * mesh.layout.pp
    dist.all_gather_object(copies, own, group=mesh.group("pp"))
    first, last = copies[0], copies[-1]
    assert (first is None and last is None) or torch.equal(first, last)


def compare_merged(alone: Adapter, folder: Path) -> float:
    """Return the largest difference between two weights of the model that engines load."""
    published = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return max(float((part.make() - published[part.name]).abs().max()) for part in alone.merged_parts())


def main() -> int:
    """Run the layouts that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("layouts", nargs="*", choices=[*CASES, []])
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; shared by all ranks")
    parser.add_argument("--products", choices=LIMITS, default="float32", help="dtype of matrix products")
    parser.add_argument(
        "--list",
        action="store_true",
        help="print a line per number of processes, with its layouts, and leave",
    )
    arguments = parser.parse_args()
    if arguments.list:
        print_layouts(arguments.layouts or list(CASES))
        return 0
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        good = [
            is_alike(name, replace(CASES[name], products=arguments.products), arguments.folder / name)
            for name in arguments.layouts
        ]
    finally:
        leave_processes()
    return 0 if all(good) else 1


def print_layouts(names: Sequence[str]) -> None:
    """Print a line for each number of processes: the number, and the layouts that have it."""
    by_world = defaultdict(list)
    for name in names:
        by_world[CASES[name].world].append(name)
    for world, layouts in sorted(by_world.items()):
        print(world, *layouts)


def is_alike(name: str, case: Case, folder: Path) -> bool:
    """Compare the layout ``name`` and print its line; return False if a deviation is above the limit."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        worst = largest_deviations(case, folder)
    except Exception:
        print(f"{name:<20} FAILED on rank {dist.get_rank()}", flush=True)
        raise
    good = all(value <= LIMITS[case.products] for value in worst.values())
    if dist.get_rank() == 0:
        told = "  ".join(f"{key} {value:.1e}" for key, value in worst.items())
        print(f"{name:<20} {case.world} processes  {told}  {'ok' if good else 'FAILED'}", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())
