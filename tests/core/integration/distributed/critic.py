"""Train a critic in several layouts, and compare it with the same critic in one process; for torchrun.

    torchrun --nproc_per_node 2 tests/core/integration/distributed/critic.py fsdp2 tp2 cp2 --folder DIR

A head and a model of its own, the first of two steps being its warm-up. Then both are resumed in another
layout for a third one. Rank 0 prints a line per layout: the largest relative deviation of a metric, and the
largest of a weight of the critic.
"""

from __future__ import annotations

import argparse
import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import (
    CASES,
    LIMIT,
    OPTIM,
    PLAIN,
    Case,
    build_parallel,
    build_trainer,
    compare_weights,
    resume,
)
from steps import step_data
from tiny_models import AGES, tiny_model

from agentrl.config.schema import CriticConfig
from agentrl.distributed.mesh import leave_processes
from agentrl.distributed.parallel_model import ParallelModel, parallelize
from agentrl.model.value_head import build_head
from agentrl.train.critic import Critic, critic_module
from agentrl.train.optimizer import (
    build_optimizer,
    build_scheduler,
    keep_hyperparameters,
    load_optimizer,
)
from agentrl.train.step import PolicyTrainer
from agentrl.weights.snapshot import gather

NAMES = ("loss", "grad_norm", "value_loss", "critic_grad_norm", "explained_variance", "value_mean")
TRUNK: Any = {"vocab_size": 64, "num_hidden_layers": 2}
RATE = replace(OPTIM, learning_rate=1e-2)


def with_critic(trainer: PolicyTrainer, kind: str, model: str) -> PolicyTrainer:
    """Return ``trainer`` with a new critic, split as its policy is; it warms up for a step."""
    trunk, mesh = None, trainer.model.mesh
    if kind == "model":
        own = tiny_model(model, seed=1, **TRUNK)
        own.get_output_embeddings().requires_grad_(requires_grad=False)
        trunk = ParallelModel(own) if mesh.layout.world == 1 else parallelize(own, mesh, max_tokens=1 << 20)
    head = build_head("linear", 32, torch.device("cpu"), 0)
    optimizer = build_optimizer(critic_module(head, trunk), RATE, PLAIN)
    critic = Critic(
        config=CriticConfig(critic="model" if trunk else "head", critic_warmup_steps=1, gae_lambda=0.9),
        head=head, trunk=trunk, optimizer=optimizer, scheduler=build_scheduler(optimizer, RATE, None),
        whitens=True, max_grad_norm=OPTIM.max_grad_norm,
    )  # fmt: skip
    return replace(trainer, critic=critic)


def critic_weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """Return whole weights of the critic; every rank that shares it calls it."""
    assert trainer.critic is not None
    return {name: gather(value) for name, value in trainer.critic.trained_weights().items()}


def compare(alone: PolicyTrainer, together: PolicyTrainer, step: int) -> tuple[float, float]:
    """Train one step, and return the deviations of its metrics and of the critic; 0 on other ranks than 0."""
    data = [replace(item, advantage=float(len(item.id) % 2)) for item in step_data(step)]
    found, weights = together.train(data, AGES).metrics, critic_weights(together)
    if dist.get_rank() != 0:
        return 0.0, 0.0
    expected, own = alone.train(data, AGES).metrics, critic_weights(alone)
    assert found.keys() == expected.keys()
    metrics = max(
        abs(found[name] - expected[name]) / max(abs(expected[name]), 1e-3) for name in NAMES if name in found
    )
    return metrics, max(float((weights[name] - own[name]).abs().max()) for name in own)


def deviations(case: Case, kind: str, folder: Path) -> tuple[float, float]:
    """Return the largest deviations of two steps, and of a third after a resume in another layout."""
    model = tiny_model(case.model, tied=case.tied, vocab_size=64)
    alone = with_critic(build_trainer(ParallelModel(copy.deepcopy(model)), case), kind, case.model)
    together = with_critic(build_parallel(model, case), kind, case.model)
    found = [compare(alone, together, step) for step in (0, 2)]
    start = compare_weights(alone, together)
    folder.mkdir(parents=True, exist_ok=True)
    resumed = with_critic(resume(together, case, folder), kind, case.model)
    assert resumed.critic is not None
    assert together.critic is not None
    with keep_hyperparameters(resumed.critic.optimizer, resumed.critic.scheduler):
        load_optimizer(folder / "critic", resumed.critic.module, resumed.critic.optimizer)
        resumed.critic.scheduler.load_state_dict(together.critic.scheduler.state_dict())
    found.append(compare(alone, resumed, 3))
    return max(start, *(each[0] for each in found)), max(each[1] for each in found)


def main() -> int:
    """Run the layouts that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("layouts", nargs="+", choices=CASES)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    good = True
    try:
        for name in arguments.layouts:
            for kind in ("head", "model"):
                worst = deviations(CASES[name], kind, arguments.folder / name / kind)
                good &= max(worst) <= 10 * LIMIT
                if dist.get_rank() == 0:
                    told = f"metrics {worst[0]:.1e}  critic {worst[1]:.1e}"
                    print(f"{name}_{kind}  {told}  {'ok' if good else 'FAILED'}", flush=True)
    finally:
        leave_processes()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
