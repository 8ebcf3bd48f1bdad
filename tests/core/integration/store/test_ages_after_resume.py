"""Ages in a run that was resumed at step 10 of 20 are those of a run left in peace, on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from training_data import group, sampled_by

from agentrl.config.schema import RunConfig
from agentrl.data.forest import forest_from_data
from agentrl.data.stream import DataStream, Freshness, StreamSettings
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import DataStatus
from agentrl.documents.task import Slot, Task, task_key
from agentrl.store.client import Store, open_store

pytestmark = pytest.mark.integration

STEPS = range(11, 16)
LAG = 2
"""``max_staleness``."""
GROUPS: Mapping[str, Sequence[Sequence[int]]] = {
    "first": [[10], [10, 8]], "second": [[11, 10], [11]], "third": [[12, 8, 12, 12], [9, 9, 11, 12]],
    "fourth": [[12, 11], [12]], "fifth": [[8], [12]],
}  # fmt: skip
"""The steps of the weights that sampled each trajectory, in the order in which the groups were begun.

Under ``drop`` the third and the fifth are stale, under ``mask`` the first trajectory of the fifth.
"""
POLICIES = {
    "keep": Freshness(max_staleness=LAG, policy="keep"),
    "drop": Freshness(max_staleness=LAG, policy="drop"),
    "mask": Freshness(max_staleness=LAG, policy="mask"),
    "decay": Freshness(max_staleness=LAG, policy="decay", decay=0.5),
}


@dataclass(frozen=True)
class Trained:
    """What a step trains: its groups, and each token's age, advantage and logprob."""

    groups: tuple[str, ...]
    tokens: tuple[tuple[str, list[int], list[float], list[float]], ...]


async def publish(store: Store, steps: Mapping[int, int]) -> None:
    """Versions without files: {version: the step it was published at}."""
    for version, step in steps.items():
        await store.policy_versions.publish(
            PolicyVersion(id=version, step=step, location=str(version), files=(), train_step=None)
        )


async def add_groups(
    store: Store,
    version_of: Mapping[int, int],
    groups: Mapping[str, Sequence[Sequence[int]]] = GROUPS,
) -> None:
    """Groups sampled by ``version_of`` each step."""
    for order, (name, trajectories) in enumerate(groups.items()):
        key = task_key("train", 0, name)
        slots = tuple(Slot(traj_id=traj) for traj in range(len(trajectories)))
        task = Task(id=key, task_id=name, split="train", epoch=0, order=order, query="?", slots=slots)
        await store.tasks.load([task])
        items = [
            sampled_by(item, *(version_of[step] for step in steps))
            for item, steps in zip(group(key, size=len(trajectories)), trajectories, strict=True)
        ]
        await store.database["DBRecordData"].insert_many([item.to_document() for item in items])


def stream(store: Store, policy: str, replay: Mapping[int, tuple[str, ...]] | None = None) -> DataStream:
    settings = StreamSettings(groups_per_step=1, num_epochs=1, wait_seconds=20.0, freshness=POLICIES[policy])
    return DataStream(store, settings, replay)


async def train(store: Store, data: DataStream, step: int) -> Trained:
    """Take the data of ``step`` as a trainer does, and mark them trained."""
    batch = await data.take(step)
    assert batch is not None
    ids = [item.id for item in batch.data]
    change: dict[str, Any] = {"$set": {"status": DataStatus.TRAINED.value}}
    await store.database["DBRecordData"].update_many({"_id": {"$in": ids}}, change)
    forests = [(item.id, forest_from_data([item], ages=batch.ages)) for item in batch.data if item.spans]
    return Trained(
        batch.groups,
        tuple((id, f.age.tolist(), f.advantage.tolist(), f.behavior_logprob.tolist()) for id, f in forests),
    )


async def statuses(store: Store) -> dict[str, str]:
    documents = await store.database["DBRecordData"].find({}, {"status": 1}).to_list()
    return {document["_id"]: document["status"] for document in documents}


@pytest.fixture
async def peace(run_config: RunConfig) -> AsyncIterator[Store]:
    """A run whose versions have the numbers of their steps."""
    config = replace(run_config, run_name=f"{run_config.run_name}_peace")
    async with await open_store(config) as opened:
        await publish(opened, {number: number for number in range(21)})
        yield opened
        await opened.database.client.drop_database(config.run_name)


@pytest.fixture
async def resumed(store: Store) -> Store:
    """A run that had 20 steps and was resumed at step 10."""
    await publish(store, {number: number for number in range(21)})
    await store.policy_versions.withdraw_after(10)
    return store


async def undisturbed(peace: Store, policy: str) -> tuple[list[Trained], dict[str, str]]:
    """What the run left in peace trains in ``STEPS``, and the states of its data afterwards."""
    await add_groups(peace, {step: step for step in range(21)})
    data = stream(peace, policy)
    trained = [await train(peace, data, step) for step in STEPS[: 3 if policy == "drop" else None]]
    return trained, await statuses(peace)


@pytest.mark.parametrize("policy", POLICIES)
async def test_data_sampled_after_a_resume_have_their_ages(peace: Store, resumed: Store, policy: str) -> None:
    """Versions 21 to 24 are those of steps 11 to 14."""
    expected, states = await undisturbed(peace, policy)
    await publish(resumed, {10 + step: step for step in range(11, 15)})
    await add_groups(resumed, {step: step if step <= 10 else 10 + step for step in range(15)})
    data = stream(resumed, policy)
    assert [await train(resumed, data, step) for step in STEPS[: len(expected)]] == expected
    assert await statuses(resumed) == states


@pytest.mark.parametrize("policy", POLICIES)
async def test_steps_that_are_done_again_train_data_of_the_same_ages(
    peace: Store, resumed: Store, policy: str
) -> None:
    """Steps 11 to 15 train again what versions 11 and 12 sampled, which are withdrawn."""
    expected, _ = await undisturbed(peace, policy)
    await add_groups(resumed, {step: step for step in range(21)})
    replay = {
        step: tuple(id for id, *_ in trained.tokens) for step, trained in zip(STEPS, expected, strict=False)
    }
    data = stream(resumed, policy, replay)
    done = []
    for step in STEPS[: len(expected)]:
        done.append(await train(resumed, data, step))
        await publish(resumed, {10 + step: step})
    assert done == expected


@pytest.mark.parametrize(
    ("policy", "name", "ages"),
    [
        ("drop", "fresh", [[0, 0, 2, 2], [2, 2, 2, 2]]),
        ("mask", "older", [[0, 0], [0, 0, 0, 0]]),
        ("decay", "older", [[0, 0, 3, 3], [0, 0, 0, 0]]),
        ("keep", "older", [[0, 0, 3, 3], [0, 0, 0, 0]]),
    ],
)
async def test_a_withdrawn_version_has_the_age_of_its_step(
    resumed: Store, policy: str, name: str, ages: list[list[int]]
) -> None:
    """Version 20, of before the resume, began trajectories that the versions of steps 11 and 12 went on with.

    Step 15 starts from weights of 14 steps: the versions up to 11 and version 21 are too old.
    """
    await publish(resumed, {21: 11, 22: 12, 23: 13})
    numbers = {number: number for number in range(24)}
    await add_groups(resumed, numbers, {"older": [[20, 21], [20]], "fresh": [[20, 22], [12]]})
    trained = await train(resumed, stream(resumed, policy), 15)
    assert trained.groups == (task_key("train", 0, name),)
    assert [token_ages for _, token_ages, *_ in trained.tokens] == ages
