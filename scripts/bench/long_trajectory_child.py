"""Train a long trajectory for a step as one process of ``long_trajectory.py``; rank 0 prints a JSON line.

Knows the trajectory, its model, and what ``agentrl plan`` computes for the step.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from train_workload import SHAPES
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentrl.config.load import Configs, parse
from agentrl.config.schema import TrainConfig
from agentrl.distributed.mesh import World, launched_world, plan_layout
from agentrl.documents.model_call import pack_floats, pack_ids
from agentrl.documents.training import DBRecordData, Node, TrainableSpan
from agentrl.local.plan.memory import ModelNumbers, StepSpec, measure_step, open_model
from agentrl.model.flops import Precision
from agentrl.model.logprobs import DEFAULT_CHUNK
from agentrl.train.build import build_trainer
from agentrl.weights.snapshot import gather

WAYS = {"chain": "trajectory", "merged": "trajectory", "calls": "off"}
"""``--prefix_merging`` of each way."""
SHAPE = SHAPES["tiny"]


def save_model(folder: Path, tokens: int) -> None:
    """Write the tiny model, for contexts of ``tokens``, and a tokenizer of its ids."""
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    others = {"max_position_embeddings": tokens, "tie_word_embeddings": True}
    Qwen3ForCausalLM(Qwen3Config(**(SHAPE | others))).save_pretrained(folder)
    words = {f"w{index}": index for index in range(SHAPE["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    files = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1")
    files.chat_template = "{{ messages }}"
    files.save_pretrained(folder)


def trajectory(way: str, tokens: int, turns: int) -> DBRecordData:
    """Return a trajectory whose longest path has ``tokens`` tokens, as a finalized group stores it.

    A quarter of each call's new tokens is generated, the rest is context.
    """
    rng = np.random.default_rng(0)
    eighth = tokens // 8
    if way == "chain":
        ends = [tokens * (turn + 1) // turns for turn in range(turns)]
        nodes: tuple[Node, ...] = (Node(start=0, end=tokens),)
    else:
        ends = [eighth, tokens, tokens + eighth]
        bounds = zip((0, eighth, tokens), ends, (-1, 0, 0), strict=True)
        nodes = tuple(Node(start=start, end=end, parent=parent) for start, end, parent in bounds)
    spans = tuple(
        TrainableSpan(
            start=end - (end - start) // 4, end=end, call=call, version=0,
            advantage=1.0 if call % 2 else 0.5, temperature=1.0,
        )
        for call, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    )  # fmt: skip
    trainable = sum(span.end - span.start for span in spans)
    logprobs = rng.normal(-np.log(SHAPE["vocab_size"]), 0.1, trainable)
    return DBRecordData(
        id="long/0", record="long/0", task="long", split="train", score=1.0, advantage=1.0, min_version=0,
        max_version=0, tokens=ends[-1], trainable_tokens=trainable, turns=len(spans), nodes=nodes,
        spans=spans,
        input_ids=pack_ids(rng.integers(2, SHAPE["vocab_size"], ends[-1]).tolist()),
        behavior_logprobs=pack_floats(logprobs.tolist()),
    )  # fmt: skip


def flags(folder: Path, way: str, wanted: dict[str, Any]) -> Configs:
    """Return the flags of ``agentrl train`` for one step."""
    words = {
        "model_name_or_path": folder / "model", "run_name": "long", "prefix_merging": WAYS[way],
        # The merged tree in one micro-batch: its branch is an eighth longer than the path.
        "max_tokens": wanted["tokens"] * 9 // 8, "cp_size": wanted["processes"], "autocast_bf16": "false",
        "learning_rate": 1e-3, "optim_args": "eps=1e-6", "max_steps": 1,
    }  # fmt: skip
    given = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return parse(given, command="agentrl train", description="", shown=())


def planned_bytes(folder: Path, found: dict[str, Any]) -> int:
    """Return what ``agentrl plan`` computes for the largest micro-batch of a step."""
    model, processes = open_model(folder, 1), found["processes"]
    spec = StepSpec(
        config=model.config, precision=Precision(), max_tokens=found["largest"],
        trained_tokens=min(DEFAULT_CHUNK, found["largest"]), micro_batches=int(found["micro_batches"]),
        fused_norms=False,
    )  # fmt: skip
    layout = plan_layout(TrainConfig(cp_size=processes), processes)
    return measure_step(ModelNumbers.of(model.module), spec, layout).peak


def main() -> None:
    """Train the steps that the first argument describes."""
    wanted = json.loads(sys.argv[1])
    with launched_world(Path(wanted["folder"]) / "model") as world:
        found = [train(world, way, wanted) for way in wanted["ways"]]
        if world.rank == 0:
            print(json.dumps(found))


def train(world: World, way: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """Train a step as one rank, and write the weights before and after it."""
    folder = Path(wanted["folder"])
    trainer = build_trainer(flags(folder, way, wanted), weights=None, total_steps=1, world=world)
    data = [trajectory(way, wanted["tokens"], wanted["turns"])]
    forests = trainer.pack(data)
    start = _weights(trainer)
    before, began, cpu = _resident(), time.perf_counter(), time.process_time()
    metrics = trainer.train(data).metrics
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    own = (_peak(), _peak() - before, cpu)
    ranks = [own] * world.size
    if world.size > 1:
        dist.all_gather_object(ranks, own)
    files = [folder / f"{way}-{world.size}-{name}.pt" for name in ("start", "end")]
    for file, content in zip(files, (start, _weights(trainer)), strict=True):
        if world.rank == 0:
            torch.save(content, file)
    return {
        "way": way, "processes": world.size, "seconds": seconds,
        **{key: metrics[key] for key in ("loss", "grad_norm", "micro_batches", "trainable_tokens")},
        "computed": sum(forest.tokens for forest in forests),
        "largest": max(forest.tokens for forest in forests),
        "peak_bytes": [peak for peak, _, _ in ranks], "grown_bytes": [grown for _, grown, _ in ranks],
        "cpu_seconds": [each for _, _, each in ranks], "start": str(files[0]), "weights": str(files[1]),
    }  # fmt: skip


def _weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the whole float32 weights; every rank calls it."""
    return {name: gather(value.detach()).clone() for name, value in trainer.policy.model.named_parameters()}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
