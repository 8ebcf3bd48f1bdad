"""Follow a run while it trains: evaluate each published version whose step is a multiple of a number."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from agentrl.config.load import Configs
from agentrl.config.schema import EvaluationConfig, SamplingConfig
from agentrl.documents.run import Evaluation, PolicyVersion
from agentrl.documents.status import EvaluationStatus
from agentrl.evaluation.identity import identify, read_file
from agentrl.evaluation.policy import Policy, of_published
from agentrl.evaluation.progress import Progress
from agentrl.evaluation.run import EvaluationRun

if TYPE_CHECKING:
    from agentrl.store.client import Store

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
        if policy.folder is None:
            continue
        evaluation = await identify(store, configs, policy, read)
        stored = await store.evaluations.get(evaluation.id)
        if stored is None or stored.results is None:
            due.append((evaluation, policy))
    return due


async def _published(store: Store, seen: set[int]) -> Sequence[PolicyVersion]:
    """Return the published versions that are not in ``seen``, newest first."""
    found: list[PolicyVersion] = []
    below: int | None = None
    while page := await store.policy_versions.published(_PAGE, below=below):
        new = [item for item in page if item.id not in seen]
        found += new
        if len(new) < len(page):
            break
        below = page[-1].id
    seen.update(item.id for item in found)
    return found
