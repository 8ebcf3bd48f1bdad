"""The commands of the processes of a run: serve, sample, gateway, score, teach, train, sft and eval.

    agentrl train --run_name demo --model_name_or_path models/base --max_steps 100
    accelerate launch --config_file assets/fsdp2_dst.yml -m agentrl.train --run_name demo …
    agentrl sft --model_name_or_path BASE --train_file conversations.jsonl --output_dir OUT --max_steps 240
    torchrun --nproc_per_node 8 -m agentrl sft …
    agentrl sft --model_name_or_path BASE --sft_from_records RUN --sft_min_score 1 --output_dir OUT

SIGTERM and SIGINT let the current step finish and be saved; the same command resumes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TypeVar

from agentrl.config.agreement import require_trainable
from agentrl.config.load import Configs, leading_words, parse
from agentrl.config.schema import (
    AdapterConfig,
    AgentConfig,
    ClaimConfig,
    ContainerConfig,
    CriticConfig,
    DeviceConfig,
    EngineConfig,
    EngineListConfig,
    EvaluationConfig,
    GatewayConfig,
    GroupConfig,
    JsonFlags,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TeacherConfig,
    ToolConfig,
    TraceConfig,
    TrainConfig,
    flag,
)
from agentrl.config.training import SFTConfig
from agentrl.errors import ConfigError, did_you_mean

T = TypeVar("T")


def serve(argv: list[str]) -> int:
    """Run one engine until SIGTERM or SIGINT. Raises EngineError if the engine ends by itself."""
    configs = parse(
        argv,
        command="agentrl serve",
        needs_run=True,
        description="Runs one inference engine that follows the weights that the trainer publishes.",
        shown=[RunConfig, ModelConfig, EngineConfig, AdapterConfig],
    )
    from agentrl.inference.served_engine import serve as run_engine
    from agentrl.observe.logging import setup

    setup(configs[RunConfig], "engine")
    asyncio.run(run_engine(configs.only(RunConfig, ModelConfig, EngineConfig, AdapterConfig)))
    return 0


def sample(argv: list[str]) -> int:
    """Run a sampler until its work is done or a signal stops it."""
    configs = parse(
        argv,
        command="agentrl sample",
        needs_run=True,
        description="Claims tasks of the run, runs and scores their trajectories, finalizes groups.",
        shown=[
            RunConfig, ModelConfig, TaskConfig, SamplingConfig, AgentConfig, ToolConfig, ContainerConfig,
            ClaimConfig, GroupConfig, EngineListConfig, GatewayConfig, TraceConfig,
        ],
        validate=require_trainable,
    )  # fmt: skip
    from agentrl.rollout.setup import sample as run_sampler

    _traced(configs, "sample", lambda: run_sampler(configs))
    return 0


def gateway(argv: list[str]) -> int:
    """Serve model APIs until SIGTERM or SIGINT."""
    configs = parse(
        argv,
        command="agentrl gateway",
        needs_run=True,
        description="Serves model APIs for the trajectories of samplers that name it by --gateway_url.",
        shown=[
            RunConfig, ModelConfig, GatewayConfig, AgentConfig, SamplingConfig, EngineListConfig, TraceConfig,
        ],
    )  # fmt: skip
    from agentrl.gateway.serve import serve_gateway

    _traced(configs, "gateway", lambda: serve_gateway(configs))
    return 0


@dataclass(frozen=True, kw_only=True)
class ScoreFlags:
    """Which trajectories to score, and when to end."""

    split: str = flag("train", "the split whose trajectories are scored")
    until_empty: bool = flag(False, "end when no trajectory waits for a score (default: at a signal)")


def score(argv: list[str]) -> int:
    """Score until a signal stops it, or with ``--until_empty`` until nothing waits."""
    configs = parse(
        argv,
        command="agentrl score",
        needs_run=True,
        description="Scores trajectories that are sampled and wait for a score: their scorer failed, a judge"
        " was down, or their sampler ended.",
        shown=[RunConfig, SamplingConfig, ClaimConfig, TraceConfig],
        extra=[ScoreFlags],
    )
    from agentrl.columns.scores import score as run_scorer

    flags = configs[ScoreFlags]
    scored = _traced(
        configs, "score", lambda: run_scorer(configs, flags.split, until_empty=flags.until_empty)
    )
    print(f"{scored} trajectories scored")
    return 0


@dataclass(frozen=True, kw_only=True)
class TeachFlags:
    """When to end."""

    until_empty: bool = flag(False, "end when no trajectory waits for this teacher (default: at a signal)")
    self: bool = flag(
        False,
        "compute the policy's own logprobs at the version that sampled each token (--old_logprobs version)",
    )


def teach(argv: list[str]) -> int:
    """Fill a column until a signal stops it, or with ``--until_empty`` until nothing waits for it."""
    configs = parse(
        argv,
        command="agentrl teach",
        needs_run=True,
        description="Asks a teacher for the logprobs of sampled tokens, for groups that wait for the column"
        " teacher (--columns teacher); or computes the policy's own, with --self (--columns"
        " version_logprobs).",
        shown=[RunConfig, ModelConfig, TeacherConfig, ClaimConfig, TraceConfig],
        extra=[TeachFlags],
    )
    if configs[TeachFlags].self:
        from agentrl.columns.version_logprobs import teach_self as run_teacher
    else:
        from agentrl.columns.teacher import teach as run_teacher

    ends = configs[TeachFlags].until_empty
    filled = _traced(configs, "teach", lambda: run_teacher(configs, until_empty=ends))
    print(f"{filled} trajectories filled")
    return 0


def _traced(configs: Configs, role: str, work: Callable[[], Coroutine[object, object, T]]) -> T:
    """Run ``work`` with the log and the traces of ``role``."""
    from agentrl.observe.logging import setup
    from agentrl.observe.tracing import tracing

    setup(configs[RunConfig], role)
    with tracing(configs, role):
        return asyncio.run(work())


def train(argv: list[str]) -> int:
    """Parse ``argv`` and train; return 0 when training has ended or was asked to stop."""
    configs = parse(
        argv,
        command="agentrl train",
        needs_run=True,
        description="Train on sampled groups, publish the weights, save checkpoints; resume after a restart.",
        shown=(
            RunConfig, ModelConfig, TaskConfig, SamplingConfig, ClaimConfig, LossConfig, CriticConfig,
            OptimConfig, AdapterConfig, MemoryConfig, TrainConfig, DeviceConfig, TraceConfig,
        ),
        validate=check_training_flags,
    )  # fmt: skip
    from agentrl.observe.logging import setup
    from agentrl.weights.folder import base_folder, require_weights

    setup(configs[RunConfig], "train")
    require_weights(base_folder(configs[ModelConfig]))
    from agentrl.train.start import Part, run_trainer

    run_trainer(Part(configs=configs))
    return 0


def sft(argv: list[str]) -> int:
    """Parse ``argv``, train, and write a Hugging Face folder to ``--output_dir``."""
    configs = parse(
        argv,
        command="agentrl sft",
        description='Supervised fine-tuning on JSONL lines {"messages": […], "tools": […]}, or on Records;'
        " --objective reward trains a reward model on pairs.",
        shown=(RunConfig, ModelConfig, TaskConfig, OptimConfig, AdapterConfig, TrainConfig, MemoryConfig),
        extra=(SFTConfig,),
    )
    from agentrl.observe.logging import setup
    from agentrl.weights.folder import base_folder

    setup(configs[RunConfig], "sft")
    base_folder(configs[ModelConfig])
    if configs[SFTConfig].objective == "reward":
        from agentrl.train.reward_model import train_reward_model

        train_reward_model(configs)
        return 0
    from agentrl.train.sft import fine_tune

    fine_tune(configs)
    return 0


def check_training_flags(configs: Configs) -> None:
    """Raise ConfigError for flags with which nothing could be trained, and for those that change nothing."""
    from agentrl.base.registry import import_modules
    from agentrl.documents.training import require_choice
    from agentrl.losses.settings import check_loss
    from agentrl.observe.trackers import require_trackers

    import_modules(configs[TaskConfig].imported_modules)
    require_trainable(configs)
    check_loss(configs)
    require_trackers(configs[TrainConfig].report_to)
    require_choice(configs[TrainConfig].resume_from_checkpoint)


@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """How evaluations are listed."""

    markdown: bool = flag(False, "print a Markdown table")
    plot: str | None = flag(None, "plot the versions over optimizer steps into this .png, .svg or .pdf")


def evaluate(argv: list[str]) -> int:
    """Evaluate, or run ``agentrl eval compare A B`` or ``agentrl eval report``."""
    pages = {"compare": _compare, "report": _report}
    for word in leading_words(argv, 1):
        if word not in pages:
            raise ConfigError(f"agentrl eval has no page {word!r}", hint=did_you_mean(word, pages))
        return pages[word](argv[1:])
    configs = parse(
        ["--num_generations", "1", *argv],
        command="agentrl eval",
        needs_run=True,
        description="Samples --eval_file with one policy, --eval_samples trajectories per task (1 by"
        " default), and prints score, pass@k, intervals, turns, tokens and failures. `agentrl eval compare A"
        " B` compares two evaluations, `agentrl eval report` lists those of a run.",
        shown=[
            EvaluationConfig, RunConfig, ModelConfig, TaskConfig, SamplingConfig, AgentConfig, ToolConfig,
            ContainerConfig, EngineConfig, TraceConfig,
        ],
        extra=[JsonFlags],
    )  # fmt: skip
    if configs[TaskConfig].eval_file is None:
        raise ConfigError("there is nothing to evaluate", hint="give --eval_file FILE.jsonl")
    samples = configs[EvaluationConfig].eval_samples
    if samples is not None:
        configs = configs.with_flags({"num_generations": samples})
    from agentrl.evaluation.evaluate import evaluate
    from agentrl.observe.logging import setup
    from agentrl.observe.tracing import tracing

    quiet = logging.NOTSET if "log_level" in configs.given else logging.WARNING
    setup(configs[RunConfig], "eval", console_level=quiet)
    with tracing(configs, "eval"):
        return asyncio.run(evaluate(configs, as_json=configs[JsonFlags].json))


def _compare(argv: list[str]) -> int:
    named = leading_words(argv, 2)
    configs = parse(
        argv[len(named) :],
        command="agentrl eval compare A B",
        description="Compares two finished evaluations over the tasks that both scored. A and B are ids,"
        " parts of ids or versions; RUN/ID names an evaluation of another run.",
        shown=[RunConfig],
        extra=[JsonFlags],
    )
    if len(named) != 2:
        raise ConfigError(
            f"agentrl eval compare takes two evaluations, and {len(named)} are given",
            hint="`agentrl eval report --run_name RUN` lists them",
        )
    from agentrl.evaluation.report import compare

    asyncio.run(compare(configs, named[0], named[1], as_json=configs[JsonFlags].json))
    return 0


def _report(argv: list[str]) -> int:
    configs: Configs = parse(
        argv,
        command="agentrl eval report",
        needs_run=True,
        description="Lists the evaluations of a run, oldest first.",
        shown=[RunConfig],
        extra=[JsonFlags, ReportFlags],
    )
    from agentrl.evaluation.report import report

    flags = configs[ReportFlags]
    asyncio.run(report(configs, as_json=configs[JsonFlags].json, as_markdown=flags.markdown, plot=flags.plot))
    return 0
