"""Find tasks whose score changed between two evaluations; make training data of their trajectories."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from agentrl.config.load import Configs
from agentrl.config.schema import GroupConfig, ModelConfig, TrainConfig
from agentrl.data.planner import packing_problem
from agentrl.data.step_source import images_of
from agentrl.data.trajectory_tree import to_training_data
from agentrl.documents.run import Evaluation
from agentrl.documents.task import task_key
from agentrl.documents.training import DBRecordData
from agentrl.errors import ConfigError
from agentrl.evaluation.report import evaluated_tasks
from agentrl.train.influence import Images
from agentrl.weights.folder import architecture, base_folder

if TYPE_CHECKING:
    from agentrl.store.client import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedTask:
    """A held-out task of both evaluations whose mean score changed."""

    task_id: str
    before: float
    after: float

    @property
    def change(self) -> float:
        """Return after − before."""
        return self.after - self.before


async def changed_tasks(
    store: Store, configs: Configs, a: Evaluation, b: Evaluation, which: Literal["fell", "rose", "all"]
) -> list[ChangedTask]:
    """Return the tasks of both evaluations whose mean score ``fell``, ``rose``, or changed at all."""
    scores: dict[tuple[str, str], list[float]] = defaultdict(list)
    for evaluation in (a, b):
        for task in await evaluated_tasks(store, configs, evaluation):
            if task.scores:
                scores[task.task_id, task.digest].append(statistics.fmean(task.scores))
    both = [
        ChangedTask(task_id=task_id, before=means[0], after=means[1])
        for (task_id, _), means in scores.items()
        if len(means) == 2
    ]
    if not both:
        raise ConfigError(
            f"{a.id} and {b.id} have no scored task in common",
            hint="evaluate both versions on the same --eval_file",
        )
    wanted = {"fell": (-1,), "rose": (1,), "all": (-1, 1)}[which]
    changed = [task for task in both if (task.change > 0) - (task.change < 0) in wanted]
    if not changed:
        raise ConfigError(
            f"the mean score of no task {'changed' if which == 'all' else which} from {a.id} to {b.id}"
            f" ({len(both)} tasks)",
            hint="--changes all explains any change; more --eval_samples tell small changes apart",
        )
    return changed


async def held_out_data(
    store: Store, configs: Configs, evaluations: Sequence[Evaluation], tasks: Sequence[ChangedTask]
) -> tuple[list[DBRecordData], Images]:
    """Return the trajectories of ``tasks`` in both evaluations as training data, and their images.

    The advantage of trajectory i of task t is w·(s_i − mean score of t)/n with n trajectories of t and
    w = change of t / Σ|change|. So Σ A·∇log π estimates the policy gradient of Σ w·score: along it tasks
    change as they did.
    """
    total = sum(abs(task.change) for task in tasks)
    rules = GroupConfig(drop_zero_advantage=False)
    vocab_size = int(architecture(base_folder(configs[ModelConfig]))["vocab_size"])
    limit = configs[TrainConfig].max_tokens
    data: list[DBRecordData] = []
    for task in tasks:
        groups = [await store.groups.stored(task_key(item.id, 0, task.task_id)) for item in evaluations]
        scored = [
            (group, record, record.score)
            for group in groups
            if group is not None
            for record in group.records
            if record.score is not None and record.id in group.calls
        ]
        mean = statistics.fmean(score for _, _, score in scored)
        for group, record, score in scored:
            advantage = task.change / total * (score - mean) / len(scored)
            calls = group.calls[record.id]
            made = to_training_data(group.task, record, calls, advantage, rules, supervised=True)
            if made and packing_problem(made, vocab_size=vocab_size, max_tokens=limit) is None:
                data.append(made)
    if not any(item.advantage for item in data):
        raise ConfigError(
            "no trajectory of the evaluations can be read: their model calls are deleted",
            hint="evaluate both versions again",
        )
    return data, await images_of(store, data)
