"""``agentrl eval`` evaluates a policy on a task file; ``agentrl try`` runs one trajectory, keeps nothing."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from agentrl.config.load import Configs, leading_words, parse
from agentrl.config.schema import (
    AgentConfig,
    ContainerConfig,
    EngineConfig,
    EngineListConfig,
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


@dataclass(frozen=True, kw_only=True)
class TryConfig:
    """Which task to try, and on which engine."""

    line: int | None = flag(None, "line of the task in the file (default: its first task)")
    prompt: bool = flag(False, "print the first prompt as the model reads it, and call no engine")
    oracle: bool = flag(
        False, "run the tests of Harbor tasks untouched and after their own solutions, and call no engine"
    )


def try_task(argv: list[str]) -> int:
    """Run one trajectory of a task: JSON, a task's id in the run, or a task file. Return 1 if it fails."""
    wanted = leading_words(argv, 1)
    configs = parse(
        argv[len(wanted) :],
        command="agentrl try TASK",
        description="Runs one trajectory of TASK and prints it; nothing is kept. TASK is a JSON object, the"
        " id of a task of the run, or a task file or folder. The trial has a database of its own on the"
        " server of the run, which is dropped at the end.",
        shown=[
            RunConfig,
            ModelConfig,
            SamplingConfig,
            AgentConfig,
            ToolConfig,
            ContainerConfig,
            EngineListConfig,
            TraceConfig,
        ],
        extra=[TryConfig],
    )
    if not wanted:
        raise ConfigError(
            "agentrl try takes a task",
            hint='give its JSON, e.g. \'{"query": "1+1?", "answer": "2", "scorer": "exact"}\'; or a'
            " task's id, or a task file",
        )
    from agentrl.local.try_task import run_solutions
    from agentrl.local.try_task import try_task as run_task
    from agentrl.observe.tracing import tracing

    flags = configs[TryConfig]
    if flags.oracle:
        return asyncio.run(run_solutions(configs, wanted[0], line=flags.line))
    with tracing(configs, "try"):
        url = configs[EngineConfig].engine_url
        return asyncio.run(run_task(configs, wanted[0], line=flags.line, engine_url=url, prompt=flags.prompt))
