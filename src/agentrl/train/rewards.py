"""The reward of a step: means over all trajectories of the groups finalised since the step before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from agentrl.documents.training import TrainStep

if TYPE_CHECKING:
    from agentrl.store.client import Store


async def reward_metrics(
    store: Store, split: str, groups: Sequence[str], until: datetime | None
) -> dict[str, Any]:
    """``reward``, ``pass_rate`` and ``reward_until``, the moment from which the next step goes on.

    Trained and abandoned groups count alike, so that the curve shows the policy and not the filter. Where
    none was finalised after ``until``, they are means over the step's own ``groups``.
    """
    summaries = await store.training.group_summaries(split, after=until)
    if summaries:
        until = max(summary["finalised_at"] for summary in summaries)
    else:
        tasks = [await store.tasks.get(group) for group in groups]
        summaries = [task.group for task in tasks if task is not None and task.group is not None]
    metrics: dict[str, Any] = trajectory_means(summaries)
    if until is not None:
        metrics["reward_until"] = until
    return metrics


def trajectory_means(summaries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """``reward`` and ``pass_rate`` over every scored trajectory of the groups; empty without one."""
    scored = sum(summary["scored"] for summary in summaries)
    if not scored:
        return {}
    return {
        "reward": sum(s["mean_score"] * s["scored"] for s in summaries if s["scored"]) / scored,
        "pass_rate": sum(s["pass_rate"] * s["scored"] for s in summaries if s["scored"]) / scored,
    }


def reward_until(steps: Sequence[TrainStep]) -> datetime | None:
    """Where the newest of ``steps`` that knows it ended."""
    moments = [step.metrics["reward_until"] for step in steps if step.metrics.get("reward_until")]
    return max(moments, default=None)
