"""Random steps of training data: groups of multi-turn trajectories, as a run converts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentrl.config.schema import GroupConfig
from agentrl.config.training import VERSION_LOGPROBS
from agentrl.data.finalize_group import to_training_data
from agentrl.documents.model_call import DispatchedSamplingTask, VersionSpan, pack_floats, pack_ids
from agentrl.documents.record import Record, TokenColumns
from agentrl.documents.status import CallStatus
from agentrl.documents.task import Task
from agentrl.documents.training import DBRecordData
from exactness.models import VOCABULARY

TEMPERATURES = (0.8, 1.0, 1.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call: ids read since the call before, ids generated, and whether the context was reset."""

    context: int
    output: int
    reset: bool = False
    is_failed: bool = False
    """A failed call is not trained, but later calls continue it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A step without its ids: ``groups[g][t]`` are the turns of trajectory t of group g."""

    groups: Sequence[Sequence[Sequence[Turn]]]
    system: int = 4
    """Ids that every prompt begins with."""
    question: int = 5
    """Ids after them, the same for a group."""
    kinds: int = VOCABULARY
    """Number of different ids; with fewer, more trajectories generate the same by chance."""


def make_step(shape: Shape, seed: int) -> list[DBRecordData]:
    """Return training data of ``shape``: ids, advantages, logprobs and versions from ``seed``.

    The calls of a trajectory have the temperatures of ``TEMPERATURES`` in turn.
    """
    rng = np.random.default_rng(seed)
    system = _ids(rng, shape.system, shape.kinds)
    data = []
    for g, group in enumerate(shape.groups):
        prompt = system + _ids(rng, shape.question, shape.kinds)
        for t, turns in enumerate(group):
            item = _trajectory(rng, f"g{g}", f"g{g}/{t}", prompt, turns, shape.kinds)
            if item is not None:
                data.append(item)
    return data


def random_shape(seed: int) -> Shape:
    """Return up to three groups of up to four trajectories of up to four turns, some with resets."""
    rng = np.random.default_rng(seed)

    def turn(first: bool) -> Turn:
        return Turn(
            context=int(rng.integers(0, 6)),
            output=int(rng.integers(1, 7)),
            reset=not first and bool(rng.random() < 0.25),
            is_failed=bool(rng.random() < 0.1),
        )

    groups = [
        [[turn(i == 0) for i in range(rng.integers(1, 5))] for _ in range(rng.integers(1, 5))]
        for _ in range(rng.integers(1, 4))
    ]
    return Shape(groups=groups, kinds=int(rng.choice([3, VOCABULARY])))


def _trajectory(
    rng: np.random.Generator,
    task: str,
    name: str,
    prompt: list[int],
    turns: Sequence[Turn],
    kinds: int,
) -> DBRecordData | None:
    calls: list[DispatchedSamplingTask] = []
    for index, turn in enumerate(turns):
        starts = index == 0 or turn.reset
        context = (prompt if starts else []) + _ids(rng, turn.context, kinds)
        output = _ids(rng, turn.output, kinds)
        middle = int(rng.integers(0, len(output) + 1))
        calls.append(
            DispatchedSamplingTask(
                id=f"{name}/{index}", record=name, index=index, parent=None if starts else calls[-1].id,
                status=CallStatus.FAILED if turn.is_failed else CallStatus.COMPLETED, finish_reason="stop",
                messages=(), response={},
                versions=(
                    VersionSpan(version=0, start=0, end=middle),
                    VersionSpan(version=2, start=middle, end=len(output)),
                ),
                prompt_tokens=0, generated_tokens=len(output), engine="", generate_seconds=0.0,
                sampling_params={"temperature": TEMPERATURES[index % len(TEMPERATURES)]},
                context_ids=pack_ids(context), output_ids=pack_ids(output),
                logprobs=pack_floats((-4 + rng.normal(size=len(output))).tolist()),
            )
        )  # fmt: skip
    advantage, turn_advantages = float(rng.normal()), rng.normal(size=len(turns)).tolist()
    record = Record(id=name, task=task, traj_id=0, attempt=1, split="train", epoch=0, query="", score=1.0)
    group = Task(id=task, task_id=task, split="train", epoch=0, order=0, query="")
    config = GroupConfig(minimal_advantage=0.0)
    item = to_training_data(group, record, calls, advantage, config, turn_advantages=turn_advantages)
    return None if item is None else replace(item, columns=_columns(item))


def _columns(item: DBRecordData) -> bytes:
    """Return logprobs at each token's version. A seed of their own leaves the step's draws as they are."""
    drawn = np.random.default_rng(item.tokens).normal(-4, 1, item.trainable_tokens)
    return TokenColumns({VERSION_LOGPROBS: drawn.astype(np.float32)}).pack()


def _ids(rng: np.random.Generator, count: int, kinds: int) -> list[int]:
    return [int(index) for index in rng.integers(0, kinds, count)]
