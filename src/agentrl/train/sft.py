"""``agentrl sft``: supervised fine-tuning on conversations, through the same step as training.

    agentrl sft --model_name_or_path BASE --train_file conversations.jsonl --output_dir OUT \\
        --max_steps 240 --batch_size 64 --learning_rate 2e-3
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agentrl.config.load import Configs, parse
from agentrl.config.schema import (
    AdapterConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TaskConfig,
    TrainConfig,
    flag,
)
from agentrl.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from agentrl.batching.forest import TokenForest
    from agentrl.train.compute import StepComputer
    from agentrl.train.conversations import Conversation

logger = logging.getLogger(__name__)

CPU_MICRO_BATCH_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Supervised fine-tuning."""

    batch_size: int = flag(64, "conversations that one optimizer step trains")
    log_steps: int = flag(20, "a line of progress every so many steps")

    def __post_init__(self) -> None:
        for name in ("batch_size", "log_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} is {getattr(self, name)}", cure=f"give --{name} 1 or more")


def main(argv: list[str]) -> int:
    """Parse ``argv``, train, and write a Hugging Face folder to ``--output_dir``."""
    configs = parse(
        argv,
        command="agentrl sft",
        description='Supervised fine-tuning on a JSONL file of {"messages": […], "tools": […]}.',
        shown=(RunConfig, ModelConfig, TaskConfig, OptimConfig, AdapterConfig, TrainConfig),
        extra=(SFTConfig,),
    )
    from agentrl.observe.logging import setup
    from agentrl.train.model import base_folder

    setup(configs[RunConfig], "sft")
    base_folder(configs[ModelConfig])
    if configs[TaskConfig].train_file is None:
        raise ConfigError("no conversations are given", cure="give --train_file FILE.jsonl")
    if configs[RunConfig].output_dir is None:
        raise ConfigError("no folder for the trained model is given", cure="give --output_dir FOLDER")
    _fine_tune(configs)
    return 0


def _fine_tune(configs: Configs) -> None:
    from agentrl.train.build import Recipe, build_computer
    from agentrl.train.conversations import read_conversations
    from agentrl.train.model import base_folder, load_tokenizer

    settings, model, train = configs[SFTConfig], configs[ModelConfig], configs[TrainConfig]
    output, started = Path(configs[RunConfig].output), time.perf_counter()
    tokenizer, _ = load_tokenizer(model, base_folder(model))
    conversations = read_conversations(Path(str(configs[TaskConfig].train_file)), tokenizer)
    steps = train.max_steps
    if steps <= 0:
        steps = -(-len(conversations) * configs[TaskConfig].num_train_epochs // settings.batch_size)
    recipe = Recipe(
        model=model,
        loss=dataclasses.replace(configs[LossConfig], loss_calculater="CrossEntropy"),
        optim=configs[OptimConfig],
        adapter=configs[AdapterConfig],
        train=train,
        seed=configs[RunConfig].seed,
    )
    computer = build_computer(recipe, weights=None, total_steps=steps)
    logger.info("%d conversations, %d steps of %d", len(conversations), steps, settings.batch_size)
    budget = _token_budget(conversations, train.max_tokens, computer.accelerator.device.type)
    batches = _batches(len(conversations), settings.batch_size, configs[RunConfig].seed)
    for step, chosen in zip(range(1, steps + 1), batches, strict=False):
        forests = _forests([conversations[index] for index in chosen], budget)
        result = computer.train_forests(forests, version=0)
        if not result.is_finite:
            raise TrainingError(f"the loss of step {step} is not finite", cure="lower --learning_rate")
        if step % settings.log_steps == 0 or step in (1, steps):
            logger.info(
                "step %d/%d  loss %.4f  grad %.3f  lr %.2e  %.0f s",
                step, steps, result.metrics["loss"], result.metrics["grad_norm"], result.metrics["lr"],
                time.perf_counter() - started,
            )  # fmt: skip
    _save(computer, output)
    logger.info("saved %s", output)


def _token_budget(conversations: Sequence[Conversation], max_tokens: int, device: str) -> int:
    """Tokens per micro-batch: on a CPU few, so that activations stay in its cache."""
    if device != "cpu":
        return max_tokens
    longest = max(len(item.input_ids) for item in conversations)
    return min(max_tokens, max(longest, CPU_MICRO_BATCH_TOKENS))


def _batches(count: int, size: int, seed: int) -> Iterator[Sequence[int]]:
    """Endless batches of indices; every index once an epoch, in an order that ``seed`` decides."""
    generator = np.random.default_rng(seed)
    left = np.empty(0, np.int64)
    while True:
        while len(left) < size:
            left = np.concatenate([left, generator.permutation(count)])
        yield left[:size].tolist()
        left = left[size:]


def _forests(conversations: Sequence[Conversation], max_tokens: int) -> list[TokenForest]:
    from agentrl.batching.forest import forest_from_sequences
    from agentrl.batching.planner import pack

    groups = pack([len(item.input_ids) for item in conversations], max_tokens)
    return [
        forest_from_sequences(
            [conversations[i].input_ids for i in group], [conversations[i].is_trainable for i in group]
        )
        for group in groups
    ]


def _save(computer: StepComputer, output: Path) -> None:
    from agentrl.weights.folder import atomic_folder, save_model_files, weight_bytes

    policy = computer.policy
    with atomic_folder(output, weight_bytes(policy.published)) as temporary:
        save_model_files(policy.published, policy.base, temporary, policy.chat_template)
