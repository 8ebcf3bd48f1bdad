"""``agentrl train``: train on sampled groups and publish the weights; resumes by itself.

    agentrl train --run_name demo --model_name_or_path models/base --max_steps 100
    accelerate launch --config_file assets/fsdp2_dst.yml -m agentrl.train --run_name demo …

SIGTERM and SIGINT let the current step finish and be saved; the same command resumes.
"""

from __future__ import annotations

from agentrl.config.load import Configs, parse
from agentrl.config.schema import (
    AdapterConfig,
    ClaimConfig,
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
from agentrl.config.validate import require_trainable


def main(argv: list[str]) -> int:
    """Parse ``argv`` and train; return 0 when training has ended or was asked to stop."""
    configs = parse(
        argv,
        command="agentrl train",
        description="Train on sampled groups, publish the weights, save checkpoints; resume after a restart.",
        shown=(
            RunConfig, ModelConfig, TaskConfig, SamplingConfig, ClaimConfig, LossConfig, OptimConfig,
            AdapterConfig, MemoryConfig, TrainConfig, TraceConfig,
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


def _check_flags(configs: Configs) -> None:
    """Raise ConfigError for flags with which nothing could be trained."""
    from agentrl.losses.settings import check_loss

    require_trainable(configs)
    check_loss(configs)
