"""Name an evaluation by its policy, its tasks and its settings, so that a changed one is another one."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentrl.config.load import Configs
from agentrl.config.schema import (
    AgentConfig,
    EvaluationConfig,
    GroupConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
)
from agentrl.documents.run import Evaluation
from agentrl.documents.task import Task
from agentrl.documents.task_file import ReadResult
from agentrl.errors import TaskFileError
from agentrl.evaluation.policy import Policy
from agentrl.rollout.load_tasks import read_source
from agentrl.store.evaluations import content_digest, digest

if TYPE_CHECKING:
    from agentrl.store.client import Store

_ID_LENGTH = 8
_UNREAD_SPLIT = "eval"
_MODEL_SETTINGS = ("chat_template", "chat_format", "chat_template_kwargs", "thinking_retention", "dtype")


async def identify(
    store: Store, configs: Configs, policy: Policy, read: ReadResult | None = None
) -> Evaluation:
    """Return the evaluation of ``policy`` by the flags; it need not be stored. Raises TaskFileError.

    ``read`` is the task file, if it has been read already.
    """
    tasks, flags = configs[TaskConfig], configs[EvaluationConfig]
    read = read or await read_file(configs, _UNREAD_SPLIT)
    tasks_digest = await asyncio.to_thread(digest_tasks, read.tasks)
    settings = sampling_settings(configs)
    settings_digest = digest(settings)
    both = hashlib.sha256(f"{tasks_digest} {settings_digest}".encode()).hexdigest()[:_ID_LENGTH]
    rules = await evaluation_rules(store, configs)
    return Evaluation(
        id="-".join(filter(None, ("eval", policy.name, both, flags.eval_label))),
        version=policy.version,
        step=policy.step,
        model=policy.folder,
        model_digest=policy.digest,
        file=str(tasks.eval_file),
        tasks_digest=tasks_digest,
        settings_digest=settings_digest,
        settings=settings,
        samples=tasks.num_generations,
        label=flags.eval_label,
        right_threshold=rules.right_threshold,
    )


async def read_file(configs: Configs, split: str) -> ReadResult:
    """Read ``--eval_file`` for ``split``. Raises TaskFileError, also if it holds no tasks."""
    tasks = configs[TaskConfig]
    return await read_source(str(tasks.eval_file), tasks, split=split, seed=configs[RunConfig].seed)


async def read_unchanged(configs: Configs, evaluation: Evaluation) -> ReadResult:
    """Read the tasks of ``evaluation`` again, for its split. Raises TaskFileError if they have changed."""
    read = await read_file(configs, evaluation.id)
    if await asyncio.to_thread(digest_tasks, read.tasks) != evaluation.tasks_digest:
        raise TaskFileError(
            f"the task file {evaluation.file} changed while it was read",
            hint="start the evaluation when no process writes to it",
        )
    return read


def digest_tasks(tasks: Sequence[Task]) -> str:
    """Return a hash of the content of tasks; their order does not matter."""
    return digest(sorted((task.task_id, content_digest(task)) for task in tasks))


def sampling_settings(configs: Configs) -> dict[str, Any]:
    """Return the flags that change what is sampled."""
    model, sampling = configs[ModelConfig], configs[SamplingConfig]
    return {
        "num_generations": configs[TaskConfig].num_generations,
        "seed": configs[RunConfig].seed,
        "max_new_tokens": sampling.max_new_tokens,
        "preferred_sampling_params": sampling.preferred_sampling_params,
        **dataclasses.asdict(configs[AgentConfig]),
        **{name: getattr(model, name) for name in _MODEL_SETTINGS},
    }


async def evaluation_rules(store: Store, configs: Configs) -> GroupConfig:
    """Return the group flags, with the run's ``right_threshold`` where none is given."""
    rules = configs[GroupConfig]
    groups = (await store.settings.all()).get("groups")
    threshold = None if groups is None else groups.values.get("right_threshold")
    if threshold is None or "right_threshold" in configs.given:
        return rules
    return replace(rules, right_threshold=float(threshold))
