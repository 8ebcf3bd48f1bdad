"""``agentrl whatif`` on a real database: replays bit for bit, other losses, other groups, refusals."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
from db_command import violations
from stored_run import StoredRun
from tiny_policy import write_tiny_policy

from agentrl.documents.training import TrainStep

pytestmark = pytest.mark.integration
TIMES = ("seconds", "per_second", "mfu", "groups_open", "groups_ready", "published_", "stale", "quarantined")


@pytest.fixture(scope="module")
def run(mongo_uri: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredRun]:
    """Four steps of two groups, with checkpoints of steps 2 and 4; tests only read it.

    The trainer of the last two steps has another learning rate, and the first one another ``--max_steps``.
    """
    folder = tmp_path_factory.mktemp("whatif")
    run = StoredRun(f"t{time.monotonic_ns()}", mongo_uri, write_tiny_policy(folder / "base"), folder)
    asyncio.run(run.fill(8))
    run.train("--max_steps", "2")
    run.train("--learning_rate", "5e-3")
    yield run
    children = ("same", "gspo", "dpo", "rules", "scorer", "order", "fork2", "fork4")
    asyncio.run(run.drop(*(f"{run.name}_{name}" for name in children)))


def exact(step: TrainStep) -> dict[str, Any]:
    """The metrics that do not depend on time, nor on which steps are published."""
    return {name: value for name, value in step.metrics.items() if not any(part in name for part in TIMES)}


async def digest(run: StoredRun, name: str) -> str:
    async with await run.open(name) as store:
        newest = await store.policy_versions.latest()
    assert newest.digest is not None
    return newest.digest


async def test_unchanged_settings_give_the_same_run_bit_for_bit(run: StoredRun) -> None:
    same = f"{run.name}_same"
    said = run.whatif(same)
    assert f"the end of the data: every step of {run.name} up to 4 is trained" in said
    steps, again = await run.steps(), await run.steps(same)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert [exact(step) for step in again] == [exact(step) for step in steps]
    assert [step.data for step in again] == [step.data for step in steps]
    assert [step.recorded and step.recorded.step for step in again] == [1, 2, 3, 4]
    assert [step.metrics["lr"] for step in again] == [1e-2, 1e-2, 5e-3, 5e-3]
    assert await digest(run, same) == await digest(run, run.name)
    async with await run.open(same) as store:
        assert await violations(store) == []
        (flags,) = (await store.settings.resolved()).values()
    assert flags.threads == 1
    assert flags.values["autocast_bf16"] == "false", "what auto came to for the parent, whose model is narrow"
    page = (run.folder / same / "whatif.html").read_text()
    assert "cosine of the weights 1.0000" in page
    assert "<td>layer 1</td><td>0.000e+00</td>" in page


async def test_steps_between_checkpoints_are_led_up_to_as_the_parent_trained_them(run: StoredRun) -> None:
    """From the checkpoint of step 2, step 3 is the parent's, and GSPO trains step 4 alone."""
    gspo = f"{run.name}_gspo"
    run.whatif(gspo, "--steps", "4-4", "--loss_calculater", "GSPO", "--learning_rate", "3e-3")
    steps, again = await run.steps(), await run.steps(gspo)
    assert [(step.step, step.inherited) for step in again] == [(1, True), (2, True), (3, False), (4, False)]
    assert exact(again[2]) == exact(steps[2])
    assert again[3].data == steps[3].data
    assert again[3].metrics["lr"] == 3e-3
    assert again[3].metrics["kl_k3"] == steps[3].metrics["kl_k3"], "the weights are still the parent's"
    assert again[3].metrics["loss"] != steps[3].metrics["loss"]
    async with await run.open(gspo) as store:
        begun = await store.ancestry.parent()
        assert begun.changed["loss_calculater"] == ["GRPO", "GSPO"]
        assert begun.changed["epsilon"] == [0.2, 3e-4]
        assert (begun.step, begun.since, begun.steps) == (2, 4, (4, 4))
        assert await violations(store) == []
    run.whatif(gspo, "--steps", "4-4", "--loss_calculater", "GSPO", "--learning_rate", "3e-3")
    assert await run.steps(gspo) == again, "the same command finds nothing to do"
    page = run.folder / "pages" / "both.html"
    output = run.command("whatif", "--compare", gspo, *run.here(), "--out", str(page))
    assert "token cosine" in output
    text = page.read_text()
    assert "loss_calculater: GRPO → GSPO" in text
    assert "<mark>" in text
    assert "<td>layer 0</td>" in text
    assert "<td>layer 0</td><td>0.000e+00</td>" not in text


