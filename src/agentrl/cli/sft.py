"""``agentrl sft``: fine-tune a model on conversations, or on the Records of a run.

    agentrl sft --model_name_or_path BASE --train_file conversations.jsonl --output_dir OUT \\
        --max_steps 240 --batch_size 64 --learning_rate 2e-3
    torchrun --nproc_per_node 8 -m agentrl sft …
    agentrl sft --model_name_or_path BASE --sft_from_records RUN --sft_min_score 1 --output_dir OUT
"""

from __future__ import annotations

from agentrl.config.load import parse
from agentrl.config.schema import (
    AdapterConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TaskConfig,
    TrainConfig,
)
from agentrl.config.training import SFTConfig


def main(argv: list[str]) -> int:
    """Parse ``argv``, train, and write a Hugging Face folder to ``--output_dir``."""
    configs = parse(
        argv,
        command="agentrl sft",
        description='Supervised fine-tuning on JSONL lines {"messages": […], "tools": […]}, or on Records.',
        shown=(RunConfig, ModelConfig, TaskConfig, OptimConfig, AdapterConfig, TrainConfig, MemoryConfig),
        extra=(SFTConfig,),
    )
    from agentrl.observe.logging import setup
    from agentrl.weights.folder import base_folder

    setup(configs[RunConfig], "sft")
    base_folder(configs[ModelConfig])
    from agentrl.train.sft import fine_tune

    fine_tune(configs)
    return 0
