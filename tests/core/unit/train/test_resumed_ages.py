"""A real trainer that is resumed: every token has the age that it has in a run left in peace."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_store import FakeStore
from training_data import group, sampled_by

from agentrl.data.stream import Freshness
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import DataStatus, StepStatus, VersionStatus
from agentrl.train.step import PolicyTrainer

STEPS, KEPT = 4, 2
"""Steps before the trainer is resumed, and the step that it is resumed at."""

Seen = dict[int, list[tuple[str, list[int], list[float]]]]
"""What each step trained: an id, and the age and the advantage of each span."""

POLICIES = {
    "keep": (Freshness(max_staleness=1, policy="keep"), 2),
    "drop": (Freshness(max_staleness=1, policy="drop"), 1),
    "mask": (Freshness(max_staleness=1, policy="mask"), 2),
    "decay": (Freshness(max_staleness=1, policy="decay", decay=0.5), 2),
}
"""With how many steps old the oldest tokens of every group are."""


class Sampler:
    """Samples a group with the weights of every step: its second trajectory was begun under older ones."""

    def __init__(self, store: FakeStore, lag: int) -> None:
        self.store, self.lag, self.publish = store, lag, store.policy_versions.publish
        self.of_step: dict[int, int] = {}

    async def __call__(self, version: PolicyVersion, **more: Any) -> None:
        """What ``publish`` does, and a group of each step whose weights are published for the first time."""
        await self.publish(version, **more)
        if version.step in self.of_step:
            return
        self.of_step[version.step] = version.id
        name = chr(ord("a") + version.step)
        self.store.places[name] = (0, version.step)
        first, second = group(name)
        older = self.of_step[max(0, version.step - self.lag)]
        self.store.add(sampled_by(first, version.id), sampled_by(second, older, version.id))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What is trained, from here on."""
    trained: Seen = {}
    train = PolicyTrainer.train

    def watch(self: PolicyTrainer, data: Any, ages: Any, images: Any) -> Any:
        trained[self.scheduler.last_epoch + 1] = [
            (item.id, [ages[span.version] for span in item.spans], [span.advantage for span in item.spans])
            for item in data
        ]
        return train(self, data, ages, images)

    monkeypatch.setattr(PolicyTrainer, "train", watch)
    return trained


@pytest.mark.parametrize("policy", POLICIES)
async def test_ages_are_those_of_a_run_left_in_peace(
    starter: Callable[..., Any], seen: Seen, tmp_path: Path, policy: str
) -> None:
    freshness, lag = POLICIES[policy]
    flags = {"freshness": freshness, "groups_per_step": 1, "save_total_limit": 9}

    def sampled() -> FakeStore:
        store = FakeStore()
        store.unfinished_groups = 1
        store.policy_versions.publish = Sampler(store, lag)
        return store

    await (await starter(sampled(), tmp_path / "peace")("none", max_steps=STEPS + 1, **flags)).run()
    peace = dict(seen)
    assert sorted(peace) == [1, 2, 3, 4, 5]
    assert peace[5][1][1] == ([lag, 0] if policy != "mask" else [0])

    for way in ("replayed", "chosen anew"):
        store, output = sampled(), tmp_path / way
        start = starter(store, output)
        await (await start("none", max_steps=STEPS, **flags)).run()
        seen.clear()
        for step in range(KEPT + 1, STEPS + 1) if way == "replayed" else ():
            shutil.rmtree(output / f"checkpoint-{step:06d}")
        choice = "auto" if way == "replayed" else str(output / f"checkpoint-{KEPT:06d}")
        trainer = await start(choice, max_steps=STEPS + 1, **flags)
        trainer.controller.trainer.optimizer.param_groups[0]["lr"] *= 2
        await trainer.run()
        withdrawn = [v.id for v in store.versions.values() if v.status is VersionStatus.WITHDRAWN]
        assert (withdrawn, max(store.versions)) == ([3, 4], 7), way
        assert seen == {step: peace[step] for step in (3, 4, 5)}, way
        assert store.with_status(DataStatus.STALE) == []
        committed = [item for item in store.train_steps.values() if item.status is StepStatus.COMMITTED]
        histograms = [item.metrics["staleness_histogram"] for item in committed if item.step > KEPT]
        assert [list(found) for found in histograms] == [["0"] if policy == "mask" else ["0", str(lag)]] * 3