async def test_a_fork_is_given_the_flags_of_the_step_where_it_begins(run: StoredRun) -> None:
    for step, rate in ((2, "0.01"), (4, "0.005")):
        name = f"{run.name}_fork{step}"
        where = ("--from_step", str(step), "--db_connection_string", run.uri)
        said = run.command("fork", run.name, name, *where)
        assert f"--learning_rate {rate}" in said
        assert ("--max_steps 2" in said) == (step == 2)


async def test_an_order_seed_shuffles_the_steps_behind_the_lead_in(run: StoredRun) -> None:
    order, steps = f"{run.name}_order", await run.steps()
    run.whatif(order, "--steps", "2-4", "--order_seed", "3")
    again = await run.steps(order)
    assert exact(again[0]) == exact(steps[0])
    trained = [step.recorded.step for step in again if step.recorded is not None]
    assert trained[1:] != [2, 3, 4]
    assert sorted(trained) == [1, 2, 3, 4]
    assert [step.data for step in again] == [steps[number - 1].data for number in trained]
    assert [step.metrics["lr"] for step in again] == [1e-2, 1e-2, 5e-3, 5e-3], "the rate stays at its place"
    run.whatif(order, "--steps", "2-4", "--order_seed", "3")
    assert await run.steps(order) == again
    async with await run.open(order) as store:
        assert await violations(store) == []


async def test_another_scorer_scores_for_the_child_alone(run: StoredRun) -> None:
    scorer, steps = f"{run.name}_scorer", await run.steps()
    run.whatif(scorer, "--scorer", "stored_run:opposite", "--steps", "1-1")
    [again] = await run.steps(scorer)
    async with await run.open() as store:
        records = await store.database["Record"].find({"_id": {"$in": list(steps[0].data)}}).to_list()
    assert again.scores == {record["_id"]: 1.0 - record["score"] for record in records}
    assert again.metrics["reward"] == 1.0 - steps[0].metrics["reward"]
    assert again.data == steps[0].data


async def test_preferences_train_the_best_against_the_worst_of_stored_groups(run: StoredRun) -> None:
    """The flags of the parent's loss give way to those of DPO; the reference is the run's base model.

    The parent's trainer computed with three threads, as far as the what-if knows.
    """
    dpo = f"{run.name}_dpo"
    async with await run.open() as store:
        of_trainers = {"_id": {"$regex": "^flags/train"}}
        await store.database["Settings"].update_many(of_trainers, {"$set": {"threads": 3}})
    said = run.whatif(dpo, "--loss_calculater", "DPO", "--preference_beta", "0.5")
    assert "computes with the threads of the trainer that made the steps: 3" in said
    async with await run.open(dpo) as store:
        (flags,) = (await store.settings.resolved()).values()
    assert flags.threads == 3
    parents, own = await run.steps(), await run.steps(dpo)
    assert own[0].metrics["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert own[-1].metrics["kl_reference"] > 0.0
    for step, parent in zip(own, parents, strict=True):
        assert 0 < step.metrics["trainable_tokens"] < parent.metrics["trainable_tokens"]


async def test_groups_are_decided_again_by_other_rules_and_without_records(run: StoredRun) -> None:
    """A record that is left out is in no baseline; what a run cannot change is refused by name."""
    rules, steps = f"{run.name}_rules", await run.steps()
    gone = steps[0].data[1]
    (run.folder / "ids.txt").write_text(f"{gone}\n")
    run.whatif(rules, "--advantage", "dr_grpo", "--without", str(run.folder / "ids.txt"), "--steps", "1-2")
    again = await run.steps(rules)
    assert set(steps[0].data) - set(again[0].data) == {gone}
    assert again[1].data == steps[1].data
    assert again[1].metrics["loss"] != steps[1].metrics["loss"]
    async with await run.open(rules) as store:
        groups = (await store.settings.all())["groups"]
        assert groups.values["advantage"] == "dr_grpo"
        assert await violations(store) == []
    (run.folder / "unknown.txt").write_text("train/0/nobody/0/1\n")
    for flags, said in {
        ("--lora_rank", "4"): "--lora_rank cannot differ from the parent's",
        ("--steps", "1-9"): "has trained 4 steps",
        ("--learning_rate", "1e-3"): "was not begun as this what-if",
        ("--loss_calculater", "OPD"): "reads the logprobs of a teacher",
        ("--advantage", "nosuch"): "unknown advantage estimator 'nosuch'",
        ("--without", str(run.folder / "unknown.txt")): "names 1 Records that run",
    }.items():
        assert said in run.whatif(rules, *flags, code=2)
    async with await run.open() as store:
        await store.database["DBRecordData"].delete_one({"_id": steps[2].data[0]})
    assert "no longer holds the data of 1 of its steps: 3" in run.whatif(f"{rules}2", code=1)
