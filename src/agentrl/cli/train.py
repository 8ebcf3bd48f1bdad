"""``agentrl train`` trains on sampled groups, ``agentrl sft`` on conversations or Records.

    agentrl train --run_name demo --model_name_or_path models/base --max_steps 100
    accelerate launch --config_file assets/fsdp2_dst.yml -m agentrl.train --run_name demo …
    agentrl sft --model_name_or_path BASE --train_file conversations.jsonl --output_dir OUT --max_steps 240
    torchrun --nproc_per_node 8 -m agentrl sft …
    agentrl sft --model_name_or_path BASE --sft_from_records RUN --sft_min_score 1 --output_dir OUT

SIGTERM and SIGINT let the current step finish and be saved; the same command resumes.
"""

from __future__ import annotations

from agentrl.config.agreement import require_trainable
from agentrl.config.load import Configs, parse
from agentrl.config.schema import (
    AdapterConfig,
    ClaimConfig,
    DeviceConfig,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TraceConfig,
    TrainConfig,
)
from agentrl.config.training import SFTConfig


def train(argv: list[str]) -> int:
    """Parse ``argv`` and train; return 0 when training has ended or was asked to stop."""
    configs = parse(
        argv,
        command="agentrl train",
        description="Train on sampled groups, publish the weights, save checkpoints; resume after a restart.",
        shown=(
            RunConfig, ModelConfig, TaskConfig, SamplingConfig, ClaimConfig, LossConfig, OptimConfig,
            AdapterConfig, MemoryConfig, TrainConfig, DeviceConfig, TraceConfig,
        ),
        validate=_check_flags,
    )  # fmt: skip
    from agentrl.observe.logging import setup
    from agentrl.weights.folder import base_folder

    setup(configs[RunConfig], "train")
    base_folder(configs[ModelConfig])
    from agentrl.train.start import run_trainer

    run_trainer(configs)
    return 0


def sft(argv: list[str]) -> int:
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


def _check_flags(configs: Configs) -> None:
    """Raise ConfigError for flags with which nothing could be trained, and for those that change nothing."""
    from agentrl.base.registry import import_modules
    from agentrl.losses.settings import check_loss

    import_modules(configs[TaskConfig].imported_modules)
    require_trainable(configs)
    check_loss(configs)
