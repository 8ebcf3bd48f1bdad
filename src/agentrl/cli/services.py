"""``agentrl serve``, ``sample``, ``gateway``, ``score`` and ``teach``: beside the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TypeVar

from agentrl.config.agreement import require_trainable
from agentrl.config.load import Configs, parse
from agentrl.config.schema import (
    AdapterConfig,
    AgentConfig,
    ClaimConfig,
    ContainerConfig,
    EngineConfig,
    EngineListConfig,
    GatewayConfig,
    GroupConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TeacherConfig,
    ToolConfig,
    TraceConfig,
    flag,
)

T = TypeVar("T")


def serve(argv: list[str]) -> int:
    """Run one engine until SIGTERM or SIGINT. Raises EngineError if the engine ends by itself."""
    configs = parse(
        argv,
        command="agentrl serve",
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


def teach(argv: list[str]) -> int:
    """Fill a teacher's column until a signal stops it, or with ``--until_empty`` until nothing waits."""
    configs = parse(
        argv,
        command="agentrl teach",
        description="Asks a teacher for the logprobs of sampled tokens, for groups that wait for the column"
        " teacher (--columns teacher).",
        shown=[RunConfig, ModelConfig, TeacherConfig, ClaimConfig, TraceConfig],
        extra=[TeachFlags],
    )
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
