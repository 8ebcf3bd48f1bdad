"""``agentrl eval`` evaluates a policy on a task file, and compares and lists evaluations."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from agentrl.config.load import Configs, leading_words, parse
from agentrl.config.schema import (
    AgentConfig,
    ContainerConfig,
    EngineConfig,
    EvaluationConfig,
    JsonFlags,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    ToolConfig,
    TraceConfig,
    flag,
)
from agentrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """How evaluations are listed."""

    markdown: bool = flag(False, "print a Markdown table")
    plot: str | None = flag(None, "plot the versions over optimizer steps into this .png, .svg or .pdf")


def main(argv: list[str]) -> int:
    """Evaluate, or run ``agentrl eval compare A B`` or ``agentrl eval report``."""
    if argv[:1] == ["compare"]:
        return _compare(argv[1:])
    if argv[:1] == ["report"]:
        return _report(argv[1:])
    configs = parse(
        ["--num_generations", "1", *argv],
        command="agentrl eval",
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
            hint="`agentrl eval report` lists them",
        )
    from agentrl.evaluation.report import compare

    asyncio.run(compare(configs, named[0], named[1], as_json=configs[JsonFlags].json))
    return 0


def _report(argv: list[str]) -> int:
    configs: Configs = parse(
        argv,
        command="agentrl eval report",
        description="Lists the evaluations of a run, oldest first.",
        shown=[RunConfig],
        extra=[JsonFlags, ReportFlags],
    )
    from agentrl.evaluation.report import report

    flags = configs[ReportFlags]
    asyncio.run(report(configs, as_json=configs[JsonFlags].json, as_markdown=flags.markdown, plot=flags.plot))
    return 0
