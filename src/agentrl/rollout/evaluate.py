"""``agentrl eval``: samples an evaluation file at one policy version and reports the scores."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentrl.config.load import Configs, parse
from agentrl.config.sampling import RIGHT_THRESHOLD
from agentrl.config.schema import (
    AgentConfig,
    ClaimConfig,
    EngineConfig,
    GroupConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    flag,
)
from agentrl.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from agentrl.rollout.report import EvaluatedTask
    from agentrl.store.client import Store

_POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What is evaluated."""

    eval_version: int | None = flag(None, "policy version to evaluate (default: the newest that is served)")
    eval_label: str = flag("", "names a repetition: the same file and version are sampled anew under it")


def main(argv: list[str]) -> int:
    """Sample the file once per task, or ``--num_generations`` times, and print the table.

    Trajectories that are already scored under the same version and label are not sampled again.
    """
    configs = parse(
        ["--num_generations", "1", *argv],
        command="agentrl eval",
        description="Samples --eval_file at one policy version, a trajectory a task unless --num_generations"
        " says more, and prints mean score, pass rate, pass@k and failures.",
        shown=[RunConfig, ModelConfig, TaskConfig, SamplingConfig, AgentConfig],
        extra=[EvalConfig],
    )
    if configs[TaskConfig].eval_file is None:
        raise ConfigError("there is nothing to evaluate", hint="give --eval_file FILE.jsonl")
    from agentrl.observe.logging import setup

    setup(configs[RunConfig], "eval")
    return asyncio.run(_evaluate(configs))


def split_name(version: int, label: str) -> str:
    """The split that holds one evaluation: ``eval-v000007``, or ``eval-v000007-LABEL``."""
    return f"eval-v{version:06d}" + (f"-{label}" if label else "")


async def _evaluate(configs: Configs) -> int:
    from agentrl.rollout.setup import stop_on_signals
    from agentrl.store.retry import retry_outages

    stop = stop_on_signals()
    with retry_outages(configs[RunConfig].db_wait_seconds, stop):
        return await _evaluate_until(stop, configs)


async def _evaluate_until(stop: asyncio.Event, configs: Configs) -> int:
    from rich.console import Console

    from agentrl.rollout.finalizer import GroupFinalizer
    from agentrl.rollout.probe import probe
    from agentrl.rollout.report import failure_lines, report_table
    from agentrl.rollout.sampler import EpochPlan, Sampler, SamplerConfig
    from agentrl.rollout.setup import load_tasks, open_worker, owner_name, require_extensions
    from agentrl.store.client import open_store

    run, tasks, sampling = configs[RunConfig], configs[TaskConfig], configs[SamplingConfig]
    require_extensions(configs)
    async with await open_store(run) as store:
        version = await served_version(store, configs)
        split = split_name(version, configs[EvalConfig].eval_label)
        await load_tasks(
            store, run, tasks, str(tasks.eval_file), split=split, num_generations=tasks.num_generations
        )
        rules = await evaluation_rules(store, configs)
        plan = EpochPlan(
            epochs=1, seed=run.seed, num_generations=tasks.num_generations, shuffle=tasks.shuffle_tasks
        )
        async with open_worker(store, configs, version=version, stop=stop) as (worker, _):
            await probe(store, worker.tools, sampling, split)
            sampler = Sampler(
                store,
                worker,
                GroupFinalizer(store, rules, split=split, seed=run.seed),
                SamplerConfig(
                    split=split,
                    owner=owner_name(),
                    concurrency=sampling.max_concurrent_samples_per_process * sampling.target_concurrency,
                    claims=configs[ClaimConfig],
                    plan=plan,
                ),
                _no_limit,
            )
            await sampler.run(stop)
        evaluated = await collect(store, split, configs[AgentConfig].agent_name, rules.right_threshold)
    console = Console()
    console.print(report_table(f"{run.run_name}: {tasks.eval_file} at policy version {version}", evaluated))
    for line in failure_lines(evaluated):
        console.print(f"failed attempts  {line}")
    return 130 if stop.is_set() else 0


async def evaluation_rules(store: Store, configs: Configs) -> GroupConfig:
    """Return the group flags, with the run's ``right_threshold`` where none is given."""
    rules = configs[GroupConfig]
    settings = {item.id: item.values for item in await store.settings.all()}
    threshold = settings.get("groups", {}).get("right_threshold")
    if threshold is None or "right_threshold" in configs.given:
        return rules
    return replace(rules, right_threshold=float(threshold))


async def collect(
    store: Store, split: str, default_agent: str, right_threshold: float = RIGHT_THRESHOLD
) -> list[EvaluatedTask]:
    """Return the scores of every task of a split, in order; scores above ``right_threshold`` pass."""
    from agentrl.rollout.report import EvaluatedTask

    evaluated = []
    for task in await store.tasks.find(split):
        records = await store.records.by_task(task.id)
        scored = [record for record in records if record.score is not None]
        kinds = [record.failure.kind for record in records if record.failure is not None]
        evaluated.append(
            EvaluatedTask(
                scorer=task.scorer,
                agent=task.agent_name or default_agent,
                scores=tuple(record.score for record in scored if record.score is not None),
                failed=len(task.slots) - len(scored),
                failures=tuple(kinds),
                turns=tuple(record.turns for record in scored),
                right_threshold=right_threshold,
            )
        )
    return evaluated


async def served_version(store: Store, configs: Configs) -> int:
    """``--eval_version`` or the newest served one, once a live engine serves it; EngineError otherwise."""
    from agentrl.rollout.setup import live_engines

    wanted = configs[EvalConfig].eval_version
    limit = configs[SamplingConfig].engine_wait_seconds
    try:
        async with asyncio.timeout(limit):
            while True:
                services = await live_engines(store, configs[EngineConfig])
                served = {item.policy_version for item in services if item.policy_version is not None}
                if wanted in served or (wanted is None and served):
                    return max(served) if wanted is None else wanted
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError as error:
        what = "any policy version" if wanted is None else f"policy version {wanted}"
        raise EngineError(
            f"no live engine serves {what} after {limit:g} s",
            hint="start one: agentrl serve --run_name … --model_name_or_path …",
        ) from error


async def _no_limit() -> None:
    """An evaluation may begin any number of groups."""
    return
