"""Compare off-policy corrections: train a tiny policy on stale data and plot its reward.

    OMP_NUM_THREADS=1 python scripts/bench/off_policy.py [--quick] [--steps N] [--seeds N] [--processes N]
    OMP_NUM_THREADS=1 python scripts/bench/off_policy.py --fp8

A two-layer model with random weights learns to continue counting from a digit, modulo six. Every step samples
8 prompts × 8 trajectories from the weights of `staleness` optimizer steps ago. It trains them once with the
step of the trainer (PolicyTrainer.train: packing, loss, corrections, AdamW). The reward is the share of
correct tokens, measured on fresh samples of the newest weights. The same seed gives the same numbers on the
same machine. Prints a Markdown table and writes the plot. With ``--fp8`` the weights that sample are rounded
as engines round them, and there is no plot.
"""

from __future__ import annotations

import copy
import multiprocessing
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from harness import bench_parser
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.config.schema import OptimConfig
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.documents.model_call import pack_floats, pack_ids
from agentrl.documents.training import DBRecordData, Node, TrainableSpan
from agentrl.local.engine.linears import round_to_fp8
from agentrl.losses.settings import LossSettings
from agentrl.model.load import Policy
from agentrl.model.logprobs import ForwardOptions
from agentrl.scoring.groups import estimate
from agentrl.train.optimizer import build_optimizer, build_scheduler
from agentrl.train.step import PolicyTrainer

DIGITS, ANSWER = 6, 4
START = DIGITS
"""The token before a prompt's digit."""
GROUPS, GROUP_SIZE, HELD_OUT = 8, 8, 128
EVALUATED_EVERY = 5
LEARNING_RATE = 1.5e-3

STALENESS = (0, 1, 4)
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "none": {"old_logprobs": "recompute"},
    "tis": {"old_logprobs": "recompute", "importance_correction": "tis"},
    "icepop": {"old_logprobs": "recompute", "importance_correction": "icepop"},
    "seq_mask": {"old_logprobs": "recompute", "importance_correction": "seq_mask"},
    "clip": {"old_logprobs": "behavior"},
}
"""Flags of each variant. ``clip`` applies no correction; it clips the ratio to the sampling policy."""

COLORS = {"none": "#777777", "tis": "#1b6ca8", "icepop": "#2a9d5c", "seq_mask": "#b35c1e", "clip": "#8e44ad"}
MEASURED = {
    "kl_k3": "KL(μ‖πθ)",
    "effective_sample_size": "effective sample size",
    "clipped_fraction": "clipped",
    "masked_fraction": "masked",
}
"""Metrics of a step and their column names. The table shows their means over all steps."""
LAST = 4
"""Number of evaluations in the final reward."""
PLOT = Path("docs/images/off_policy.png")


@dataclass(frozen=True)
class Run:
    """One training run: its rewards, every ``EVALUATED_EVERY`` steps, and the means of its metrics."""

    rewards: list[float]
    metrics: dict[str, float]


def build_model(seed: int) -> Qwen3ForCausalLM:
    """Return a two-layer model with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=DIGITS + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=16, max_position_embeddings=32,
        tie_word_embeddings=False, attn_implementation="sdpa", initializer_range=0.05,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def build_trainer(model: Qwen3ForCausalLM, variant: str, max_tokens: int = 4096) -> PolicyTrainer:
    """Return a trainer of ``model`` with the flags of ``variant``."""
    config = OptimConfig(learning_rate=LEARNING_RATE, max_grad_norm=1.0)
    optimizer = build_optimizer(model, config)
    return PolicyTrainer(
        policy=Policy(model, cast("Any", None), Path(), None),
        model=ParallelModel(model),
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, config, None),
        settings=LossSettings(loss_calculater="GRPO", **VARIANTS[variant]),
        options=ForwardOptions(),
        max_tokens=max_tokens,
        prefix_merging="group",
        max_grad_norm=config.max_grad_norm,
    )


@torch.no_grad()
def sample(model: Qwen3ForCausalLM, prompts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample answers to prompts int64[B, P]: tokens int64[B, ANSWER] and logprobs float32[B, ANSWER]."""
    model.eval()
    tokens, logprobs = prompts, []
    for _ in range(ANSWER):
        scores = torch.log_softmax(
            model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[:, -1], -1
        )
        chosen = torch.multinomial(scores.exp(), 1, generator=generator)
        logprobs.append(scores.gather(1, chosen))
        tokens = torch.cat([tokens, chosen], 1)
    return tokens[:, prompts.shape[1] :], torch.cat(logprobs, 1)


