"""Run ``agentrl eval``: evaluate one policy, or follow a run and evaluate its versions."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

from agentrl.config.load import Configs
from agentrl.config.schema import EvaluationConfig, ModelConfig, RunConfig, SamplingConfig
from agentrl.documents.run import Evaluation, PolicyVersion
from agentrl.documents.status import EvaluationStatus
from agentrl.errors import ModelError
from agentrl.evaluation.engines import PolicyEngines, shared_versions, wait_for_shared
from agentrl.evaluation.evaluate import EvaluationRun
from agentrl.evaluation.identity import identify, read_file
from agentrl.evaluation.policy import Policy, find_model, find_version, of_published
from agentrl.evaluation.progress import Progress, StoppedError
from agentrl.evaluation.report import render
from agentrl.observe.terminal import print_json
from agentrl.processes import STOPPED, stop_on_signals
from agentrl.rollout.setup import require_extensions
from agentrl.store.client import Store, open_store
from agentrl.store.mechanics.retry import retry_outages

logger = logging.getLogger(__name__)


async def evaluate(configs: Configs, *, as_json: bool = False) -> int:
    """Evaluate and print the results. Returns 0, or 130 if a signal stopped it."""
    stop = stop_on_signals()
    run = configs[RunConfig]
    progress = Progress(f"eval {run.run_name}", stop)
    require_extensions(configs)
    async with progress.lines():
        try:
            with retry_outages(run.db_wait_seconds, stop):
                await _evaluate(configs, progress, as_json)
        except StoppedError as stopped:
            progress.say(f"stopped while {stopped}")
            progress.say("claims are released; the same command goes on")
            return STOPPED
    return 0


async def _evaluate(configs: Configs, progress: Progress, as_json: bool) -> None:
    store = await progress.until("connecting to the database", open_store(configs[RunConfig]))
    async with store:
        engines = PolicyEngines(store, configs)
        try:
            runner = EvaluationRun(store, configs, engines, progress, logger)
            if configs[EvaluationConfig].eval_steps is not None:
                await follow(store, configs, runner, progress, lambda item: _print(item, as_json))
                return
            policy = await choose_policy(store, configs, progress)
            evaluation = await progress.until("reading the tasks", identify(store, configs, policy))
            progress.say(f"evaluating {policy} as {evaluation.id}")
            _print(await runner.evaluate(evaluation, policy), as_json)
        finally:
            await engines.close()


def _print(evaluation: Evaluation, as_json: bool) -> None:
    if as_json:
        print_json(evaluation.to_document())
    else:
        print(render(evaluation), flush=True)


async def choose_policy(store: Store, configs: Configs, progress: Progress) -> Policy:
    """Return the policy that the flags name. Raises ModelError, and EngineError in a wait for an engine."""
    flags, base = configs[EvaluationConfig], configs[ModelConfig].model_name_or_path
    if flags.eval_model is not None:
        return await progress.until(f"reading {flags.eval_model}", find_model(store, flags.eval_model, base))
    version = flags.eval_version
    if flags.eval_engine == "shared":
        what = "any version" if version is None else f"version {version}"
        version = await progress.until(
            f"waiting for an engine with {what}",
            wait_for_shared(store, configs, version, tell=progress.tell),
        )
    elif version is None and flags.eval_engine == "auto":
        version = max(await shared_versions(store, configs), default=None)
    if version is None:
        newest = await store.policy_versions.latest()
        version = 0 if newest is None else newest.id
        if newest is None and base is None:
            raise ModelError(
                f"run {store.run_name!r} has published no policy version, and no engine serves one",
                hint="give --eval_model FOLDER, or --model_name_or_path FOLDER for the model it starts from",
            )
    is_served = version in await shared_versions(store, configs)
    if is_served and await store.policy_versions.get(version) is None:
        return Policy(version=version, step=0 if version == 0 else None, folder=base)
    return await find_version(store, version, base)


_POLL_SECONDS = 2.0
_PAGE = 100


async def follow(
    store: Store,
    configs: Configs,
    runner: EvaluationRun,
    progress: Progress,
    done: Callable[[Evaluation], None],
) -> None:
    """Evaluate every due version, oldest first, until ``--idle_exit_seconds`` pass without one.

    A version that waits for its turn is stored as ``waiting``, so that its weights are not deleted. Raises
    StoppedError at a stop signal. ``done`` receives each finished evaluation.
    """
    every = configs[EvaluationConfig].eval_steps or 1
    limit = configs[SamplingConfig].idle_exit_seconds
    busy_at = time.monotonic()
    waiting: dict[str, tuple[Evaluation, Policy]] = {}
    seen: set[int] = set()
    try:
        while True:
            due = await progress.until(
                f"waiting for a version whose step is a multiple of {every}",
                _due(store, configs, every, seen, wait=not waiting),
            )
            for evaluation, policy in due:
                waiting[evaluation.id] = evaluation, policy
                await store.evaluations.begin(
                    dataclasses.replace(evaluation, status=EvaluationStatus.WAITING)
                )
            if not waiting:
                if limit is not None and time.monotonic() - busy_at >= limit:
                    progress.say(f"no version to evaluate for {limit:g} s (--idle_exit_seconds)")
                    return
                continue
            evaluation, policy = waiting.pop(next(iter(waiting)))
            runner.waiting = tuple(waiting)
            progress.say(f"evaluating {policy} as {evaluation.id}")
            done(await runner.evaluate(evaluation, policy))
            busy_at = time.monotonic()
    finally:
        await store.evaluations.stop_waiting(list(waiting))


async def _due(
    store: Store, configs: Configs, every: int, seen: set[int], *, wait: bool
) -> list[tuple[Evaluation, Policy]]:
    """Return new due versions without results, oldest first; add every version that was read to ``seen``.

    With ``wait``, waits a moment for a change if there is none.
    """
    versions = [item for item in await _published(store, seen) if item.step % every == 0]
    if not versions:
        if wait:
            await store.wait_for_change("PolicyVersion", timeout=_POLL_SECONDS)
        return []
    read = await read_file(configs, "eval")
    due = []
    for version in sorted(versions, key=lambda item: item.id):
        policy = of_published(version)
        if not policy.is_stored:
            continue
        evaluation = await identify(store, configs, policy, read)
        stored = await store.evaluations.get(evaluation.id)
        if stored is None or stored.results is None:
            due.append((evaluation, policy))
    return due


async def _published(store: Store, seen: set[int]) -> Sequence[PolicyVersion]:
    """Return the published versions that are not in ``seen``, newest first."""
    versions: list[PolicyVersion] = []
    below: int | None = None
    while page := await store.policy_versions.published(_PAGE, below=below):
        new = [item for item in page if item.id not in seen]
        versions += new
        if len(new) < len(page):
            break
        below = page[-1].id
    seen.update(item.id for item in versions)
    return versions
