"""``agentrl eval``: sample an evaluation file at one policy version and report the scores."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from agentrl.config.load import parse
from agentrl.config.schema import (
    AgentConfig,
    EngineListConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    ToolConfig,
    flag,
)
from agentrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What to evaluate."""

    eval_version: int | None = flag(None, "policy version to evaluate (default: the newest that is served)")
    eval_label: str = flag("", "label of a repetition: samples the same file and version again")


def main(argv: list[str]) -> int:
    """Sample each task of the file once, or ``--num_generations`` times, and print a table of scores.

    Trajectories that have a score under the same version and label are not sampled again.
    """
    configs = parse(
        ["--num_generations", "1", *argv],
        command="agentrl eval",
        description="Samples --eval_file at one policy version, --num_generations trajectories per task (1 by"
        " default), and prints mean score, pass rate, pass@k and failures.",
        shown=[RunConfig, ModelConfig, TaskConfig, SamplingConfig, AgentConfig, ToolConfig, EngineListConfig],
        extra=[EvalConfig],
    )
    if configs[TaskConfig].eval_file is None:
        raise ConfigError("there is nothing to evaluate", hint="give --eval_file FILE.jsonl")
    from agentrl.observe.logging import setup
    from agentrl.rollout.evaluate import evaluate

    setup(configs[RunConfig], "eval")
    flags = configs[EvalConfig]
    return asyncio.run(evaluate(configs, version=flags.eval_version, label=flags.eval_label))