def draw_prompts(count: int, generator: torch.Generator) -> Tensor:
    """Return prompts int64[count, 2]: a start token and a digit."""
    digits = torch.randint(DIGITS, (count, 1), generator=generator)
    return torch.cat([torch.full((count, 1), START), digits], 1)


def score(prompts: Tensor, answers: Tensor) -> Tensor:
    """Return the share of correct tokens, float32[B]."""
    right = (prompts[:, -1:] + torch.arange(1, ANSWER + 1)) % DIGITS
    return (answers == right).float().mean(1)


def step_data(model: Qwen3ForCausalLM, version: int, generator: torch.Generator) -> list[DBRecordData]:
    """Sample one step's groups from ``model``, whose weights have ``version``."""
    prompts = draw_prompts(GROUPS, generator).repeat_interleave(GROUP_SIZE, 0)
    answers, logprobs = sample(model, prompts, generator)
    scores = score(prompts, answers).tolist()
    ids = torch.cat([prompts, answers], 1).tolist()
    data = []
    for first in range(0, len(ids), GROUP_SIZE):
        members = range(first, first + GROUP_SIZE)
        advantages = estimate("leave_one_out", [scores[place] for place in members])
        for place, advantage in zip(members, advantages, strict=True):
            data.append(_data(first, place, ids[place], logprobs[place], scores[place], advantage, version))
    return data


def _data(
    group: int, place: int, ids: list[int], logprobs: Tensor, score: float, advantage: float, version: int
) -> DBRecordData:
    task, name, start = f"{version}/{group}", f"{version}/{group}/{place}", len(ids) - ANSWER
    return DBRecordData(
        id=name, record=name, task=task, split="train", score=score, advantage=advantage,
        min_version=version, max_version=version, tokens=len(ids), trainable_tokens=ANSWER, turns=1,
        nodes=(Node(start=0, end=len(ids)),),
        spans=(
            TrainableSpan(
                start=start, end=len(ids), call=0, version=version, advantage=advantage, temperature=1.0
            ),
        ),
        input_ids=pack_ids(ids),
        behavior_logprobs=pack_floats(logprobs.tolist()),
    )  # fmt: skip


def train(variant: str, staleness: int, seed: int, steps: int, fp8: bool) -> Run:
    """Train for ``steps`` on data that are ``staleness`` optimizer steps old (less in the first steps)."""
    model = build_model(seed)
    trainer = build_trainer(model, variant)
    sampler = copy.deepcopy(model)
    generator, held_out = (torch.Generator().manual_seed(2 * seed + offset) for offset in (0, 1))
    history: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=staleness + 1)
    rewards, found = [], []
    for step in range(steps):
        history.append((step, copy.deepcopy(model.state_dict())))
        version, weights = history[0]
        sampler.load_state_dict(weights)
        if fp8:
            round_to_fp8(sampler)
        result = trainer.train(step_data(sampler, version, generator), {version: step - version})
        if not result.is_finite:
            raise FloatingPointError(
                f"{variant}, staleness {staleness}, seed {seed}: step {step} is not finite"
            )
        found.append(result.metrics)
        if (step + 1) % EVALUATED_EVERY == 0:
            prompts = draw_prompts(HELD_OUT, held_out)
            sampler.load_state_dict(model.state_dict())
            rewards.append(float(score(prompts, sample(sampler, prompts, held_out)[0]).mean()))
    return Run(rewards, {name: fmean(metrics[name] for metrics in found) for name in MEASURED})


def _train_one(arguments: tuple[str, int, int, int, bool]) -> Run:
    torch.set_num_threads(1)
    return train(*arguments)


def train_all(steps: int, seeds: int, processes: int, fp8: bool) -> dict[tuple[str, int], list[Run]]:
    """Train every variant at every staleness with every seed. Return the runs of all seeds by case."""
    cases = [(variant, staleness) for staleness in STALENESS for variant in VARIANTS]
    jobs = [(*case, seed, steps, fp8) for case in cases for seed in range(seeds)]
    if processes == 1:
        runs = [_train_one(job) for job in jobs]
    else:
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            runs = pool.map(_train_one, jobs, chunksize=1)
    return {case: runs[place * seeds : (place + 1) * seeds] for place, case in enumerate(cases)}


def last_reward(run: Run) -> float:
    """Return the mean reward of the last ``LAST`` evaluations."""
    return fmean(run.rewards[-LAST:])


def print_table(results: Mapping[tuple[str, int], Sequence[Run]]) -> None:
    """Print a Markdown table: one row per staleness and variant, means over the seeds."""
    measured = " | ".join(MEASURED.values())
    print(f"| staleness | correction | final reward | lowest–highest seed | {measured} |")
    print("|---" * (4 + len(MEASURED)) + "|")
    for (variant, staleness), runs in results.items():
        rewards = [last_reward(run) for run in runs]
        means = [fmean(run.metrics[name] for run in runs) for name in MEASURED]
        cells = [str(staleness), variant, f"{fmean(rewards):.2f}", f"{min(rewards):.2f}–{max(rewards):.2f}"]
        print("| " + " | ".join([*cells, *(f"{abs(mean):.3f}" for mean in means)]) + " |")


def plot(results: Mapping[tuple[str, int], Sequence[Run]], out: Path) -> None:
    """Plot the reward over the steps, one panel per staleness. Faint lines are single seeds."""
    from agentrl.observe.plotting import finish, new_figure, save_figure

    figure = new_figure(10.0, 3.6)
    panels = figure.subplots(1, len(STALENESS), sharey=True)
    for axes, staleness in zip(panels, STALENESS, strict=True):
        for variant, color in COLORS.items():
            runs = [run.rewards for run in results[variant, staleness]]
            steps = [EVALUATED_EVERY * (place + 1) for place in range(len(runs[0]))]
            for rewards in runs:
                axes.plot(steps, rewards, color=color, alpha=0.2, linewidth=0.8)
            mean = [fmean(values) for values in zip(*runs, strict=True)]
            axes.plot(steps, mean, color=color, linewidth=2.0, label=variant)
        axes.set_title(f"staleness {staleness}", loc="left", fontsize=10)
        axes.set_xlabel("optimizer step")
        axes.set_ylim(0, 1.03)
        finish(axes)
    panels[0].set_ylabel("reward of the newest weights")
    save_figure(figure, out, "--plot")


def main() -> int:
    """Train all variants, print the table and write the plot."""
    parser = bench_parser(__doc__)
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps per run (default: 80)")
    parser.add_argument("--seeds", type=int, default=3, help="runs per variant and staleness (default: 3)")
    parser.add_argument("--processes", type=int, default=1, help="concurrent runs (default: 1)")
    parser.add_argument(
        "--plot", type=Path, default=PLOT, help=f"write the plot to this file (default: {PLOT})"
    )
    parser.add_argument("--fp8", action="store_true", help="sample with weights rounded to fp8")
    arguments = parser.parse_args()
    if arguments.quick:
        train("tis", 1, 0, 2, fp8=True)
        return 0
    if arguments.steps < LAST * EVALUATED_EVERY:
        parser.error(f"--steps {arguments.steps} is too small: give at least {LAST * EVALUATED_EVERY}")
    results = train_all(arguments.steps, arguments.seeds, arguments.processes, arguments.fp8)
    print_table(results)
    if not arguments.fp8:
        plot(results, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
